"""Complete evaluations by the harness: stock groups and tags, limits, resuming."""

import dataclasses
import functools
import hashlib
import json
import re
import tempfile
from pathlib import Path

import pytest
import yaml
from etils import epath
from task_tools import OwnTask
from tiny_models import LLAMA, byte_tokenizer, config_of, random_params
from tiny_runs import read_rows, refused, write_rows

from ffn_heterogeneity.evaluate import graders, tasks
from ffn_heterogeneity.evaluate.run import check_config, run
from ffn_heterogeneity.evaluate.sandbox import programs as sandbox
from ffn_heterogeneity.evaluate.tasks import limited
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.launch import in_memory
from ffn_heterogeneity.models.config import LayerConfig

pytestmark = pytest.mark.usefixtures("compiled_quickly", "no_network", "lm_eval")
SMALL = dataclasses.replace(LLAMA, layers=(LayerConfig(12),) * 2, max_position=384)


@pytest.fixture(scope="module")
def model():
    return Model(SMALL, random_params(SMALL), byte_tokenizer(), "tiny")


def questions(count):
    return [
        {"goal": f"Goal {i}?", "sol1": f"do {i}", "sol2": f"leave {i} be", "label": i % 2}
        for i in range(count)
    ]


def task_file(folder, name, count, metrics=("acc",), **settings):
    """Writes a file of questions for a stock task."""
    data = folder / f"{name}.jsonl"
    write_rows(data, questions(count))
    files = {"data_files": {"validation": str(data)}, "cache_dir": str(folder / "cache")}
    mean = {"aggregation": "mean", "higher_is_better": True}
    settings |= {"task": name, "dataset_path": "json", "validation_split": "validation"}
    settings |= {"dataset_kwargs": files, "metric_list": [{"metric": x, **mean} for x in metrics]}
    settings |= {"doc_to_text": "{{goal}}", "doc_to_target": "label"}
    settings |= {"doc_to_choice": "{{[sol1, sol2]}}", "output_type": "multiple_choice"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))


def evaluated(config, model, workdir=None):
    with tempfile.TemporaryDirectory() as folder:
        return tasks.evaluate_tasks(check_config(config), model, epath.Path(workdir or folder))[
            "tasks"
        ]


@pytest.fixture
def stock(tmp_path, monkeypatch):
    """Tasks "few" (2 questions) and "many" (5), tag "both"; groups with and without a mean."""
    import lm_eval.tasks

    task_file(tmp_path, "few", 2, tag=["both"])
    task_file(tmp_path, "many", 5, ("acc", "acc_norm"), tag=["both"])
    mean = {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}]}
    for name, settings in {"plain": {}, "mean": mean}.items():
        group = {"group": name, "task": ["few", "many"], **settings}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(group))
    # The harness's own tasks need the network.
    options = {"include_path": str(tmp_path), "include_defaults": False}
    manager = functools.partial(lm_eval.tasks.TaskManager, **options)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)


def test_stock_groups_and_tags(stock, model):
    """A group's row is over all questions, or the harness's own; each task of a tag has one."""
    config = config_of("harness", model="x", tasks=("plain",))
    rows = evaluated(config, model)
    assert list(rows) == ["plain", "few", "many"]
    few, many, plain = rows["few"], rows["many"], rows["plain"]
    assert (few["n"], many["n"], plain["n"], plain["shots"]) == (2, 5, 7, 0)
    assert plain["acc"] == pytest.approx((2 * few["acc"] + 5 * many["acc"]) / 7)
    # For a metric that only one of them has: that value.
    assert "acc_norm" not in few and plain["acc_norm"] == many["acc_norm"]
    assert plain["acc_low"] < plain["acc"] < plain["acc_high"]
    config.tasks = ("both", "mean")
    rows = evaluated(config, model)
    assert list(rows) == ["few", "many", "mean"]
    assert (rows["few"], rows["many"]) == (few, many)
    assert rows["mean"]["acc"] == pytest.approx((few["acc"] + many["acc"]) / 2)
    assert rows["mean"]["n"] == 7 and "acc_norm" not in rows["mean"]


def test_a_task_without_examples_by_its_definition_is_named(stock, model, tmp_path, capsys):
    task_file(tmp_path, "bare", 3, num_fewshot=0)
    settings = {"fewshot_split": "validation"}
    task_file(tmp_path, "shown", 3, **settings)
    config = config_of("harness", model="x", tasks=("bare", "shown"), num_fewshot=1)
    rows = evaluated(config, model)
    assert (rows["bare"]["shots"], rows["shown"]["shots"]) == (0, 1)
    said = capsys.readouterr().err
    assert "bare: no examples, as its definition says" in said and "shown: no" not in said


