"""scripts/report.py: runs side by side, from directories written by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tiny_models import run_script

from ffn_heterogeneity.report import compare
from ffn_heterogeneity.report.compare import (
    choose_panels,
    differing_keys,
    draw,
    mean_curve,
    numbers,
    write_report,
)
from ffn_heterogeneity.report.runs import Spread, read_runs

pytestmark = pytest.mark.usefixtures("figures_closed")
CONFIG = {"seed": 0, "nucl": {"alpha": 0.0, "targets": ["a|b"]}, "name": "x", "on": True}


@pytest.fixture
def figures_closed():
    yield
    from matplotlib import pyplot as plt

    plt.close("all")


def make(path, rows=(), results=None, config=None):
    """A work directory as the scripts write it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if rows:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if results is not None:
        (path / "results.json").write_text(json.dumps(results))
    return str(path)


def trained(nlls, losses, every=2, **more):
    """Rows of a run: the loss of steps 1, 2, ...; validation at steps 0, every, ..."""
    rows = [{"step": i, "train/loss": x} for i, x in enumerate(losses, 1)]
    rows += [{"step": every * i, "validation/nll": x, "layers": [1.0]} for i, x in enumerate(nlls)]
    return sorted(({**row, **more} for row in rows), key=lambda row: row["step"])


def results_of(nlls, every=2, **more):
    first, *_, last = nlls
    best = min(range(len(nlls)), key=lambda i: nlls[i])
    return {
        "first": {"step": 0, "validation/nll": first},
        "final": {"step": every * (len(nlls) - 1), "validation/nll": last},
        "best": {"step": every * best, "metric": "validation/nll", "value": nlls[best]},
        "history": [{"step": 0}],
        **more,
    }


def table(runs):
    header, rows = numbers(runs)
    assert all(len(row) == len(header) for row in rows)
    return {row[0]: row[1:] for row in rows}


def number_rows(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.fixture
def two(tmp_path):
    other = CONFIG | {"nucl": {"alpha": 10.0, "targets": ["a|b"]}, "on": 1, "extra": "1"}
    a = make(
        tmp_path / "a", trained([3.0, 2.0, 2.5], [4, 3, 2, 1]),
        results_of([3.0, 2.0, 2.5], tokens_per_second=100.0, parameters=1000, only_a=7, device="x"),
    )  # fmt: skip
    b = make(
        tmp_path / "b", trained([3.0, 1.5, 1.0], [4, 2, 1, 0.5]),
        results_of([3.0, 1.5, 1.0], tokens_per_second=150.0, parameters=900, mesh={"data": 2}),
        other,
    )  # fmt: skip
    return [a, b]


def test_only_the_differing_keys_are_listed(two, tmp_path):
    assert differing_keys(read_runs(two)) == [
        ("extra", "-", '"1"'),
        ("nucl.alpha", "0.0", "10.0"),
        ("on", "true", "1"),
    ]
    assert differing_keys(read_runs([two[0], make(tmp_path / "c")])) == []


def test_numbers_side_by_side_with_difference_and_ratio(two):
    rows = table(read_runs(two))
    assert rows["first validation/nll"] == ("3", "3", "0", "1")
    assert rows["final validation/nll"] == ("2.5", "1", "-1.5", "0.4")
    assert rows["best validation/nll"] == ("2", "1", "-1", "0.5")
    assert rows["best step"] == ("2", "4", "+2", "2")
    assert rows["tokens_per_second"] == ("100", "150", "+50", "1.5")
    assert rows["parameters"] == ("1,000", "900", "-100", "0.9")
    # What one run alone has is there all the same, and a ratio to 0 is none.
    assert rows["only_a"] == ("7", "-", "-", "-")
    assert rows["mesh.data"] == ("-", "2", "-", "-")
    assert rows["device"] == ("x", "-", "-", "-")
    assert rows["first step"] == ("0", "0", "0", "-")
    # Lists and the history are no rows.
    assert list(rows) == [
        "first step", "first validation/nll", "final step", "final validation/nll",
        "best validation/nll", "best step", "tokens_per_second", "steps", "parameters", "only_a",
        "device", "mesh.data",
    ]  # fmt: skip


def test_every_run_is_against_the_first(tmp_path):
    paths = [
        make(tmp_path / name, results={"nll": nll, "perplexity": round(math.exp(nll), 3)})
        for name, nll in (("x", 2.0), ("y", 3.0), ("z", 1.0))
    ]
    header, rows = numbers(read_runs(paths))
    assert header == ("", "x", "y", "difference", "ratio", "z", "difference", "ratio")
    assert rows[0] == ("nll", "2", "3", "+1", "1.5", "1", "-1", "0.5")
    assert rows[1][:2] == ("perplexity", "7.389") and rows[1][3:5] == ("+12.7", "2.7184")


def test_compressed_and_evaluated_runs_have_tables_and_no_figure(tmp_path):
    a = make(tmp_path / "a", results={"parameters_after": 75, "removed": [[1, 2]], "ratio": None})
    b = make(tmp_path / "b", results={"perplexity": 7.5, "nll": "nan", "reverse": False})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "compare.png").write_text("of an earlier comparison")
    text = write_report([a, b], tmp_path / "out")
    assert number_rows(text, "parameters_after") == ["75", "-", "-", "-"]
    assert number_rows(text, "perplexity") == ["-", "7.5", "-", "-"]
    assert number_rows(text, "ratio") == ["null", "-", "-", "-"]
    assert number_rows(text, "reverse") == ["-", "false", "-", "-"]
    assert number_rows(text, "nll") == ["-", "nan", "-", "-"]
    assert "a: lists in results.json, in no table: removed." in text
    assert "No run has any." in text and "configs are equal" in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["compare.md"]


