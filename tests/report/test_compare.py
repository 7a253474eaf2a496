"""scripts/report.py: runs side by side, from directories written by hand."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from builders import write_run
from tiny_models import run_script

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.files import write_text
from ffn_heterogeneity.report import compare
from ffn_heterogeneity.report.compare import draw_runs, notes_of, numbers, read_runs, states
from ffn_heterogeneity.report.compare import write_report as write
from ffn_heterogeneity.report.stats import Spread, bootstrap, interval, over
from ffn_heterogeneity.report.tables import number

CONFIG = {"seed": 0, "nucl": {"alpha": 0.0, "targets": ["a|b"]}, "name": "x", "on": True}


def make(path, rows=(), results=None, config=CONFIG):
    return write_run(path, config, results, rows)


def trained(nlls, losses=(), **more):
    """Rows of a run: the loss of steps 1, 2, ...; validation at steps 0, 2, ..."""
    rows = [{"step": i, "train/loss": x} for i, x in enumerate(losses, 1)]
    rows += [{"step": 2 * i, "validation/nll": x, "layers": [1.0]} for i, x in enumerate(nlls)]
    return sorted(({**row, **more} for row in rows), key=lambda row: row["step"])


def results_of(nlls, **more):
    best = min(range(len(nlls)), key=lambda i: nlls[i])
    first, last = {"step": 0, "validation/nll": nlls[0]}, {"step": 2 * (len(nlls) - 1)}
    best = {"step": 2 * best, "metric": "validation/nll", "value": nlls[best]}
    return {"first": first, "final": last | {"validation/nll": nlls[-1]}, "best": best, **more}


def table(paths):
    header, rows = numbers(read_runs(paths))
    assert all(len(row) == len(header) for row in rows)
    return {row[0]: row[1:] for row in rows}


def labels_of(paths):
    return [label for label, _, _ in states(read_runs(paths))]


@pytest.fixture
def two(tmp_path):
    other = CONFIG | {"nucl": {"alpha": 10.0, "targets": ["a|b"]}, "on": 1, "extra": "1"}
    a = results_of([3.0, 2.0, 2.5], tokens_per_second=100.0, parameters=1000, only=7, zero=0)
    b = results_of([3.0, 1.5, 1.0], tokens_per_second=150.0, parameters=900, layers=[1, 2], zero=2)
    first = make(tmp_path / "a", trained([3.0, 2.0, 2.5], [4, 3, 2, 1]), a)
    return [first, make(tmp_path / "b", trained([3.0, 1.5, 1.0], [4, 2, 1, 0.5]), b, other)]


def test_only_the_differing_keys_are_listed(two, tmp_path):
    """Also for a run that has not started."""
    differing = [["extra", "unset", '"1"'], ["nucl.alpha", "0", "10"], ["on", "true", "1"]]
    assert compare.differing_keys(read_runs(two)) == differing
    assert compare.differing_keys(read_runs([two[0], make(tmp_path / "c")])) == []


def test_numbers_side_by_side_with_difference_and_ratio(two, tmp_path):
    rows = table(two)
    assert rows["validation/nll"] == ["2.5", "1", "-1.5", "0.4"]
    assert rows["parameters"] == ["1,000", "900", "-100", "0.9"]
    # Values of only one run are shown, too; a ratio to 0 is not.
    assert rows["only"] == ["7", "-", "-", "-"] and rows["zero"] == ["0", "2", "+2", "-"]
    # Values per layer are no rows.
    names = ["validation/best/nll", "validation/nll", "tokens_per_second", "parameters"]
    assert list(rows) == [*names, "only", "zero"]
    header, rows = numbers(read_runs([*two, make(tmp_path / "c", results={"only": 14})]))
    assert header == ["", "a", "b", "difference", "ratio", "c", "difference", "ratio"]
    assert ["only", "7", "-", "-", "-", "14", "+7", "2"] in rows, "each against the first"


def test_compressed_and_evaluated_runs_have_tables_and_no_figure(tmp_path):
    a = make(tmp_path / "a", results={"parameters_after": 75, "removed": [[1, 2]], "ratio": None})
    b = make(tmp_path / "b", results={"perplexity": 7.5, "nll": "nan", "reverse": False})
    write_text(tmp_path / "out" / "compare.png", "of an earlier comparison")
    text, rows = write([a, b], tmp_path / "out"), table([a, b])
    assert rows["parameters_after"] == ["75", "-", "-", "-"]
    assert rows["nll"] == ["-", "nan", "-", "-"] and "removed" not in rows
    assert "No run has any." in text and "configs are equal" in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["compare.md"]


def test_a_run_that_is_not_finished(tmp_path):
    path = make(tmp_path / "run", trained([3.0, "nan", 2.0, 2.5], [4, 3, 2, 1, 0, -1, -2]))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "validation/nl')
    begun = make(tmp_path / "begun")
    runs = read_runs([path, begun])
    run = ("run", "not finished, at step 7", path)
    assert list(states(runs)) == [run, ("begun", "not begun", begun)]
    assert numbers(runs)[1] == [["validation/nll", "2.5", "-", "-", "-"]]
    notes = list(notes_of(runs))
    assert notes[:2] == ["run: without results: run", "begun: without results: begun"]
    assert "2.5" in write([path, begun], tmp_path / "out")


# ---- seeds


@pytest.fixture
def seeds(tmp_path):
    path = tmp_path / "seeds"
    make(path, results={"seeds": [0, 1, 2], "summary": {}, "runs": []})
    for seed, nlls, rate in ((0, [3.0, 2.0], 10.0), (1, [3.0, 4.0], 20.0), (2, [6.0, 0.0], 60.0)):
        rows = trained(nlls, [seed + 1.0, seed + 2.0] + [9.0] * (seed == 1))
        results = results_of(nlls, tokens_per_second=rate, parameters=5, layers=[seed])
        make(path / f"seed_{seed}", rows, results)
    return str(path)


def test_seeds_are_means_with_intervals(seeds, tmp_path):
    one = make(tmp_path / "one", trained([3.0, 2.5]), results_of([3.0, 2.5]))
    runs, rows = read_runs([seeds, one]), table([one, seeds])
    assert next(states(runs)) == ("seeds", "3 seeds, finished", seeds) and not list(notes_of(runs))
    low, high = interval([2.0, 4.0, 0.0])[1:3]
    cells = ["2.5", f"2 [{low:.6g}, {high:.6g}] t n=3", "-0.5", "0.8"]
    assert rows["validation/nll"] == cells and rows["parameters"][1] == "5"
    assert compare.NOTE in write([one, seeds], tmp_path / "out")
    assert compare.NOTE not in write([one], tmp_path / "out", "report")


def test_curves_of_seeds_are_means_with_bands(seeds):
    axis, loss = draw_runs(read_runs([seeds])).axes
    (line,), (band,) = axis.lines, axis.collections
    assert line.get_xydata().tolist() == [[0, 4], [2, 2]]
    corners = {tuple(point) for point in band.get_paths()[0].vertices}
    assert corners == {(0, 3), (0, 6), (2, 0), (2, 4)}
    xy = loss.lines[0].get_xydata().tolist()
    assert xy == [[1, 2], [2, 3]], "step 3, that one seed alone has, would be a jump"
    assert [x.get_text() for x in axis.get_legend().get_texts()] == ["seeds (mean of 3 seeds)"]


def test_seeds_that_are_missing_or_running(tmp_path):
    make(tmp_path / "run")
    for seed, nlls in ((10, [3.0, 2.0, 1.0]), (9, [5.0, 4.0])):
        make(tmp_path / "run" / f"seed_{seed}", trained(nlls))
    (tmp_path / "run" / "seed_11").mkdir()
    runs = read_runs([str(tmp_path / "run")])
    state = "2 seeds, not finished, at step 4"
    assert list(states(runs)) == [("run", state, str(tmp_path / "run"))]
    lacking = [f"run: without results: seed_{seed}" for seed in (10, 9)]
    assert list(notes_of(runs)) == lacking


def test_a_nan_of_one_seed_is_seen(tmp_path):
    make(tmp_path / "run")
    for seed, nll in ((0, 2.0), (1, "nan"), (2, "inf")):
        path = make(tmp_path / "run" / f"seed_{seed}", trained([3.0, nll]), {"nll": nll})
    runs = read_runs([str(tmp_path / "run")])
    assert table([str(tmp_path / "run")])["nll"] == ["nan [nan, nan] t n=3"]
    line = draw_runs(runs).axes[0].lines[0].get_xydata()
    np.testing.assert_array_equal(line, [[0, 3], [2, np.nan]])
    assert list(notes_of(runs)) == ["run: validation/nll is not finite, first at step 2"]
    assert np.isnan(draw_runs(read_runs([path])).axes[0].lines[0].get_ydata()[1]), "inf is a gap"


def test_rows_that_a_crash_took_are_a_gap_and_a_note(tmp_path):
    rows = [row for row in trained([3.0, 2.0], range(9)) if row["step"] not in (3, 4, 6)]
    path = make(tmp_path / "run", rows)
    runs = read_runs([path])
    lost = f"run: {path}/metrics.jsonl lacks the rows of steps 3 to 4, 6"
    assert list(notes_of(runs))[1:] == [lost]
    drawn = draw_runs(runs).axes[1].lines[0].get_xydata()
    np.testing.assert_array_equal(drawn[:, 0], [1, 2, 3, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(np.isnan(drawn[:, 1]), [x in (3, 6) for x in drawn[:, 0]])


# ---- figure


def test_the_figure_draws_every_run_in_its_own_style(tmp_path):
    paths = [make(tmp_path / f"_{i}$x$", trained([i, i + 1.0], [5.0, "nan"])) for i in range(8)]
    axis, loss = draw_runs(read_runs(paths)).axes
    assert [line.get_ydata().tolist() for line in axis.lines] == [[i, i + 1] for i in range(8)]
    np.testing.assert_array_equal(loss.lines[3].get_xydata(), [[1, 5], [2, np.nan]])
    assert len({(line.get_color(), line.get_linestyle()) for line in axis.lines}) == 8
    assert axis.lines[3].get_color() == loss.lines[3].get_color()
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == [rf" _{i}\$x\$" for i in range(8)]
    assert write(paths, tmp_path / "out").count("train/loss is not finite") == 8
    assert (tmp_path / "out" / "compare.png").read_bytes()[1:4] == b"PNG"


def test_panels(tmp_path):
    many = {f"validation/{name}": 1.0 for name in "abcdef"}
    a = make(tmp_path / "a", trained([3.0], [1.0], **{"validation/mine": 2}, **many))
    b = make(tmp_path / "b", trained([3.0], **dict(reversed(many.items()))))
    nothing = make(tmp_path / "nothing", results={"nll": 1})
    panels = ["validation/nll", "train/loss", *(f"validation/{x}" for x in "abcd")]
    drawn = [axis.get_title() for axis in draw_runs(read_runs([a, b, nothing])).axes]
    assert drawn == panels, "the losses, then what most have"
    assert draw_runs(read_runs([nothing])) is None


# ---- errors and the command line


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("results.json", "{", "results.json: not JSON"),
        ("results.json", "[1]", "results.json is malformed: it holds a list"),
        ("config.json", "3", "config.json is malformed: it holds a int"),
        ("metrics.jsonl", '{"st\n{"step": 1}\n', "metrics.jsonl, line 1 is not JSON"),
        ("metrics.jsonl", '{"step": 1}\n{"loss": 2}\n7\n', 'line 2 .*step: {"loss": 2}'),
    ],
)
def test_damaged_files_are_named(tmp_path, file, content, words):
    path = make(tmp_path / "run")
    (tmp_path / "run" / file).write_text(content)
    with pytest.raises(ValueError, match=words):
        write([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_is_said(tmp_path):
    path = make(tmp_path / "runs" / "a")
    with pytest.raises(ValueError, match="none is neither a directory nor an archive of runs"):
        read_runs([str(tmp_path / "none")])
    with pytest.raises(ValueError, match="is a file"):
        write([path], tmp_path / "runs" / "a" / "config.json")
    (tmp_path / "link").symlink_to(path)
    again = [path, path + "/", f"{path}/../a", str(tmp_path / "link")]
    assert list(states(read_runs(again))) == [("a", "not begun", path)], "one run is one run"


def test_a_sweep_is_its_runs(two, tmp_path):
    """Also an archive of it."""
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for path in two:
        Path(path).rename(sweep / Path(path).name)
    with tarfile.open(tmp_path / "sweep.tar.xz", "w:xz") as archive:
        archive.add(sweep, "sweep")
    inside, outside = (numbers(read_runs([tmp_path / x])) for x in ("sweep.tar.xz", "sweep"))
    assert outside == inside and outside[0] == ["", "a", "b", "difference", "ratio"]
    # The sweep's own files are no run, nor are those of a job of stages, nor a separate file.
    make(sweep, results={"a": {"nll": 1.0}}, config={"stages": ["a", "b"]})
    assert numbers(read_runs([sweep])) == outside
    (tmp_path / "note.txt").write_text("note")
    done = run_script("report", sweep, tmp_path / "note.txt", f"--output={tmp_path / 'out'}")
    assert done.code == 0 and "no runs, left out" in done.err and "note.txt" in done.err
    assert done.out.startswith("# a, b\n")
    assert run_script("report", f"{tmp_path}/note.txt").code == 2


def test_labels_are_below_the_common_directory(tmp_path):
    paths = [make(tmp_path / x / "seed_0") for x in ("a", "b")]
    assert labels_of([paths[0] + "/"]) == ["a"] and labels_of(paths) == ["a", "b"]
    other = [make(tmp_path / x / "run") for x in ("c", "d")]
    assert labels_of(other) == ["c/run", "d/run"]


def test_from_the_command_line(two, tmp_path):
    output = f"--output={tmp_path / 'out'}"
    assert "no run given" in run_script("report", output).error
    error = run_script("report", "--compare", two[0], output).error
    assert "--compare needs two or more" in error and two[0] in error
    assert not (tmp_path / "out").exists()
    done = run_script("report", two[0], output, two[1])  # --compare is not needed for two runs
    assert done.code == 0 and done.out == (tmp_path / "out" / "compare.md").read_text()
    assert "![compare](compare.png)" in done.out and "tokens_per_second" in done.out
    one = run_script("report", two[0], output)
    assert "differ" not in one.out and "ratio" not in one.out
    names = {"compare.md", "compare.png", "report.md", "report.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_numbers_as_cells():
    assert number(None) == "-" and number("x") == "x"
    assert number(1234567.0) == "1,234,567" and number(0.000123456) == "0.0001235"
    assert number(float("inf")) == "inf" and number(float("nan")) == "nan"
    assert number(Spread(2.0, 1.0, 3.0, 4)) == "2 [1, 3] range n=4"
    assert over([]) is None and over([2.0, 2.0]) == 2.0
    assert over([1.0, 3.0]) == Spread(2.0, 1.0, 3.0, 2)


def test_whose_model_a_run_read(tmp_path):
    """The model is identified by its content then, not by a path that was written again since."""

    def origin(mark, *written, place="a"):
        for name, own in zip("abc", written, strict=False):
            wrote = {"model_fingerprint": own} if own else {}
            make(tmp_path / name, results={"nll": 1.0} | wrote)
        config = CONFIG | {"model": f"{tmp_path}/{place}/model"}
        path = make(tmp_path / "used", results={"nll": 1.0}, config=config)
        (tmp_path / "used" / "inputs.json").write_text(json.dumps({"model": mark} if mark else {}))
        frame = fh.results(*(tmp_path / name for name in "abc"[: len(written)]), path)
        found = set(frame[frame.run == path].origin.dropna())
        return found.pop().rpartition("/")[2] if found else None

    assert origin("1", "1", "2") == origin("1", "", "2") == origin("", "1", "2") == "a"
    assert origin("1", "1", "1") == "a", "two models of the same weights"
    assert origin("2", "1", "2") == origin("2", "1", "2", place="moved") == "b"
    assert origin("2", "1", "2", "2", place="moved") is None, "one of two: nobody's"
    assert origin("3", "1", "2") is None


def test_a_model_that_moved_is_known_by_the_end_of_its_path(tmp_path):
    """Unless two runs have that end."""
    paths = [make(tmp_path / place / "runs" / "a", results={"nll": 1.0}) for place in "xy"]
    used = make(tmp_path / "used", results={"nll": 1.0}, config=CONFIG | {"model": "runs/a/model"})
    found = (fh.results(*given, used).set_index("run").origin for given in (paths[:1], paths))
    one, two = (frame.loc[[used]] for frame in found)
    assert set(one) == {paths[0]} and two.isna().all()


def test_equal_means_differ_by_nothing():
    """Not by the -5e-17 of a mean over seeds."""
    assert str(bootstrap([1e-17, -9e-17, -7e-17]).mean) == "0.0"


def test_documents_are_drawn_with_all_their_windows():
    """Two windows of a document that say the same add nothing; unequal counts weigh by windows."""
    values = [0.3, -0.1, 0.8, 0.2]
    by_document = bootstrap([x for x in values for _ in "ab"], [d for d in range(4) for _ in "ab"])
    assert by_document[:4] == pytest.approx(bootstrap(values)[:4])
    assert by_document.how == "by document"
    lone = bootstrap([1.0, 1.0, 1.0, 0.0], [7, 7, 7, 9])
    assert (lone.mean, lone.low, lone.high, lone.n) == (0.75, 0.0, 1.0, 2)