def test_foreign_code_tasks_are_refused(stock, model, tmp_path):
    """The harness would run the model's programs in this process, without a sandbox."""
    task_file(tmp_path, "coding", 2, unsafe_code=True)
    config = config_of("harness", model="x", tasks=("few", "coding"), allow_code_execution=True)
    refused("coding runs generated programs, without a sandbox", evaluated, config, model)


# Not marked by the harness: sympy's parse_expr (an eval) reads the boxed answer of a model.
UNREAD = "!function lm_eval.tasks.score.math.utils_math.process_results"


def written(folder, name, grader):
    """A stock task whose question is answered in words, and graded as `grader` says."""
    row = {"question": "1 + 1?", "answer": "#### 2", "question_id": 0, "prompt_id": 0}
    write_rows(folder / f"{name}.jsonl", [row | {"problem": "1 + 1?", "solution": "\\boxed{2}"}])
    task = f"""
{grader}
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}, cache_dir: {folder}/cache}}
training_split: null
fewshot_split: null
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
"""
    (folder / f"{name}.yaml").write_text(task)


@pytest.mark.parametrize(
    "grader",
    [
        f"process_results: {UNREAD}\nmetric_list: [{{metric: acc, aggregation: mean}}]",
        f"metric_list: [{{metric: {UNREAD}, aggregation: mean}}]",
        f"metric_list: [{{metric: exact_match, aggregation: {UNREAD}}}]",
        f"filter_list: [{{name: a, filter: [{{function: custom, filter_fn: {UNREAD}}}]}}]",
    ],
    ids=["results", "metric", "aggregation", "filter"],
)
def test_no_grader_that_nobody_read_sees_what_a_model_wrote(
    stock, model, tmp_path, monkeypatch, grader
):
    """A grader that the harness does not mark; a model's answer would create the canary file."""
    from lm_eval.tasks.score.math import math_grader

    from ffn_heterogeneity.evaluate.harness import HarnessLM

    canary = tmp_path / "canary"
    answer = f"So \\boxed{{open('{canary}','w')}}"
    monkeypatch.setattr(HarnessLM, "generate_until", lambda _, asked, **__: [answer] * len(asked))
    # As where antlr is installed.
    monkeypatch.setattr(math_grader, "_check_antlr_version", lambda: None)
    written(tmp_path, "robust", grader)
    config = config_of("harness", model="x", tasks=("few", "robust"))
    try:
        refused("robust .*utils_math.py.* leave it out", evaluated, config, model)
    finally:
        assert not canary.exists(), "the model's answer was run"


def test_graders_that_were_read_grade(stock, model, tmp_path, monkeypatch, lm_eval):
    """GSM8K has no grading code; MATH's was reviewed, and is recognised by its digest."""
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    answers = ["#### 2", "is $2$"]
    monkeypatch.setattr(HarnessLM, "generate_until", lambda _, asked, **__: [answers.pop(0)])
    tasks = Path(lm_eval.__file__).parent / "tasks"
    for name in ("gsm8k/gsm8k", "hendrycks_math/hendrycks_math_algebra"):
        written(tmp_path, name.split("/")[1], f"include: {tasks / name}.yaml")
    names = ("gsm8k", "hendrycks_math_algebra")
    rows = evaluated(config_of("harness", model="x", tasks=names, num_fewshot=0), model)
    assert rows["gsm8k"]["exact_match_strict-match"] == 1
    assert rows["hendrycks_math_algebra"]["exact_match"] == 1


def test_read_graders_are_those_of_the_harness_here(lm_eval):
    """Each digest is that of a file; none imports a file without review, none evaluates code."""
    paths = (Path(lm_eval.__file__).parent / "tasks").rglob("utils.py")
    files = {hashlib.sha256(path.read_bytes()).hexdigest(): path.read_text() for path in paths}
    for digest in graders.READ.values():
        assert not re.search(r"lm_eval\.tasks|sympy|subprocess|\b(eval|exec|open)\(", files[digest])
    # A task with its own class may run any code.
    assert re.match("is graded by .*task_tools.py", graders.running(OwnTask()))


def test_limits_are_cut_to_what_there_is(stock, model, tmp_path):
    config = config_of("harness", model="x", tasks=("plain",), limit=6)
    counts = {name: row["n"] for name, row in evaluated(config, model).items()}
    assert counts == {"plain": 6, "few": 2, "many": 4}
    config.tasks, config.limit = ("both", "mean"), 3
    rows = evaluated(config, model, epath.Path(tmp_path))
    assert {name: row["n"] for name, row in rows.items()} == {"few": 2, "many": 3, "mean": 3}
    assert len(read_rows(tmp_path / "samples" / "few.jsonl")) in (1, 2)
    write_rows(tmp_path / "data" / "piqa" / "validation.jsonl", questions(4))
    config = config_of("harness", model="x", data_root=str(tmp_path / "data"), limit=100)
    assert evaluated(config, model)["piqa"]["n"] == 4


