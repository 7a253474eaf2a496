"""The task pack: the harness's own requests and judgments, from local files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from task_tools import requests_of
from tiny_runs import read_rows, write_rows

from ffn_heterogeneity.evaluate.harness_tasks import make_task_pack
from ffn_heterogeneity.evaluate.harness_tasks.questions import ROWS
from ffn_heterogeneity.evaluate.harness_tasks.task_files import tables

pytestmark = pytest.mark.usefixtures("no_network")

# Task of the harness -> its file.
STOCK = {f"arc_{kind}": f"arc/arc_{kind}.yaml" for kind in ("challenge", "easy")}
STOCK |= {name: f"super_glue/{name}/default.yaml" for name in ("boolq", "cb", "copa", "wic")}
STOCK |= {"sglue_rte": "super_glue/rte/default.yaml", "social_iqa": "siqa/siqa.yaml"}
STOCK |= {name: f"{name}/default.yaml" for name in ("triviaqa", "winogrande")}
STOCK |= {"lambada_openai": "lambada/lambada_openai.yaml"}
STOCK |= {"mmlu_virology": "mmlu/default/mmlu_virology.yaml"}
PLAIN = ("gsm8k", "hellaswag", "mbpp", "nq_open", "piqa", "race", "sciq", "swag")
STOCK |= {name: f"{name}/{name}.yaml" for name in PLAIN}


# ---- the hub's form of the shared rows, made here and not by the package


def _arc(row):
    choices = row["question"]["choices"]
    form = {key: [choice[key] for choice in choices] for key in ("text", "label")}
    return {"question": row["question"]["stem"], "choices": form, "answerKey": row["answerKey"]}


def _mmlu(row):
    choices = [row[letter] for letter in "ABCD"]
    names = {key: row[key] for key in ("subject", "question")}
    return {**names, "choices": choices, "answer": "ABCD".index(row["answer"])}


def _triviaqa(row):
    question = row["context"].removeprefix("Question: ").removesuffix("\nAnswer:")
    aliases = [row["answer"], *(alias for alias in row["aliases"] if alias != row["answer"])]
    return {"question": question, "answer": {"aliases": aliases}}


def _race(row):
    keys = ("question", "options", "answer")
    return {"article": row["article"], "problems": str([{key: row[key] for key in keys}])}


def _swag(row):
    endings = {f"ending{i}": choice for i, choice in enumerate(row["choices"])}
    return {"startphrase": row["startphrase"], "label": row["answer"], **endings}


def _number(*words):
    return lambda row: row | {"label": words.index(row["label"])}


HUB = {"arc_challenge": _arc, "mmlu_virology": _mmlu, "triviaqa": _triviaqa, "race": _race}
HUB |= {"swag": _swag, "cb": _number("entailment", "contradiction", "neutral")}
HUB |= {"sglue_rte": _number("entailment", "not_entailment"), "wic": _number(False, True)}
HUB |= {"boolq": _number(False, True), "social_iqa": lambda x: x | {"label": str(x["label"])}}


def hub_rows(shared_data, name):
    """Forty rows in the hub's form (arc_easy, shared as instructions: those of arc_challenge)."""
    local = tables().tasks[name]["local"]
    name = "arc_challenge" if name == "arc_easy" else name
    folder = shared_data / tables().tasks[name]["local"]["folder"]
    files = [folder / f"{part}.jsonl" for part in local["evaluation"]]
    rows = read_rows(next(file for file in files if file.exists()))
    if name == "race":
        rows = [row for row in rows if row["example_id"].startswith("high")]
    if name == "mmlu_virology":
        rows = [row for row in rows if row["subject"] == "virology"]
    return [HUB.get(name, lambda row: row)(row) for row in rows[:40]]


@pytest.fixture
def hub_root(shared_data, tmp_path):
    """`hub_root(name)`: a root with 24 questions and 16 examples of a task in the hub's form."""

    def make(name):
        local = tables().tasks[name]["local"]
        rows = hub_rows(shared_data, name)
        write_rows(tmp_path / local["folder"] / f"{local['evaluation'][0]}.jsonl", rows[:24])
        if name == "mbpp":
            rows[24:] = read_rows(shared_data / "mbpp" / "prompt.jsonl")
        write_rows(tmp_path / local["folder"] / f"{local['fewshot'][0]}.jsonl", rows[24:])
        return str(tmp_path), rows[:24], rows[24:]

    return make


def stock_task(lm_eval, name, questions, examples, shots):
    """The harness's own task over these rows (its data set is replaced, nothing else)."""
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(lm_eval.__file__).parent / "tasks" / STOCK[name]
    # Its MBPP module downloads a metric when it is loaded: its functions stay unresolved.
    config = load_yaml(path, resolve_func=name != "mbpp")
    given = dict.fromkeys(("train", "dev"), datasets.Dataset.from_list(examples))
    given |= dict.fromkeys(("validation", "test"), datasets.Dataset.from_list(questions))
    config = {key: value for key, value in config.items() if key != "tag"}
    if name == "mbpp":
        config["metric_list"] = [{"metric": "bypass", "aggregation": "bypass"}]
        config["fewshot_config"]["samples"] = stock_mbpp_shots(path)
    config |= {"custom_dataset": lambda **_: given, "num_fewshot": shots, "metadata": None}
    return ConfigurableTask(config=config)


def stock_mbpp_shots(path):
    nodes = ast.parse((path.parent / "utils.py").read_text()).body
    [function] = [one for one in nodes if getattr(one, "name", "") == "list_fewshot_samples"]
    return ast.literal_eval(function.body[0].value)


