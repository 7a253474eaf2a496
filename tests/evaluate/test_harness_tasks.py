"""Tasks from local files: the harness's requests, few-shot examples, bad files."""

import ast
import json
import logging
import types
from pathlib import Path

import pytest
from task_tools import requests_of
from tiny_runs import read_rows, refused, write_rows

import ffn_heterogeneity.evaluate as package
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.evaluate import graders
from ffn_heterogeneity.evaluate.harness_tasks import _index, make_task_pack
from ffn_heterogeneity.evaluate.harness_tasks.forms import TASKS

pytestmark = pytest.mark.usefixtures("no_network", "lm_eval")


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
# (task, examples); arc_easy is shared as instructions. RACE and LAMBADA only have a test split:
# the stock tasks draw examples from it, the question itself not excepted, which is not copied.
STOCK = [name for name in TASKS if TASKS[name].stock and name not in ("arc_easy", "mmlu")]
STOCK += ["mmlu_virology"]
PARITY = [(name, 0) for name in STOCK]
PARITY += [(name, 3) for name in STOCK if name not in ("race", "lambada_openai")]


def files_of(name):
    """(folder, file of questions, file of examples)."""
    stock = _index()[name].cfg
    split = stock.get("test_split") or stock["validation_split"]
    train = stock.get("fewshot_split") or stock.get("training_split") or "train"
    return TASKS[name.partition("_virology")[0]].folder, f"{split}.jsonl", f"{train}.jsonl"


@pytest.mark.parametrize("name, shots", PARITY)
def test_requests_are_those_of_the_harness(shared_data, tmp_path, name, shots):
    """Requests from local files equal those of the harness's task with its JSON reader."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    folder, questions, examples = files_of(name)
    source = shared_data / folder / questions
    source = source if source.exists() else source.with_name("validation.jsonl")
    rows = read_rows(source)
    rows = [row for row in rows if row.get("example_id", "high").startswith("high")]
    rows = [row for row in rows if row.get("subject", "virology") == "virology"][:40]
    write_rows(tmp_path / "local" / folder / questions, rows[:24])
    write_rows(tmp_path / "local" / folder / examples, rows[24:])
    hub = [HUB.get(name, lambda row: row)(row) for row in rows]
    data = {key: str(tmp_path / f"{key}.jsonl") for key in (questions[:-6], examples[:-6])}
    write_rows(tmp_path / questions, hub[:24])
    write_rows(tmp_path / examples, hub[24:])
    config = load_yaml(_index()[name].yaml_path) | {"dataset_path": "json", "dataset_name": None}
    config |= {"dataset_kwargs": {"data_files": data, "cache_dir": str(tmp_path)}, "tag": None}
    stock = ConfigurableTask(config=config | {"num_fewshot": shots})
    local = {"num_fewshot": shots, "fewshot_from": "train"}
    [ours] = make_task_pack(str(tmp_path / "local"), name, **local).tasks
    assert requests_of(ours) == requests_of(stock) and len(requests_of(ours)) >= 8
    assert ours.config.metric_list == stock.config.metric_list
    [again] = make_task_pack(str(tmp_path / "local"), name, num_fewshot=0).tasks
    write_rows(tmp_path / "local" / folder / questions, hub[:24])
    [read] = make_task_pack(str(tmp_path / "local"), name, num_fewshot=0).tasks
    assert list(again.eval_docs) == list(read.eval_docs), "the hub's form is read, too"
    assert not graders.running(ours)


def test_mbpp_asks_as_the_harness_does(lm_eval, shared_data):
    """The harness's module downloads a metric when it is imported, so its source is read here."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(lm_eval.__file__).parent / "tasks/mbpp/mbpp.yaml"
    nodes = ast.parse((path.parent / "utils.py").read_text()).body
    [function] = [one for one in nodes if getattr(one, "name", "") == "list_fewshot_samples"]
    config = load_yaml(path, resolve_func=False)
    config["metric_list"] = [{"metric": "bypass", "aggregation": "bypass"}]
    config["fewshot_config"]["samples"] = ast.literal_eval(function.body[0].value)
    data = {"data_files": {"test": str(shared_data / "mbpp/test.jsonl")}}
    stock = ConfigurableTask(config=config | {"dataset_path": "json", "dataset_kwargs": data})
    [ours] = make_task_pack(str(shared_data), "mbpp", allow_code=True).tasks
    assert requests_of(ours) == requests_of(stock)


