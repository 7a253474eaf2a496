"""Sweeps: their combinators, and real runs of tiny models that share one program."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
    LLAMA,
    REPOSITORY,
    TEXT,
    config_of,
    our_logits,
    random_params,
    run_script,
    save_tiny,
)

from ffn_heterogeneity import experiment, sweep_jobs, sweep_run
from ffn_heterogeneity.evaluate import pruned
from ffn_heterogeneity.evaluate.perplexity import window_nll
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.report.writer import read_metrics
from ffn_heterogeneity.sweep import Point, chain, check_sweep, point, product, zipped
from ffn_heterogeneity.train import partition, shared
from ffn_heterogeneity.train.build import build, static_key
from ffn_heterogeneity.train.plan import BATCH
from ffn_heterogeneity.train.workdir import WorkdirError

pytestmark = pytest.mark.usefixtures("compiled_quickly", "compiled_once")
ALPHAS = (0.0, 1.0, 10.0, 100.0, 1000.0)
TIMES = ("seconds", "tokens_per_second", "compile_seconds")


# ---- combinators


def pairs_of(points):
    return [(one.name, dict(one.settings)) for one in points]


def test_product_is_every_combination_the_last_fastest():
    values = {"a.x": (1, 2), "b": ("u", "v", "w"), "c": (0.5,)}
    found = product({"a.x": values["a.x"], "b": values["b"]}, {"c": values["c"]})
    expected = [
        (f"x={x},b={b},c={c}", {"a.x": x, "b": b, "c": c})
        for x, b, c in itertools.product(*values.values())
    ]
    assert pairs_of(found) == expected
    nested = product(product({"a.x": (1, 2)}, {"b": ("u", "v", "w")}), {"c": (0.5,)})
    assert nested == found


def test_zipped_goes_side_by_side_and_chain_one_after_the_other():
    assert pairs_of(zipped({"a": (1, 2), "b": (3, 4)}, {"c": (5, 6)})) == [
        ("a=1,b=3,c=5", {"a": 1, "b": 3, "c": 5}), ("a=2,b=4,c=6", {"a": 2, "b": 4, "c": 6}),
    ]  # fmt: skip
    assert pairs_of(chain({"a": (1, 2), "b": (3,)}, point("plain"), product({"a": (4,)}))) == [
        ("a=1", {"a": 1}), ("a=2", {"a": 2}), ("b=3", {"b": 3}), ("plain", {}), ("a=4", {"a": 4}),
    ]  # fmt: skip
    rows = product(point("random", {"criterion": "random"}), {"seed": (0, 1)})
    assert [one.name for one in rows] == ["random,seed=0", "random,seed=1"]


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("nucl.alpha", 1000.0, "alpha=1000"), ("lr", 1e-6, "lr=1e-06"), ("x", 0.1234567, None),
        ("t", ("ffn_out", "attention_out"), "t=ffn_out+attention_out"), ("t", (), "t=none"),
        ("path", "/data/a b:c", "path=_data_a_b_c"), ("on", True, "on=True"),
    ],
)  # fmt: skip
def test_names_are_directory_names(key, value, name):
    (one,) = product({key: (value,)})
    check_sweep([one])
    assert one.name == (name or f"{key}={value!r}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: product({"a": "mstd"}), "sweep over a='mstd': give a tuple"),
        (lambda: product({"a": ()}), "give a tuple of values"),
        (lambda: chain({"a": 3}), "give a tuple of values"),
        (lambda: product({"a": (1,)}, {"a": (2,)}), "two parts of a sweep set 'a'"),
        (lambda: zipped({"a": (1, 2), "b": (1, 2, 3)}), r"zipped parts have \[2, 3\] points"),
        (lambda: check_sweep(()), "no point"),
        (lambda: check_sweep(chain({"a.x": (1,), "b.x": (1,)})), "two points are named 'x=1'"),
        (lambda: check_sweep(point("a/b")), "point 'a/b': a name"),
        (lambda: check_sweep(point(".hidden")), "a name is made of"),
        (lambda: check_sweep(point("")), "a name is made of"),
    ],
)
def test_what_is_no_sweep_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- what configs define


def swept_configs():
    found = []
    for path in sorted((REPOSITORY / "configs").glob("*.py")):
        text = path.read_text()
        names = re.findall(r'^    "(\w+)":', text[text.find("\nSWEEPS") :], re.M)
        found += [(path.stem, name) for name in names if "\nSWEEPS" in text]
    return found


def test_the_papers_sweeps_are_there():
    found = swept_configs()
    for name in ("alpha", "targets"):
        assert ("nucl_finetune", name) in found
    for name in ("criteria", "pairs", "halves"):
        assert ("prune_table", name) in found


@pytest.mark.parametrize(("name", "sweep"), swept_configs())
def test_every_point_of_every_sweep_is_a_config(name, sweep):
    config = config_of(name, model="smollm2_135m")
    kind, points = sweep_run.points_of(str(REPOSITORY / f"configs/{name}.py"), sweep, config)
    assert kind in sweep_run.KINDS
    values = [json.dumps(sweep_run.apply(config, one).to_dict(), sort_keys=True) for one in points]
    assert len(set(values)) == len(values), "two points are the same run"
    count = {
        ("nucl_finetune", "alpha"): 10, ("nucl_finetune", "targets"): 5,
        ("prune_table", "criteria"): 12, ("prune_table", "pairs"): 30, ("prune_table", "halves"): 6,
        ("jreg_pretrain", "alpha"): 7, ("jreg_pretrain", "lambda"): 5,
        ("jreg_pretrain", "steps"): 4,
    }.get((name, sweep))  # fmt: skip
    assert count is None or len(points) == count


def test_what_the_config_file_lacks_is_said(tmp_path):
    config = config_of("prune_table")
    spec = str(REPOSITORY / "configs/prune_table.py")
    for sweep, message in (("criterion", "did you mean 'criteria'"), ("", "there are criteria")):
        with pytest.raises(ValueError, match=message):
            sweep_run.points_of(spec, sweep, config)
    with pytest.raises(ValueError, match="defines no sweep"):
        sweep_run.points_of(str(REPOSITORY / "configs/perplexity.py"), "x", config)
    for settings, message in (
        ({"criterio": "gini"}, "point 'p': the config has no key 'criterio', did you mean"),
        ({"window": "wide"}, "point 'p', key 'window'"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep_run.apply(config, Point("p", settings))


# ---- one program for many runs


def test_free_keys_are_in_no_program():
    """The very text of the lowered step is the same, whatever they are."""
    small = {"batch_size": 2, "seq_len": 8, "tensorboard": False}
    one = config_of("nucl_finetune", "smollm2_135m,text", **small)
    other = config_of(
        "nucl_finetune", "gemma2_2b,text", **small, revision="x", seed=7, seeds=(1, 2), steps=5,
        nucl__alpha=0.0, dropout=0.3, optimizer__learning_rate=0.5, optimizer__schedule="linear",
        optimizer__warmup_steps=1, optimizer__final_fraction=0.5, eval__every=1,
        eval__max_batches=3, checkpoint__every=1, checkpoint__keep_best=False,
        export__form="native", profile="1:2", dry_run="here",
    )  # fmt: skip
    params = jax.eval_shape(lambda: causal_lm.init(LLAMA, jax.random.key(0)))
    mesh = partition.make_mesh(data=1, fsdp=1, tensor=1)
    keys = [static_key(config, LLAMA, params, mesh) for config in (one, other)]
    assert keys[0] == keys[1] and hash(keys[0]) == hash(keys[1])

    def text(config):
        built = build(config, LLAMA, params, mesh)
        batch = {name: jax.ShapeDtypeStruct((1, 2, 8), dtype) for name, dtype in BATCH.items()}
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        hyper = {"learning_rate": scalar, "alpha": scalar, "dropout": scalar}
        return built.train_step.lower(built.state, batch, hyper).as_text()

    assert text(one) == text(other)
    for changes in (
        {"nucl__variant": "gini"}, {"dropout": 0.0}, {"optimizer__b1": 0.8}, {"batch_size": 4},
        {"nucl__targets": ("attention_out",)}, {"freeze": ("^embed/",)}, {"remat": "full"},
        {"data__packing": False}, {"nll_reduction": "sum"}, {"compute_dtype": "bfloat16"},
    ):  # fmt: skip
        changed = config_of("nucl_finetune", "smollm2_135m,text", **small | changes)
        assert static_key(changed, LLAMA, params, mesh) != keys[0], changes
    assert static_key(one, LLAMA.with_widths([24, 24, 24, 23]), params, mesh) != keys[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    (root / "text.txt").write_text(TEXT)
    return save_tiny(root / "tiny"), root / "text.txt"


@pytest.fixture(scope="module")
def spec(files, tmp_path_factory):
    """A config file of small runs, with sweeps of its own."""
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(f"""
import runpy
from ffn_heterogeneity.sweep import chain, point, product
KIND = "train"
def get_config():
    file = runpy.run_path({str(REPOSITORY / "configs/nucl_finetune.py")!r})
    config = file["get_config"]({f"{files[0]},text"!r})
    config.data.path = {str(files[1])!r}
    config.steps, config.batch_size, config.seq_len, config.dropout = 3, 2, 16, 0.1
    config.data.validation_fraction, config.data.passage_chars = 0.2, 100
    config.eval.max_batches, config.tensorboard = 1, False
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-2, 0
    return config