def test_a_run_that_is_not_finished(tmp_path):
    path = make(tmp_path / "run", trained([3.0, "nan", 2.0, 2.5], [4, 3, 2, 1, 0, -1, -2]))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "validation/nl')
    (run,) = read_runs([path])
    assert run.state == "not finished, at step 7"
    assert run.values == {
        "steps": 7, "first step": 0, "first validation/nll": 3.0, "final step": 6,
        "final validation/nll": 2.5, "best validation/nll": 2.0, "best step": 4,
    }  # fmt: skip
    assert any("its final numbers are those of its last evaluation" in x for x in run.notes)
    (begun,) = read_runs([make(tmp_path / "begun")])
    assert begun.state == "not begun" and begun.values == {} and begun.curves == [{}]
    text = write_report([path, str(tmp_path / "begun")], tmp_path / "out")
    assert number_rows(text, "final validation/nll") == ["2.5", "-", "-", "-"]


def test_the_best_metric_is_the_configs(tmp_path):
    rows = trained([3.0, 2.0, 2.5], [], **{"validation/other": 5})
    rows[0]["validation/other"] = 1
    config = {"eval": {"best_metric": "validation/other"}}
    (run,) = read_runs([make(tmp_path / "run", rows, config=config)])
    assert run.values["best validation/other"] == 1 and run.values["best step"] == 0


# ---- seeds


@pytest.fixture
def seeds(tmp_path):
    path = tmp_path / "seeds"
    summary = {"validation/nll": {"mean": 2.25, "low": 2.125, "high": 2.5, "n": 3}, "note": "t"}
    make(path, results={"seeds": [0, 1, 2], "summary": summary, "model": "m"})
    for seed, nlls, rate in ((0, [3.0, 2.0], 10.0), (1, [3.0, 4.0], 20.0), (2, [6.0, 0.0], 60.0)):
        rows = trained(nlls, [seed + 1.0, seed + 2.0] + [9.0] * (seed == 1))
        make(path / f"seed_{seed}", rows, results_of(nlls, tokens_per_second=rate, parameters=5))
    (path / "seed_1" / "results.json").write_text(
        json.dumps(results_of([3.0, 4.0], tokens_per_second=20.0, parameters=5, lone=7))
    )
    return str(path)


def test_seeds_are_means_with_intervals(seeds):
    (run,) = read_runs([seeds])
    assert run.state == "3 seeds, finished"
    # The summary where there is one, else the seeds' own numbers.
    assert run.values["final validation/nll"] == Spread(2.25, 2.125, 2.5, 3, "t")
    assert run.values["tokens_per_second"] == Spread(30.0, 10.0, 60.0, 3)
    assert run.values["first validation/nll"] == Spread(4.0, 3.0, 6.0, 3)
    assert run.values["best validation/nll"] == Spread(5 / 3, 0.0, 3.0, 3)
    assert run.values["parameters"] == 5 and run.values["model"] == "m"
    assert run.values["note"] == "t"
    assert run.values["lone"] == Spread(7, 7, 7, 1), "one seed's number is not all seeds'"
    assert "seeds" not in run.values and not any(name[:7] == "summary" for name in run.values)
    assert run.notes == []