@pytest.mark.parametrize(
    ("sizes", "limit", "shares"),
    [
        ((5, 5, 5), 7, (3, 2, 2)),
        ((5, 5, 5), 2, (1, 1, 0)),
        ((1, 9, 2), 9, (1, 6, 2)),
        ((1, 0, 2), 9, (1, 0, 2)),
        ((0, 0), 3, (0, 0)),
    ],
)
def test_shares_of_a_limit(sizes, limit, shares):
    limits = limited({f"t{i}": size for i, size in enumerate(sizes)}, limit)
    assert limits == {f"t{i}": share for i, share in enumerate(shares) if share}


def test_no_result_is_lost():
    """Tasks without a count of questions, or with another name in the harness, have a row."""
    counts = {name: {"effective": n} for name, n in (("a", 0), ("b", 0), ("x", 3))}
    results = {"a": {"acc,none": 0.2}, "b": {"acc,none": 0.4}, "x": {"f1,none": float("nan")}}
    output = {"results": results, "n-samples": counts, "n-shot": {"a": 1}}
    named = tasks.NamedTasks({"g": None}, {"g": {"a": None, "b": None, "c": None}})
    rows = tasks._summary(output, named)
    assert rows["g"] == {"n": 0, "shots": 1, "acc": pytest.approx(0.3)}
    assert list(rows) == ["g", "x"] and rows["x"]["n"] == 3


TWO = {"tasks": ("piqa", "gsm8k"), "limit": 2, "num_fewshot": 0}


def stop(*_, **__):
    raise KeyboardInterrupt


def test_a_stopped_evaluation_goes_on(shared_data, model, tmp_path, monkeypatch):
    """A finished task is not run again, and the numbers equal those of a run without a stop."""
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    config = config_of("harness", model="x", data_root=str(shared_data), **TWO)

    def evaluated(folder):
        return run(config, epath.Path(folder), lambda *_, **__: model)

    uninterrupted = evaluated(tmp_path / "whole")
    assert list(uninterrupted["tasks"]) == ["piqa", "gsm8k"]
    out = tmp_path / "out"
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(HarnessLM, "generate_until", stop)
        evaluated(out)
    assert [path.name for path in (out / "tasks").iterdir()] == ["piqa.json"]
    assert len(read_rows(out / "samples" / "piqa.jsonl")) == 2
    assert not (out / "results.json").exists()
    monkeypatch.setattr(HarnessLM, "loglikelihood", stop)
    assert evaluated(out) == uninterrupted
    assert json.loads((out / "results.json").read_text())["tasks"] == uninterrupted["tasks"]
    assert len(read_rows(out / "samples" / "gsm8k.jsonl")) == 4, "two filters"
    # Another name that maps to the same file is not confused with it.
    (out / "tasks" / "piqa.json").write_text(json.dumps({"name": "pi/qa", "value": {}}))
    with pytest.raises(KeyboardInterrupt):
        evaluated(out)


def test_a_stopped_row_of_table_4_goes_on(shared_data, model, tmp_path, monkeypatch):
    """A point of a removal sweep also stores its tasks one by one."""
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    (tmp_path / "text.txt").write_text("Some words that are read. " * 20)
    settings = {"text": str(tmp_path / "text.txt"), "window": 16, "max_windows": 1, "model": "x"}
    settings |= {"criterion": "entropy", "data_root": str(shared_data)}
    config = config_of("prune_table", **settings, **TWO)

    def row():
        return in_memory.run(config, epath.Path(tmp_path / "out"), lambda *_, **__: model)

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(HarnessLM, "generate_until", stop)
        row()
    assert not (tmp_path / "out" / "results.json").exists()
    monkeypatch.setattr(HarnessLM, "loglikelihood", stop)
    assert list(row()["tasks"]) == ["piqa", "gsm8k"]


def test_a_missing_sandbox_is_told_at_once(tmp_path, monkeypatch):
    settings = {"tasks": ("mbpp",), "data_root": str(tmp_path), "allow_code_execution": True}
    config = config_of("harness", model="x", **settings)
    monkeypatch.setattr(sandbox, "PROOF", "assert 0, 'a hole'")
    sandbox.failure.cache_clear()
    try:
        refused("mbpp runs generated programs.*install bubblewr", check_config, config)
        config.tasks = ("piqa",)
        check_config(config)
    finally:
        sandbox.failure.cache_clear()