# RACE and LAMBADA have a test split alone: the stock tasks draw examples from it, the question
# itself not excepted, which is not copied.
PARITY = [(name, 0) for name in STOCK]
PARITY += [(name, 3) for name in STOCK if name not in ("race", "lambada_openai")]


@pytest.mark.parametrize("name, shots", PARITY)
def test_requests_are_those_of_the_stock_task(lm_eval, hub_root, name, shots):
    root, questions, examples = hub_root(name)
    pack = make_task_pack(root, name, num_fewshot=shots, fewshot_from="train", allow_code=True)
    expected = requests_of(stock_task(lm_eval, name, questions, examples, shots))
    assert requests_of(pack.tasks[0]) == expected
    assert len(expected) >= 8 and len(set(map(str, expected))) > 6


@pytest.mark.parametrize("name", [name for name in STOCK if name != "mbpp"])
def test_answers_are_judged_as_by_the_stock_task(lm_eval, hub_root, name):
    """The same answers, right and wrong, make the same results."""
    root, questions, examples = hub_root(name)
    ours = make_task_pack(root, name, num_fewshot=0).tasks[0]
    stock = stock_task(lm_eval, name, questions, examples, 0)
    assert ours.OUTPUT_TYPE == stock.OUTPUT_TYPE
    assert set(ours.aggregation()) == set(stock.aggregation())
    assert ours.higher_is_better() == stock.higher_is_better()
    assert ours.config.filter_list == stock.config.filter_list
    assert ours.config.generation_kwargs == stock.config.generation_kwargs
    seen = set()
    for number, (mine, theirs) in enumerate(zip(ours.eval_docs, stock.eval_docs, strict=True)):
        gold = stock.doc_to_target(theirs)
        if ours.OUTPUT_TYPE == "multiple_choice":
            count = 2 if name == "winogrande" else len(stock.doc_to_choice(theirs))
            results = [(-float((i * 7 + number) % 5) - i / 9, i == 0) for i in range(count)]
        elif ours.OUTPUT_TYPE == "loglikelihood":
            results = [(-1.5 * number, number % 2 == 0)]
        else:
            answer = gold[-1] if isinstance(gold, list) else gold
            results = [answer if number % 2 else answer[: len(answer) // 2] + " no"]
        found = ours.process_results(mine, results)
        assert found == stock.process_results(theirs, results)
        seen.add(str(found))
    assert len(seen) > 1, "right and wrong both occur"


def test_piqa_and_hellaswag_as_the_harness_loads_them(lm_eval, shared_data, tmp_path):
    """The oracle read by the harness's own data path, not by rows handed over."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    for name in ("piqa", "hellaswag"):
        path = shared_data / name / "validation.jsonl"
        config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / STOCK[name])
        config.pop("tag", None)
        kwargs = {"data_files": {"validation": str(path)}, "cache_dir": str(tmp_path)}
        config |= {"dataset_path": "json", "dataset_kwargs": kwargs, "training_split": None}
        pack = make_task_pack(str(shared_data), name, num_fewshot=0)
        expected = requests_of(ConfigurableTask(config=config), limit=200)
        assert requests_of(pack.tasks[0], limit=200) == expected


@pytest.mark.parametrize("name", sorted(HUB))
def test_local_and_hub_forms_are_the_same_questions(lm_eval, shared_data, hub_root, name):
    root, questions, _ = hub_root(name)
    [hub] = make_task_pack(root, name, num_fewshot=0).tasks
    [local] = make_task_pack(str(shared_data), name, num_fewshot=0).tasks
    assert list(hub.eval_docs) == list(local.eval_docs)[: len(questions)]


def test_every_file_names_known_things():
    assert set(STOCK) | {f"mmlu_{name}" for name in ("stem", "other")} <= set(tables().names())
    for name, settings in tables().tasks.items():
        local = settings["local"]
        assert local["rows"] in ROWS, name
        assert {"folder", "evaluation", "fewshot", "rows"} <= set(local), name
        assert isinstance(settings["num_fewshot"], int), name
    used = {settings["local"]["rows"] for settings in tables().tasks.values()}
    assert used == set(ROWS)
    defaults = {name: tables().tasks[name]["num_fewshot"] for name in STOCK}
    shots = {"hellaswag": 10, "mbpp": 3}
    shots |= dict.fromkeys(("gsm8k", "mmlu_virology", "nq_open", "triviaqa"), 5)
    assert {name: count for name, count in defaults.items() if count} == shots


# ---- forms of ARC


def test_arc_as_an_instruction(shared_data):
    """All rows of the instruction form that are also there in the original form agree."""
    local = shared_data / "arc_challenge"
    rows = map(ROWS["arc"], read_rows(local / "test_llm_adapters.jsonl"))
    found = {row["question"]: row for row in rows}
    agree, differ = 0, []
    for row in read_rows(local / "test.jsonl"):
        expected = ROWS["arc"](row)
        other = found.get(expected["question"])
        if other is not None:
            same = other == expected
            agree += same
            differ += [] if same else [expected["question"]]
    assert agree > 1000 and len(differ) < 15, differ


def test_race_articles_with_several_problems():
    problems = [
        {"question": "He is a  _  .", "options": ["a", "man", "c", "d"], "answer": "B"},
        {"question": "Why?", "options": ["x", "y", "z", "w"], "answer": "A"},
        {"question": "Who?", "options": ["1", "2", "3", "4"], "answer": "D"},
    ]
    read = ROWS["race"]({"article": "Text.", "problems": str(problems)})
    assert read["text"] == "Article: Text.\n\nHe is a man\nQuestion: Why?\nAnswer: x\nWho?"
    assert read["choices"] == ["1", "2", "3", "4"] and read["label"] == 3