def test_seeds_against_one_run(seeds, tmp_path):
    one = make(tmp_path / "one", trained([3.0, 2.0], [1.0]), results_of([3.0, 2.0]))
    text = write_report([one, seeds], tmp_path / "out")
    cells = number_rows(text, "final validation/nll")
    assert cells == ["2", "2.25 [2.125, 2.5] n=3", "+0.25", "1.125"]
    assert compare.OF_SEEDS in text
    assert compare.OF_SEEDS not in write_report([one], tmp_path / "out", "report")


def test_curves_of_seeds_are_means_with_bands(seeds):
    (run,) = runs = read_runs([seeds])
    steps, values = mean_curve(run, "train/loss")
    assert steps == [1, 2], "step 3, that one seed alone has, would be a jump"
    assert values.tolist() == [[1, 2], [2, 3], [3, 4]]
    axis, loss = draw(runs, ["validation/nll", "train/loss"]).axes
    (line,), (band,) = axis.lines, axis.collections
    assert line.get_xydata().tolist() == [[0, 4], [2, 2]]
    corners = {tuple(point) for point in band.get_paths()[0].vertices}
    assert corners == {(0, 3), (0, 6), (2, 0), (2, 4)}
    assert loss.lines[0].get_xydata().tolist() == [[1, 2], [2, 3]]
    (label,) = [text.get_text() for text in axis.figure.legends[0].get_texts()]
    assert label == "seeds (mean of 3 seeds)"


def test_seeds_that_are_missing_or_running(tmp_path):
    path = tmp_path / "run"
    make(path)
    for seed, nlls in ((10, [3.0, 2.0, 1.0]), (9, [5.0, 4.0])):
        make(path / f"seed_{seed}", trained(nlls, []))
    (path / "seed_x").mkdir()
    (path / "seed_11").mkdir()
    (run,) = read_runs([str(path)])
    assert run.state == "2 seeds, not finished, at step 4"
    assert run.values["final validation/nll"] == Spread(2.5, 1.0, 4.0, 2)
    assert run.notes[0] == "without results.json: seed_9, seed_10."
    (path / "results.json").write_text(json.dumps({"seeds": [9, 10, 12], "summary": {}}))
    (run,) = read_runs([str(path)])
    assert run.notes == ["missing: seed_12.", "without results.json: seed_9, seed_10."]


def test_a_nan_of_one_seed_is_seen(tmp_path):
    path = tmp_path / "run"
    make(path)
    for seed, nll in ((0, 2.0), (1, "nan"), (2, "inf")):
        make(path / f"seed_{seed}", trained([3.0, nll], []), results_of([3.0, 2.0], nll=nll))
    (run,) = runs = read_runs([str(path)])
    assert all(math.isnan(x) for x in run.values["nll"][:3]) and run.values["nll"].n == 3
    line = draw(runs, ["validation/nll"]).axes[0].lines[0].get_xydata()
    np.testing.assert_array_equal(line, [[0, 3], [2, np.nan]])
    assert run.notes[-1] == "validation/nll is not finite, first at step 2."
    (lone,) = read_runs([str(path / "seed_2")])
    steps, values = mean_curve(lone, "validation/nll")
    assert steps == [0, 2] and values[0, 0] == 3 and math.isnan(values[0, 1]), "inf is a gap too"


# ---- figure


def test_the_figure_draws_every_run_in_its_own_style(tmp_path):
    paths = [
        make(tmp_path / f"_{i}$x$", trained([i, i + 1.0], [5.0, "nan", 7.0])) for i in range(8)
    ]
    runs = read_runs(paths)
    axis, loss = draw(runs, ["validation/nll", "train/loss"]).axes
    assert [line.get_ydata().tolist() for line in axis.lines] == [[i, i + 1] for i in range(8)]
    np.testing.assert_array_equal(loss.lines[3].get_xydata(), [[1, 5], [2, np.nan], [3, 7]])
    assert len({(line.get_color(), line.get_linestyle()) for line in axis.lines}) == 8
    assert axis.lines[3].get_color() == loss.lines[3].get_color()
    labels = [text.get_text() for text in axis.figure.legends[0].get_texts()]
    assert labels == [rf" _{i}\$x\$" for i in range(8)]
    assert write_report(paths, tmp_path / "out").count("train/loss is not finite") == 8
    assert (tmp_path / "out" / "compare.png").read_bytes()[1:4] == b"PNG"