SWEEPS = {{
    "alpha": product({{"nucl.alpha": {ALPHAS}}}),
    "two": product({{"nucl.alpha": (0.0, 1.0)}}),
    "broken": chain(
        point("bad", {{"data.path": "nowhere.txt"}}), point("good"),
        point("worse", {{"data.path": "nowhere.txt"}}),
    ),
}}
""")
    return str(path)


def small(spec, **changes):
    from ffn_heterogeneity.cli import load_config

    config = load_config(spec)
    for key, value in changes.items():
        config.update_from_flattened_dict({key.replace("__", "."): value})
    config.lock()
    return config


def rows_of(workdir):
    found = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("timing/")} for row in found]


@pytest.fixture(scope="module")
def alphas(spec, tmp_path_factory):
    """The finished sweep, what it returned, the lines it said, and what JAX said it compiled."""
    workdir, told = tmp_path_factory.mktemp("sweep") / "run", []

    class Listen(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    handler = Listen()
    logging.getLogger("jax").addHandler(handler)
    with jax.log_compiles():
        results = sweep_run.run(small(spec), workdir, spec=spec, sweep="alpha")
    logging.getLogger("jax").removeHandler(handler)
    return workdir, results, told


def test_five_alphas_are_one_compilation(alphas):
    workdir, results, told = alphas
    assert results == {
        "points": 5, "finished": 5, "ran": 5, "programs": 1, "compilations": 1,
    }  # fmt: skip
    for name in ("train_step", "eval_step", "params_metrics"):
        compiled = [line for line in told if re.search(rf"Compiling .*\b{name}\b", line)]
        assert len(compiled) == 1, (name, told)
    names = [f"alpha={alpha:g}" for alpha in ALPHAS]
    listed = json.loads((workdir / "sweep.json").read_text())
    assert [one["name"] for one in listed["points"]] == names
    assert [one["settings"] for one in listed["points"]] == [{"nucl.alpha": a} for a in ALPHAS]
    results = [json.loads((workdir / name / "results.json").read_text()) for name in names]
    entropies = [r["final"]["validation/entropy/ent/ffn_out/mean"] for r in results]
    assert entropies[-1] < entropies[0] and len(set(entropies)) == 5


def test_a_point_is_the_run_alone_and_seeds_share_too(spec, alphas, tmp_path):
    """Bit for bit: sharing a program and a model changes nothing."""
    together = shared.Shared(keep_model=False)
    experiment.run(small(spec, nucl__alpha=1000.0, seeds=(0, 1)), tmp_path, together)
    assert (together.programs, together.compilations) == (1, 1)
    rows = [rows_of(tmp_path / name) for name in ("seed_0", "seed_1")]
    assert rows[0] == rows_of(alphas[0] / "alpha=1000") != rows[1]


def test_finished_points_are_skipped(spec, alphas, monkeypatch, capsys):
    def never(*_):
        raise AssertionError("a finished point was run again")

    monkeypatch.setitem(sweep_run.KINDS, "train", sweep_run.Kind(never, lambda config: None))
    again = sweep_run.run(small(spec), alphas[0], spec=spec, sweep="alpha")
    assert (again["ran"], again["finished"]) == (0, 5)
    assert "0 runs to do, 5 finished before" in capsys.readouterr().err


def test_another_sweep_or_another_setting_is_refused(spec, alphas):
    def refused(message, sweep="alpha", **changes):
        before = sorted(alphas[0].rglob("*"))
        with pytest.raises(WorkdirError, match=message):
            sweep_run.run(small(spec, **changes), alphas[0], spec=spec, sweep=sweep)
        assert sorted(alphas[0].rglob("*")) == before

    refused("steps: 3 there, 4 here", steps=4)
    refused("holds another sweep .sweep: 'alpha' there, 'two' here", sweep="two")
    listing = alphas[0] / "sweep.json"
    text = listing.read_text()
    listing.write_text(text.replace("alpha=10", "alpha=11", 1))
    refused("lists 'alpha=11', which is no point now")
    listing.write_text(text)


def test_an_interrupted_sweep_goes_on(spec, alphas, tmp_path, monkeypatch):
    """SIGTERM in the second run; the same command ends with the same bits."""
    from ffn_heterogeneity.data.pipeline import BatchIterator

    inner, calls = BatchIterator.__next__, []

    def interrupting(self):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self)

    monkeypatch.setattr(BatchIterator, "__next__", interrupting)
    with pytest.raises(SystemExit) as stop:
        sweep_run.run(small(spec), tmp_path / "run", spec=spec, sweep="two")
    assert stop.value.code == 143
    assert not (tmp_path / "run" / "alpha=1" / "results.json").exists()
    results = sweep_run.run(small(spec), tmp_path / "run", spec=spec, sweep="two")
    assert (results["ran"], results["finished"]) == (1, 2)
    for name in ("alpha=0", "alpha=1"):
        assert rows_of(tmp_path / "run" / name) == rows_of(alphas[0] / name)


def test_one_failing_point_does_not_lose_the_others(spec, files, tmp_path, monkeypatch):
    flags = [f"--config={spec}", "--sweep=broken", f"--workdir={tmp_path / 'run'}"]
    done = run_script("sweep", *flags)
    assert re.search(r"2 of 3 points failed: bad worse: .*nowhere\.txt", done.error)
    assert "3 runs to do" in done.err and "1 of 3 points finished" in done.err
    here = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert here == ["good"], "those that failed leave nothing behind"
    assert run_script("sweep", *flags, "--only=good").code == 0
    assert "point 'god' is unknown" in run_script("sweep", *flags, "--only=god").error


def test_bugs_are_shown_once_and_the_others_run(spec, tmp_path, monkeypatch, capsys):
    def run(config, directory, shared):
        if config.nucl.alpha != 10:
            raise ZeroDivisionError("a bug")
        (directory / "results.json").write_text("{}")

    monkeypatch.setitem(sweep_run.KINDS, "train", sweep_run.Kind(run, lambda config: None))
    with pytest.raises(sweep_run.SweepFailed, match=r"^4 of 5 .*: ZeroDivisionError: a bug$"):
        sweep_run.run(small(spec), tmp_path, spec=spec, sweep="alpha")
    assert capsys.readouterr().err.count("Traceback") == 1


def test_printed_commands_are_the_points(spec, tmp_path):
    flags = [f"--config={spec}", "--sweep=two", f"--workdir={tmp_path / 'run'}"]
    tuples = "--config.nucl.targets=('ffn_out', 'attention_out')"
    for line in run_script("sweep", *flags, tuples, "--print").out.splitlines():
        assert tuples in shlex.split(line)
    flags = [flag.replace("/run", "/other") for flag in flags] + ["--config.steps=2"]
    printed = run_script("sweep", *flags, "--print")
    assert printed.code == 0, printed.err
    lines = printed.out.splitlines()
    assert len(lines) == 2 and not list((tmp_path / "other").glob("alpha*"))
    python, script, *arguments = shlex.split(lines[1])
    assert python == sys.executable and script == str(REPOSITORY / "scripts/train.py")
    assert run_script("train", *arguments).code == 0
    again = run_script("sweep", *flags, "--print")
    assert again.code == 0 and again.out.splitlines() == lines[:1]


# ---- removal and evaluation in memory


def table_flags(files, sweep, workdir):
    return [
        f"--config={REPOSITORY}/configs/prune_table.py", f"--sweep={sweep}", f"--workdir={workdir}",
        f"--config.model={files[0]}", f"--config.text={files[1]}", "--config.window=32",
        "--config.max_windows=3", "--config.batch_size=3",
    ]  # fmt: skip


def results_in(root):
    paths = sorted(Path(root).glob("*/results.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


@pytest.fixture(scope="module")
def pairs(files, tmp_path_factory):
    """(directory, loads, compilations) of Figure 4 on the tiny model."""
    workdir, loads = tmp_path_factory.mktemp("pairs") / "run", []

    def load(*arguments, **options):
        loads.append(arguments)
        return load_model(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "load_model", load)
        before = window_nll._cache_size()
        done = run_script("sweep", *table_flags(files, "pairs", workdir))
    assert done.code == 0, done.err
    return workdir, len(loads), window_nll._cache_size() - before


def test_every_pair_is_one_load_and_one_program(pairs):
    workdir, loads, compilations = pairs
    assert (loads, compilations) == (1, 1)
    found = results_in(workdir)
    assert list(found) == ["layers_0_1", "layers_1_2", "layers_2_3", "unpruned"]
    widths = {name: one["ffn_widths_after"] for name, one in found.items()}
    assert widths["layers_1_2"] == [24, 18, 18, 24] and widths["unpruned"] == [24] * 4
    assert not list(workdir.rglob("*.safetensors")) and "removed" not in found["unpruned"]


def test_every_row_of_table_4_on_a_tiny_model(files, tmp_path):
    before = window_nll._cache_size()
    done = run_script("sweep", *table_flags(files, "criteria", tmp_path))
    assert done.code == 0, done.err
    assert window_nll._cache_size() - before <= 2, "the whole model's program, and the smaller's"
    found = results_in(tmp_path)
    rows = {row: one["perplexity"] for row, one in found.items()}
    assert len(rows) == 12 and all(np.isfinite(list(rows.values())))
    assert len(set(rows.values())) >= 9, rows  # gini and mstd may well choose alike
    for row, one in found.items():
        assert one["ffn_widths_after"] == [24 if row == "unpruned" else 18] * 4
    assert found["stahlberg_byrne"]["largest_condition"] >= 1
    assert "largest_condition" not in found["srinivas_babu"]


def test_in_memory_is_what_the_scripts_do(files, pairs, tmp_path):
    """compress, then evaluate its directory: the same perplexity."""
    flags = [f"--config.model={files[0]}", "--config.layers=pair:1"]
    assert run_script("compress", *flags, f"--workdir={tmp_path / 'c'}").code == 0
    for name, model in (("layers_1_2", tmp_path / "c" / "model"), ("unpruned", files[0])):
        done = run_script(
            "evaluate", f"--config.model={model}", f"--config.text={files[1]}",
            "--config.window=32", "--config.max_windows=3", f"--workdir={tmp_path / name}",
        )  # fmt: skip
        assert done.code == 0, done.err
        apart = json.loads((tmp_path / name / "results.json").read_text())
        together = results_in(pairs[0])[name]
        assert together["nll"] == pytest.approx(apart["nll"], rel=1e-6)
        assert (together["tokens"], together["windows"]) == (apart["tokens"], apart["windows"])


def test_filled_up_is_the_same_function(files):
    config = config_of("prune_table", model=str(files[0]), layers="odd", ratio=0.5)
    model = load_model(str(files[0]))
    smaller, results = pruned.remove(config, model)
    assert smaller.config.ffn_widths == (24, 12, 24, 12)
    filled = pruned.filled_up(smaller)
    assert filled.config == model.config
    assert pruned.filled_up(model) is model
    tokens = np.random.default_rng(0).integers(2, 258, (2, 9))
    one, other = (our_logits(m.config, m.params, tokens) for m in (smaller, filled))
    assert np.abs(one - other).max() <= 5e-6 * np.abs(one).max()
    assert [len(gone) for gone in results["removed"]] == [0, 12, 0, 12]


def test_the_smaller_model_is_written_where_it_is_asked_for(files, tmp_path):
    config = config_of("prune_table", model=str(files[0]), text=str(files[1]), save_model=True)
    config.window, config.max_windows = 16, 2
    results = pruned.run(config, tmp_path)
    assert load_model(str(tmp_path / "model")).config.ffn_widths == (18,) * 4
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_tasks_are_scored_on_the_smaller_model(files, tmp_path, monkeypatch):
    seen = []

    def evaluate_tasks(config, model, samples_dir):
        seen.append((tuple(config.tasks), model.config.ffn_widths, samples_dir))
        tokens = np.arange(2, 9)[None]
        return {"piqa": {"first": float(our_logits(model.config, model.params, tokens)[0, 0, 0])}}

    monkeypatch.setattr(pruned, "evaluate_tasks", evaluate_tasks)
    config = config_of("prune_table", model=str(files[0]), text=str(files[1]), tasks=("piqa",))
    config.window, config.max_windows, config.layers = 16, 2, "odd"
    results = pruned.run(config, tmp_path)
    assert seen == [(("piqa",), (24,) * 4, None)], "filled up, so that one program is enough"
    tree = unstack(random_params(LLAMA))
    _, removal = pruned.remove(config, load_model(str(files[0])))
    for layer, gone in zip(tree["layers"], removal["removed"], strict=True):
        layer["ffn"]["down"]["kernel"][gone] = 0
    exact = our_logits(LLAMA, restack(LLAMA, tree), np.arange(2, 9)[None])[0, 0, 0]
    assert results["tasks"]["piqa"]["first"] == pytest.approx(float(exact), rel=1e-5)
    config.limit = -1
    with pytest.raises(ValueError, match="limit=-1"):
        pruned.check_config(config)
    config.tasks = ()
    pruned.check_config(config)  # without tasks their keys have no say


def test_bad_points_stop_the_sweep_before_it_begins(files, tmp_path):
    flags = table_flags(files, "halves", tmp_path / "run")
    for flag, message in (
        ("--config.text=", "point 'unpruned': give exactly one of --config.text"),
        ("--config.criterion=size", "point 'all': criterion 'size' is unknown"),
        ("--config.ratio=2.0", "point 'all': ratio=2.0 is outside"),
        ("--config.streaming=True", "point 'unpruned': streaming=True is for"),
    ):
        assert message in run_script("sweep", *flags, flag).error
        assert not (tmp_path / "run").exists()


# ---- jobs


def test_options_of_jobs():
    parsed = sweep_jobs.parse_options("timeout_min=60,slurm_partition=gpu")
    assert parsed == {"timeout_min": 60, "slurm_partition": "gpu"}
    assert sweep_jobs.parse_options("") == {}
    for text in ("timeout", "=3"):
        with pytest.raises(ValueError, match="write key=value"):
            sweep_jobs.parse_options(text)


def test_jobs_without_submitit(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match=r"pip install 'ffn-heterogeneity\[slurm\]'"):
        sweep_jobs.run_jobs(dict.get, {}, tmp_path)


def test_jobs_of_the_local_executor(tmp_path):
    """`dict.get` as a job: None is good, a text is what went wrong; a job that dies is named."""
    jobs = {"good": ({}, "a"), "bad": ({"a": "the disk is full"}, "a"), "dead": (1, "a")}
    options = "cluster=local,parallel=3"
    failed = sweep_jobs.run_jobs(dict.get, jobs, tmp_path / "jobs", options)
    assert failed.pop("bad") == "the disk is full"
    assert re.fullmatch(r"the job ended without a result, see .*_log\.err", failed.pop("dead"))
    assert not failed
    with pytest.raises(ValueError, match="--submitit='cluster=local,tiem=3'"):
        sweep_jobs.run_jobs(dict.get, jobs, tmp_path / "jobs", "cluster=local,tiem=3")
    with pytest.raises(ValueError, match="parallel='many'"):
        sweep_jobs.run_jobs(dict.get, jobs, tmp_path / "jobs", "cluster=local,parallel=many")


@pytest.mark.slow
def test_a_sweep_as_local_jobs_is_the_same_sweep(files, pairs, tmp_path):
    flags = table_flags(files, "pairs", tmp_path / "run")
    jobs = ["--launcher=submitit", "--submitit=cluster=local,parallel=2"]
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "sweep.py", *flags, *jobs],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, other = results_in(pairs[0]), results_in(tmp_path / "run")
    assert list(one) == list(other)
    for name, result in one.items():
        assert {k: v for k, v in result.items() if k != "seconds"} == {
            k: v for k, v in other[name].items() if k != "seconds"
        }
    assert run_script("sweep", *flags).code == 0, "and it is finished"
