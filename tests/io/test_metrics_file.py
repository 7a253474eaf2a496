"""metrics.jsonl: exact values, resuming without repeats, and TensorBoard's events."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest
from tiny_runs import refused

from ffn_heterogeneity.io import metrics as module
from ffn_heterogeneity.io.metrics import MetricsWriter, read_metrics
from ffn_heterogeneity.launch.cli import one_line


def test_values_read_back_exactly(tmp_path):
    value, layers = np.float32(0.1) / 3, np.array([1.5, np.nan, 0.1], np.float32)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(3, {"loss": value, "nucl/ent": layers, "count": np.int32(7), "name": "x"})
        row = json.loads((tmp_path / "metrics.jsonl").read_text())  # flushed before close
    assert row["step"] == 3 and row["count"] == 7 and row["name"] == "x"
    assert np.float32(row["loss"]) == value
    assert row["nucl/ent"][1] == "nan" and np.float32(row["nucl/ent"][2]) == layers[2]


def test_resume_drops_later_lines_and_a_torn_one(tmp_path, capsys):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(6):
            writer.write(step, {"loss": float(step)})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    with MetricsWriter(tmp_path, resume_step=3, tensorboard=False) as writer:
        writer.write(4, {"loss": 40.0})
    rows = read_metrics(path)
    assert "lost" not in capsys.readouterr().err
    assert [(r["step"], r["loss"]) for r in rows] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_new_run_starts_a_new_file(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(1, {"loss": 1.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_torn_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    refused("line 2 is not JSON", read_metrics, tmp_path / "metrics.jsonl")


def test_events_are_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0, "layers": np.arange(3.0), "table": np.ones((2, 2)), "s": "x"})
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"loss" in content and content.count(b"layers/layers") == 1 and b"table" not in content


def test_in_a_bucket_the_file_is_written_whole(tmp_path, monkeypatch):
    """An object in a bucket cannot be appended to: lines are kept and all written again."""
    monkeypatch.setattr(module, "is_bucket", lambda path: True)
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.5})
        metrics.write(2, {"loss": 1.25})
        assert metrics.rows == 2 and read_metrics(metrics.path) == []
        metrics.flush()  # as before every checkpoint
        assert len(read_metrics(metrics.path)) == 2
        metrics.write(3, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    with MetricsWriter(tmp_path, resume_step=2, resume_rows=2) as metrics:
        metrics.write(3, {"loss": 0.5})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 1.25}, {"step": 3, "loss": 0.5}]
    assert not (tmp_path / "tensorboard").exists()
    monkeypatch.setattr(module, "BUCKET_SECONDS", -1.0)
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"loss": 2.0})
        assert len(read_metrics(metrics.path)) == 1


def write_and_resume(directory):
    """Writes rows 1 and 2, the second after a checkpoint, resumes from step 1; the run's id."""
    (directory / "config.json").write_text('{"steps": 7}')
    with MetricsWriter(directory, tensorboard=False, wandb="a project") as writer:
        writer.write(1, {"train/loss": 2.0, "layers": np.arange(2.0), "table": np.ones((2, 2))})
        first = (directory / "wandb" / "id").read_text()
        writer.write(2, {"train/loss": 1.5})
    options = {"tensorboard": False, "wandb": "a project", "resume_step": 1}
    with pytest.raises(KeyError), MetricsWriter(directory, **options) as writer:
        writer.write(2, {"train/loss": 1.5})
        raise KeyError("a crash")
    assert (directory / "wandb" / "id").read_text() == first
    return first


def test_wandb_is_told_what_the_file_is(tmp_path, monkeypatch):
    runs = []

    class Run(list):
        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def finish(self, exit_code):
            self.code = exit_code

        def log(self, row):
            self.append(row)

    def init(**options):
        if options["project"] == "refused":
            raise RuntimeError("no API key\nmore lines")
        runs.append(Run())
        runs[-1].options = options
        return runs[-1]

    errors = types.SimpleNamespace(Error=RuntimeError)
    fake = types.SimpleNamespace(init=init, Settings=dict, errors=errors, Histogram=list)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    name = write_and_resume(tmp_path)
    assert runs[0][0] == {"step": 1, "train/loss": 2.0, "layers": 0.5, "layers/layers": [0.0, 1.0]}
    assert runs[1] == [{"step": 2, "train/loss": 1.5}] and [run.code for run in runs] == [0, 1]
    assert {run.options["id"] for run in runs} == {name} and runs[1].options["resume"] == "allow"
    assert runs[0].options["config"] == {"steps": 7}
    write_and_resume(tmp_path)  # started again: another run
    assert runs[2].options["id"] != name
    with pytest.raises(ValueError, match="wandb='refused': no API key; run `wandb login`, or set"):
        MetricsWriter(tmp_path, wandb="refused")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError) as missing:
        MetricsWriter(tmp_path, wandb="a project")
    assert one_line(missing.value).endswith("pip install 'ffn-heterogeneity[wandb]'")


def test_wandb_offline(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    name = write_and_resume(tmp_path)
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2  # `wandb sync` makes one run of them: they have one id
    for path, layers in zip(files, (True, False), strict=True):
        content = path.read_bytes()
        assert b"a project" in content and b"train/loss" in content
        assert (b"layers/001" in content) == layers


def test_a_writer_with_events_does_not_wait_for_torch(torch, tmp_path):
    """tensorboardX would import torch, which takes three of a run's first ten seconds."""
    program = (
        "import sys; from ffn_heterogeneity.io.metrics import MetricsWriter\n"
        f"writer = MetricsWriter({str(tmp_path)!r}, tensorboard=True)\n"
        "writer.write(1, {'loss': 2.0}); writer.close()\n"
        "assert 'tensorboardX' in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "tensorboard").iterdir())