def test_arc_as_an_instruction(shared_data):
    """All rows of the instruction form that are also there in the original form agree."""
    local, form = shared_data / "arc_challenge", TASKS["arc_challenge"].form

    def content(row):
        read = form(row)
        answer = read["choices"]["label"].index(read["answerKey"])
        return read["question"], (read["choices"]["text"], answer)

    by_question = dict(map(content, read_rows(local / "test_llm_adapters.jsonl")))
    agree, differ = 0, []
    for question, expected in map(content, read_rows(local / "test.jsonl")):
        if question in by_question:
            same = by_question[question] == expected
            agree += same
            differ += [] if same else [question]
    assert agree > 1000 and len(differ) < 15, differ


# ---- runs


def run(lm_eval, model, pack, limit=None):
    # torch, where it is installed, would be imported to seed it and to list the environment.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        return lm_eval.simple_evaluate(
            model=model, **pack._asdict(), limit=limit, bootstrap_iters=0, torch_random_seed=None
        )


def test_a_run_offline(lm_eval, shared_data):
    from lm_eval.models.dummy import DummyLM

    names = ["gsm8k", "nq_open", "winogrande", "lambada_openai", "mmlu_virology", "cb"]
    pack = make_task_pack(str(shared_data), names)
    assert [task.config.num_fewshot for task in pack.tasks] == [5, 5, 0, 0, 5, 0]
    evaluation = run(lm_eval, DummyLM(), pack, limit=3)
    results = evaluation["results"]
    assert results["gsm8k"]["exact_match,strict-match"] == 0.0
    assert {"acc,none", "f1,none"} <= set(results["cb"])
    [sample, *_] = evaluation["samples"]["mmlu_virology"]
    prompt = sample["arguments"][0][0]
    assert prompt.startswith("The following are multiple choice questions (with answers) about vir")
    assert prompt.count("Answer:") == 6
    assert sample["doc"]["subject"] == "virology"
    assert evaluation["samples"]["gsm8k"][0]["arguments"][0][0].count("Question:") == 6


def test_group_accuracy_weights_questions_not_subjects(lm_eval, tmp_path):
    from lm_eval.models.dummy import DummyLM

    class First(DummyLM):
        def loglikelihood(self, requests, disable_tqdm=False):
            return [(0.0 if one.args[1] == " A" else -1.0, False) for one in requests]

    # The first subject: ten questions, all "A"; the others: one each, none "A".
    question = {"question": "q", "A": "1", "B": "2", "C": "3", "D": "4"}
    names = sorted(_index()["mmlu_social_sciences_tasks"].tags)
    rows = [question | {"subject": name.removeprefix("mmlu_"), "answer": "C"} for name in names]
    write_rows(tmp_path / "mmlu" / "dev.jsonl", rows)
    test = [rows[0] | {"answer": "A"}] * 10 + rows[1:]
    write_rows(tmp_path / "mmlu" / "test.jsonl", test)
    pack = make_task_pack(str(tmp_path), "mmlu_social_sciences", num_fewshot=1)
    assert {task.config.num_fewshot for task in pack.tasks[0].get_all_tasks()} == {1}
    results = run(lm_eval, First(), pack)["results"]
    assert results["mmlu_social_sciences"]["acc,none"] == pytest.approx(10 / (9 + len(names)))
    assert results["mmlu_sociology"]["acc,none"] == 0.0


def test_mbpp_runs_programs_only_when_allowed(shared_data, monkeypatch):
    calls = []

    def judge(*arguments, allow):
        calls.append((*arguments, allow))
        return types.SimpleNamespace(passed="max" in arguments[0])

    stand_in = types.SimpleNamespace(run_solution=judge)
    monkeypatch.setattr(package, "code_metrics", stand_in, raising=False)
    with pytest.raises(DataError, match="mbpp runs programs written by the model; set allow_code"):
        make_task_pack(str(shared_data), ["piqa", "mbpp"])
    pack = make_task_pack(str(shared_data), "mbpp", allow_code=True)
    task, rows = pack.tasks[0], read_rows(shared_data / "mbpp" / "test.jsonl")
    assert task.process_results(task.eval_docs[0], ["max"]) == {"pass_at_1": 1.0}
    assert task.process_results(task.eval_docs[1], ["min"]) == {"pass_at_1": 0.0}
    assert calls[1] == ("min", rows[1]["test_list"], rows[1]["test_setup_code"], True)
    assert task.UNSAFE_CODE and pack.confirm_run_unsafe_code
    assert not graders.running(task), "in the sandbox"