def test_panels(tmp_path):
    many = {f"validation/{name}": 1.0 for name in "abcdef"}
    a = make(tmp_path / "a", trained([3.0], [1.0], **{"validation/mine": 2}, **many))
    b = make(tmp_path / "b", trained([3.0], [], **dict(reversed(many.items()))))
    nothing = make(tmp_path / "nothing", results={"nll": 1})
    panels, left_out = choose_panels(read_runs([a, b, nothing]))
    # The loss of one run alone is drawn; other metrics only where all runs with curves have them.
    assert panels == ["validation/nll", "train/loss", *(f"validation/{x}" for x in "abcd")]
    assert left_out == ["validation/mine", "validation/e", "validation/f"]
    assert choose_panels(read_runs([nothing])) == ([], [])
    text = write_report([a, b, nothing], tmp_path / "out")
    assert "Without a panel: validation/mine, validation/e, validation/f." in text
    figure = draw(read_runs([a, b, nothing]), panels)
    assert [axis.get_title() for axis in figure.axes] == panels


# ---- errors and the command line


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("results.json", "{", "results.json is not valid JSON"),
        ("results.json", "[1]", r"results.json holds '\[1\]' where names"),
        ("config.json", "3", "config.json holds '3'"),
        ("results.json", b"\xff\xfe", "results.json is not text"),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl is not text"),
        ("metrics.jsonl", '{"st\n{"step": 1}\n', "metrics.jsonl, line 1 is not JSON"),
        ("metrics.jsonl", '{"step": 1}\n{"loss": 2}\n', "line 2 has no step: {'loss': 2}"),
        ("metrics.jsonl", '{"step": 1}\n7\n', "line 2 has no step: 7"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, content, words):
    path = make(tmp_path / "run")
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "run" / file).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        write_report([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_is_said(tmp_path):
    path = make(tmp_path / "runs" / "a")
    make(tmp_path / "runs" / "b")
    (tmp_path / "file").write_text("x")
    for given, words in [
        (tmp_path / "runs", "is no run: it holds no config.json; there are runs in it: a, b"),
        (tmp_path / "none", "is no run: there is no such directory; give a run's --workdir"),
        (tmp_path / "file", "is no run: there is no such directory"),
    ]:
        with pytest.raises(ValueError, match=words):
            read_runs([path, str(given)])
    with pytest.raises(ValueError, match="no run given"):
        read_runs([])
    with pytest.raises(ValueError, match="is a file"):
        write_report([path], tmp_path / "file")
    (tmp_path / "link").symlink_to(path)
    for again in (path + "/", f"{path}/../a", str(tmp_path / "link")):
        with pytest.raises(ValueError, match="are the same run: name each once"):
            read_runs([path, again])


def test_labels_are_as_short_as_they_can_be(tmp_path):
    paths = [make(tmp_path / x / "seed_0") for x in ("a", "b")]
    assert [run.label for run in read_runs([paths[0] + "/"])] == ["seed_0"]
    assert [run.label for run in read_runs(paths)] == ["a/seed_0", "b/seed_0"]


def test_compare_from_the_command_line(two, tmp_path):
    done = run_script("report", "--compare", *two, f"--output={tmp_path / 'out'}")
    assert done.code == 0, done.err
    assert done.out == (tmp_path / "out" / "compare.md").read_text()
    assert number_rows(done.out, "final validation/nll") == ["2.5", "1", "-1.5", "0.4"]
    assert "![curves](compare.png)" in done.out
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == ["compare.md", "compare.png"]
    # The flag may stand anywhere, and is not needed where there are several.
    for arguments in ([*two, "--compare"], [two[0], f"--output={tmp_path / 'c'}", two[1]]):
        again = run_script("report", f"--output={tmp_path / 'b'}", *arguments)
        assert again.code == 0 and again.out == done.out


def test_one_run_from_the_command_line(two, tmp_path):
    done = run_script("report", two[0], f"--output={tmp_path / 'out'}")
    assert done.code == 0, done.err
    assert number_rows(done.out, "final validation/nll") == ["2.5"]
    assert "differ" not in done.out and "ratio" not in done.out
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == ["report.md", "report.png"]


def test_patterns_with_bars_keep_the_table_whole(two, tmp_path):
    c = make(tmp_path / "c", config={"freeze": ["x|y"]}, results={"name": "two\nlines"})
    text = write_report([two[0], c], tmp_path / "out")
    assert r'["x\|y"]' in text and "two lines" in text


def test_command_line_errors_leave_nothing(two, tmp_path):
    output = f"--output={tmp_path / 'out'}"
    assert "no run given" in run_script("report", output).error
    error = run_script("report", "--compare", two[0], output).error
    assert "--compare needs two or more" in error and two[0] in error
    assert "same run" in run_script("report", "--compare", two[0], two[0], output).error
    assert "'nowhere' is no run" in run_script("report", two[0], "nowhere", output).error
    assert not (tmp_path / "out").exists()
