"""`fh.results` and `fh.curves`: runs, stages and archives as one frame."""

from __future__ import annotations

import json
import os
import tarfile
import time

import numpy as np
import pytest
from builders import write_run
from tiny_models import config_of

import ffn_heterogeneity as fh
from ffn_heterogeneity.io import runs as run_files
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.report import frame as frames


def test_curves_of_a_run_that_has_not_ended(tmp_path):
    """A measurement per layer has a row for each layer."""
    rows = [{"step": 1, "psi": [0.5, 0.25], "train/loss": 2.0}, {"step": 2, "train/loss": "nan"}]
    write_run(tmp_path / "begun", {"model": "m", "seed": 3}, rows=rows)
    begun = fh.curves(tmp_path / "begun")
    assert list(begun[begun.what == "psi"].layer) == [1, 2] and set(begun.model) == {"m"}
    assert np.isnan(begun[begun.step == 2].value.item()) and set(begun.seed) == {3}


def test_a_step_that_was_written_twice_has_its_later_row(tmp_path):
    """Rows repeated after a crash; training and evaluation rows of one step are both there."""
    rows = [{"step": 1, "train/loss": x} for x in (3.0, 2.0)]
    write_run(tmp_path / "run", {"model": "m"}, rows=[*rows, {"step": 1, "validation/nll": 5.0}])
    curves = fh.curves(tmp_path / "run")
    assert dict(zip(curves.what, curves.value, strict=True)) == {"loss": 2.0, "nll": 5.0}


def test_results_and_curves_read_together_name_models_alike(tmp_path):
    """A run that has not ended may have another model of the same short name."""
    write_run(tmp_path / "a", {"model": "x/small"}, {"nll": 1.0})
    write_run(tmp_path / "b", {"model": "y/small"}, rows=[{"step": 1, "train/loss": 2.0}])
    measured, curves, _ = frames.everything(tmp_path)
    assert (set(measured.model), set(curves.model)) == ({"x/small"}, {"y/small"})


def test_the_units_of_an_archive_that_was_written_again(tmp_path):
    path = tmp_path / "all.tar"
    for i, windows in enumerate(([1.0, 2.0], [3.0, 4.0])):
        run = tmp_path / str(i) / "run"
        write_run(run, {"model": "m"}, {"nll": 1.0, "nll_windows": windows})
        with tarfile.open(path, "w") as archive:
            archive.add(run, "run")
        os.utime(path, (i, i))
        row = fh.results(path).iloc[0]
        assert frames.units(row.run, row.units) == dict(enumerate(windows))
    assert frames.units(f"{path}/nobody", "results.json:nll_windows") == {}
    results = {"nll": 1.0, "nll_windows": [1.0, 2.0], "window_documents": [5, 7]}
    write_run(tmp_path / "run", {"model": "m"}, results)
    assert frames.units(str(tmp_path / "run"), row.units) == {(5, 0): 1.0, (7, 1): 2.0}
    (tmp_path / "run/samples").mkdir()
    sample = json.dumps({"doc_id": 4, "text": "a\u2028b", "acc": 1.0}, ensure_ascii=False)
    (tmp_path / "run/samples/boolq.jsonl").write_text(sample + "\n")
    assert frames.units(str(tmp_path / "run"), "samples/boolq.jsonl:acc") == {4: 1.0}
    scores = {"strict-match": 0.0, "flexible-extract": 1.0}  # of one answer, by two filters
    samples = ({"doc_id": 4, "filter": name, "exact_match": x} for name, x in scores.items())
    path = tmp_path / "run/samples/gsm8k.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for name, score in scores.items():
        spec = f"samples/gsm8k.jsonl:exact_match_{name}"
        assert frames.units(str(tmp_path / "run"), spec) == {4: score}
    assert frames.units(str(tmp_path / "run"), "samples/gsm8k.jsonl:exact_match") == {}


def test_metrics_may_be_longer_than_other_files(tmp_path, monkeypatch):
    write_run(tmp_path / "run", {"model": "m"}, rows=[{"step": i, "loss": 1.0} for i in range(90)])
    monkeypatch.setattr(run_files, "MAX_FILE", 1000)
    assert len(fh.curves(tmp_path / "run", what=["loss"])) == 90


def test_numbers_that_are_none_and_text_that_is_markdown(tmp_path):
    task = {"n": 3, "acc": 0.5, "acc_low": 0.1, "acc_high": 0.9}
    results = {"nll": float("nan"), "perplexity": float("inf"), "note": "| <b>bold</b> |"}
    results |= {"ok": True, "tasks": {"<script>": task}}
    write_results(tmp_path, results)
    frame = fh.results(tmp_path)
    assert set(frame.what) == {"nll", "perplexity", "acc"}
    assert set(frame.task.dropna()) == {"<script>"}
    values = frame.set_index("what").value
    assert np.isnan(values["nll"]) and np.isinf(values["perplexity"])


@pytest.mark.parametrize(
    ("stages", "ratio"),
    [(["prune"], 0.5), ([[1], {}, "prune"], 0.5), (5, None), ("prune", None), (None, None)],
)
def test_a_stage_has_the_groups_of_all_stages(tmp_path, stages, ratio):
    """Points that the parent lists, whatever else is in the directory."""
    write_run(tmp_path, {"stages": stages, "prune": {"ratio": 0.5}})
    write_run(tmp_path / "00_score", {"seed": 1}, {"nll": 2.0})
    (row,) = fh.results(tmp_path).to_dict("records")
    found = row.get("config.prune.ratio")
    assert row["seed"] == 1 and (found == ratio or (ratio is None and np.isnan(found)))


def test_what_is_no_run_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="neither a directory nor an archive of runs"):
        fh.results(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no run"):
        fh.results(tmp_path)
    (tmp_path / "bad.tar.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"bad.tar.xz is not a readable archive"):
        fh.results(tmp_path / "bad.tar.xz")
    (tmp_path / "results.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="malformed: it holds a list"):
        fh.results(tmp_path)
    monkeypatch.setattr(run_files, "MAX_FILE", 3)
    with pytest.raises(ValueError, match="more than the 3"):
        fh.results(tmp_path)


def test_a_thousand_runs_are_read_in_seconds(tmp_path):
    config = config_of("prune_table", model="m").to_dict()
    results = {"perplexity": 3.0, "nll": 1.1, "ffn_widths_after": [4] * 30}
    results |= {"nll_windows": [1.0] * 40, "windows": 40}
    for i in range(1000):
        write_run(tmp_path / f"run{i}", config | {"seed": i}, results)
    start = time.perf_counter()
    frame = fh.results(tmp_path)
    assert time.perf_counter() - start < 10 and frame.run.nunique() == 1000
    assert frame[frame.what == "ffn_widths_after"].layer.max() == 30