# ---- few-shot examples


def test_without_a_training_file_the_question_is_never_its_own_example(tmp_path, caplog):
    rows = [{"question": f"number {i}", "answer": [f"word {i}"]} for i in range(6)]
    write_rows(tmp_path / "nq_open" / "validation.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        [task] = make_task_pack(str(tmp_path), "nq_open").tasks
    assert "nq_open: few-shot examples come from the evaluation file, without" in caplog.text
    assert task.config.metadata["fewshot_file"] == str(tmp_path / "nq_open" / "validation.jsonl")
    for i, (_, prompt, _) in enumerate(requests_of(task, limit=6)):
        assert prompt.count("Q: ") == 6 and f"A: word {i}\n" not in prompt
        assert prompt.endswith(f"Q: number {i}?\nA:")
    with pytest.raises(DataError, match="no such file: .*nq_open/train.jsonl$"):
        make_task_pack(str(tmp_path), "nq_open", fewshot_from="train")
    with pytest.raises(DataError, match="6 examples asked for, but only 5 rows without"):
        make_task_pack(str(tmp_path), "nq_open", num_fewshot=6)


def test_a_training_file_of_another_form(shared_data, caplog):
    with caplog.at_level(logging.WARNING):
        [task] = make_task_pack(str(shared_data), "hellaswag").tasks
    assert "hellaswag: few-shot examples come from the evaluation file" in caplog.text
    _, prompt, _ = requests_of(task, limit=1)[0]
    assert prompt.count("\n\n") == 10
    with pytest.raises(DataError, match=r"hellaswag/train.jsonl, line 1: no field 'endings'"):
        make_task_pack(str(shared_data), "hellaswag", fewshot_from="train")


def test_a_broken_training_file_is_not_passed_over(tmp_path):
    rows = [{"question": f"number {i}", "answer": ["w"]} for i in range(9)]
    write_rows(tmp_path / "nq_open" / "validation.jsonl", rows)
    train = tmp_path / "nq_open" / "train.jsonl"
    for content, message in (
        (b'{"question": "\xff"}', "not UTF-8"),
        (json.dumps(rows[0]).encode() + b'\n{"question": "q"}', "line 2: no field 'answer'"),
        (json.dumps(rows[0]).encode(), "5 examples asked for, but only 1 rows"),
    ):
        train.write_bytes(content)
        with pytest.raises(DataError, match=f"train.jsonl.*{message}"):
            make_task_pack(str(tmp_path), "nq_open")


@pytest.mark.parametrize("name", ["gsm8k", "race"])
def test_fewshot_from_evaluation(shared_data, name):
    """The question itself is never an example, whatever splits the harness's task has."""
    examples = {"num_fewshot": 5, "fewshot_from": "evaluation"}
    [task] = make_task_pack(str(shared_data), name, **examples).tasks
    assert task.config.metadata["fewshot_file"] == task.config.metadata["evaluation_file"]
    key = "\nAnswer:" if name == "gsm8k" else "\n\n"
    for _, prompt, *_ in requests_of(task, limit=20)[::4]:
        begin = "Question: " if name == "gsm8k" else "Article: "
        shown = [example.split(key)[0] for example in prompt.split(begin)[1:]]
        assert len(shown) == 6 and shown.count(shown[-1]) == 1


# ---- bad files and settings

ROW = {"goal": "g", "sol1": "a", "sol2": "b", "label": 0}


@pytest.mark.parametrize(
    "content, message",
    [
        (None, r"no such file: .*piqa/validation\.jsonl$"),
        (b"", r"validation\.jsonl: the file is empty"),
        (b'{"goal": "\xff"}', "not UTF-8: byte 0xff at offset 10"),
        (b'{"goal": ', "line 1: not JSON"),
        ([ROW, {"goal": "g", "sol1": "a", "label": 0}], "line 2: no field 'sol2'; fields seen"),
        ([ROW, ROW | {"sol1": 3}], r"line 2: field 'sol1' is int \(3\), expected text"),
        ([ROW | {"label": -1}], "line 1: field 'label' is -1, which is not an answer"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "piqa" / "validation.jsonl"
    path.parent.mkdir()
    if isinstance(content, list):
        write_rows(path, content)
    elif content is not None:
        path.write_bytes(content)
    refused(message, make_task_pack, str(tmp_path), "piqa", error=DataError)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"names": "pica"}, "unknown task 'pica', did you mean 'piqa'"),
        ({"names": "qqq"}, r"unknown task 'qqq'. Known: arc_challenge, .*mmlu_<subject or group>"),
        ({"names": []}, "no tasks asked for"),
        ({"names": "mmlu_virolgy"}, "did you mean 'mmlu_virology'"),
        ({"names": ["mmlu", "mmlu_virology"]}, "mmlu_virology is asked for twice"),
        ({"num_fewshot": -1}, "num_fewshot=-1"),
        ({"fewshot_from": "dev"}, "fewshot_from='dev': choose one of"),
        ({"data_root": "/nowhere"}, "/nowhere: no such directory"),
    ],
)
def test_bad_settings(shared_data, settings, message):
    settings = {"data_root": str(shared_data), "names": "piqa", **settings}
    with pytest.raises(DataError, match=message) as caught:
        make_task_pack(settings.pop("data_root"), settings.pop("names"), **settings)
    assert "\n" not in str(caught.value)


CHOICE, ABC = {"text": ["a"], "label": ["A"]}, {f"answer{x}": x for x in "ABC"}
ONE = {"question": "q", "options": ["a", "b"], "answer": "A"}
HELLA = {"activity_label": "l", "ctx_a": "a", "ctx_b": "b"}
BAD_ROWS = [
    ("mmlu", {"subject": "s", "question": "q", "choices": ["a"], "answer": 0}, "1 choices"),
    ("mmlu", {"subject": "s", "question": "q", "A": "1", "B": "2", "C": "3"}, "no field 'D'"),
    ("arc_easy", {"question": "q", "choices": CHOICE, "answerKey": "B"}, "answerKey='B': choose"),
    ("arc_easy", {"instruction": "What?", "answer": "answer1"}, "is not a question with its"),
    ("winogrande", {"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}, "no '_'"),
    (
        "winogrande",
        {"sentence": "a _", "option1": "a", "option2": "b", "answer": ""},
        "not an answer",
    ),
    ("triviaqa", {"context": "Q", "answer": "a", "aliases": []}, "not of the form"),
    ("triviaqa", {"question": "q", "answer": {"aliases": []}}, "'aliases' is empty"),
    ("nq_open", {"question": "q", "answer": []}, "'answer' is empty"),
    ("minilongbench_qa", {"dataset": "qasper", "gold": ["a"]}, "no field 'origin_prompt'"),
    ("race", {"article": "a", "problems": "[oops"}, "is not a list"),
    ("race", {"article": "a", "problems": []}, "one or more problems"),
    ("race", {"article": "a", "problems": [ONE]}, "2 options, expected 4"),
    ("lambada_openai", {"text": "word"}, "no last word to predict"),
    ("swag", {"startphrase": "s", "choices": ["a"] * 5, "answer": 4}, "5 endings, expected 4"),
    ("swag", {"startphrase": "s", "choices": "abcd", "answer": 1}, "choices"),
    ("hellaswag", {**HELLA, "endings": [], "label": 0}, "'label' is 0, which is not an answer"),
    (
        "copa",
        {"question": "why", "premise": "p", "choice1": "a", "choice2": "b", "label": 0},
        "'why'",
    ),
    ("social_iqa", {"context": "c", "question": "q", "label": 0, **ABC}, "'label' is 0, which is"),
]


@pytest.mark.parametrize("name, row, message", BAD_ROWS)
def test_bad_rows(name, row, message):
    refused(message, TASKS[name].form, row, error=DataError)


def test_middle_school_is_no_part_of_race(shared_data, tmp_path):
    [task] = make_task_pack(str(shared_data), "race").tasks
    assert len(task.eval_docs) == 500
    row = {"example_id": "middle1.txt", "article": "a", "question": "q", "answer": "A"}
    write_rows(tmp_path / "race" / "validation.jsonl", [row])
    with pytest.raises(DataError, match="race/validation.jsonl: no question for this task"):
        make_task_pack(str(tmp_path), "race")
