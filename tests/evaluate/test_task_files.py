"""The package's task files offline: runs, few-shot examples, bad files, rows and settings."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from task_tools import requests_of
from tiny_runs import read_rows, write_rows

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.evaluate.harness_tasks import make_task_pack
from ffn_heterogeneity.evaluate.harness_tasks.questions import ROWS
from ffn_heterogeneity.evaluate.harness_tasks.task_files import tables

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture
def dummy(lm_eval):
    from lm_eval.models.dummy import DummyLM

    return DummyLM()


def run(lm_eval, model, pack, limit=None):
    # torch, where it is installed, would be imported to seed it and to list the environment.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        return lm_eval.simple_evaluate(
            model=model, **pack._asdict(), limit=limit, bootstrap_iters=0, torch_random_seed=None
        )


def test_a_run_offline(lm_eval, shared_data, dummy):
    names = ["gsm8k", "nq_open", "winogrande", "lambada_openai", "mmlu_virology", "cb"]
    pack = make_task_pack(str(shared_data), names)
    found = run(lm_eval, dummy, pack, limit=3)
    results = found["results"]
    assert results["gsm8k"]["exact_match,strict-match"] == 0.0
    assert {"acc,none", "f1,none"} <= set(results["cb"])
    [sample, *_] = found["samples"]["mmlu_virology"]
    prompt = sample["arguments"][0][0]
    assert prompt.startswith("The following are multiple choice questions (with answers) about vir")
    assert prompt.count("Answer:") == 6
    assert sample["doc"]["subject"] == "virology"
    assert found["samples"]["gsm8k"][0]["arguments"][0][0].count("Question:") == 6


def write_subjects(root, group, first):
    """MMLU files with the answers `first` in the group's first subject, one "C" in each other."""
    question = {"question": "q", "A": "1", "B": "2", "C": "3", "D": "4"}
    test, dev = [], []
    for number, name in enumerate(tables().groups[group].members):
        subject = {"subject": name.removeprefix("mmlu_")} | question
        dev += [subject | {"answer": "B"}] * 2
        test += [subject | {"answer": answer} for answer in (["C"] if number else first)]
    write_rows(root / "mmlu" / "test.jsonl", test)
    write_rows(root / "mmlu" / "dev.jsonl", dev)


def test_group_accuracy_weights_questions_not_subjects(lm_eval, tmp_path):
    from lm_eval.api.model import LM

    class First(LM):
        def loglikelihood(self, requests):
            return [(0.0 if one.args[1] == " A" else -1.0, False) for one in requests]

        def loglikelihood_rolling(self, requests):
            raise NotImplementedError

        def generate_until(self, requests):
            raise NotImplementedError

    # The first subject: ten questions, all "A"; the others: one each, none "A".
    write_subjects(tmp_path, "mmlu_social_sciences", ["A"] * 10)
    pack = make_task_pack(str(tmp_path), "mmlu_social_sciences", num_fewshot=1)
    results = run(lm_eval, First(), pack)["results"]
    assert results["mmlu_social_sciences"]["acc,none"] == pytest.approx(10 / 21)
    assert results["mmlu_sociology"]["acc,none"] == 0.0


def test_mbpp_runs_programs_only_when_allowed(lm_eval, shared_data, monkeypatch):
    import types

    import ffn_heterogeneity.evaluate as package

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


def test_without_a_training_file_the_question_is_never_its_own_example(lm_eval, tmp_path, caplog):
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
    with pytest.raises(DataError, match="6 examples asked for, but beside the question only 5"):
        make_task_pack(str(tmp_path), "nq_open", num_fewshot=6)


def test_a_training_file_of_another_form(lm_eval, shared_data, caplog):
    with caplog.at_level(logging.WARNING):
        [task] = make_task_pack(str(shared_data), "hellaswag").tasks
    assert "hellaswag: few-shot examples come from the evaluation file" in caplog.text
    _, prompt, _ = requests_of(task, limit=1)[0]
    assert prompt.count("\n\n") == 10
    with pytest.raises(DataError, match=r"hellaswag/train.jsonl, line 1: no field 'ctx_a'"):
        make_task_pack(str(shared_data), "hellaswag", fewshot_from="train")


def test_a_broken_training_file_is_not_passed_over(lm_eval, tmp_path):
    rows = [{"question": f"number {i}", "answer": ["w"]} for i in range(9)]
    write_rows(tmp_path / "nq_open" / "validation.jsonl", rows)
    train = tmp_path / "nq_open" / "train.jsonl"
    for content, message in (
        (b"", "the file is empty"),
        (b'{"question": "\xff"}', "not UTF-8"),
        (json.dumps(rows[0]).encode() + b'\n{"question": "q"}', "line 2: no field 'answer'"),
        (json.dumps(rows[0]).encode(), "5 examples asked for, but only 1 rows"),
    ):
        train.write_bytes(content)
        with pytest.raises(DataError, match=f"train.jsonl.*{message}"):
            make_task_pack(str(tmp_path), "nq_open")


def test_fewshot_from_evaluation(lm_eval, shared_data):
    [task] = make_task_pack(str(shared_data), "gsm8k", fewshot_from="evaluation").tasks
    assert task.config.metadata["fewshot_file"].endswith("gsm8k/test.jsonl")
    training = {row["question"] for row in read_rows(shared_data / "gsm8k" / "train.jsonl")}
    _, prompt, _ = requests_of(task, limit=1)[0]
    shown = [part.split("\nAnswer:")[0] for part in prompt.split("Question: ")[1:]]
    assert len(set(shown)) == 6 and not set(shown) & training


def test_numbers_of_examples(lm_eval, shared_data, tmp_path):
    def shots(pack):
        return [task.config.num_fewshot for task in pack.tasks]

    root, names = str(shared_data), ["piqa", "nq_open", "cb"]
    assert shots(make_task_pack(root, names)) == [0, 5, 0]
    assert shots(make_task_pack(root, names, num_fewshot=2)) == [2, 2, 2]
    write_subjects(tmp_path, "mmlu_other", ["A"])
    [group] = make_task_pack(str(tmp_path), "mmlu_other", num_fewshot=1).tasks
    assert {task.config.num_fewshot for task in group.get_all_tasks()} == {1}


ROW = {"goal": "g", "sol1": "a", "sol2": "b", "label": 0}


@pytest.mark.parametrize(
    "content, message",
    [
        (None, r"no such file: .*piqa/validation\.jsonl$"),
        (b"", r"validation\.jsonl: the file is empty"),
        (b"\n\n", "no JSON objects"),
        (b'{"goal": "\xff"}', "not UTF-8: byte 0xff at offset 10"),
        (b'{"goal": ', "line 1: not JSON"),
        ([ROW, {"goal": "g", "sol1": "a", "label": 0}], "line 2: no field 'sol2'; fields seen"),
        ([ROW, ROW | {"sol1": 3}], r"line 2: field 'sol1' is int \(3\), expected text"),
        ([ROW | {"label": -1}], "line 1: field 'label' is -1, which is no answer"),
        ([ROW | {"label": ""}], "line 1: field 'label' is '', which is no answer"),
    ],
)
def test_bad_files(lm_eval, tmp_path, content, message):
    path = tmp_path / "piqa" / "validation.jsonl"
    path.parent.mkdir()
    if isinstance(content, list):
        write_rows(path, content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        make_task_pack(str(tmp_path), "piqa")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"names": "pica"}, "unknown task 'pica', did you mean 'piqa'"),
        ({"names": "qqq"}, r"unknown task 'qqq'. Known: arc_challenge, .*mmlu_<subject or group>"),
        ({"names": []}, "no tasks asked for"),
        ({"names": "mmlu_virolgy"}, "did you mean 'mmlu_virology'"),
        ({"names": "longbench_multinews"}, "did you mean 'longbench_multi_news'"),
        ({"names": "minilongbench"}, "did you mean 'minilongbench_qa'"),
        ({"names": ["mmlu", "mmlu_virology"]}, "mmlu_virology is asked for twice"),
        ({"num_fewshot": -1}, "num_fewshot=-1"),
        ({"fewshot_from": "dev"}, "fewshot_from='dev': choose one of"),
        ({"data_root": "/nowhere"}, "/nowhere: no such directory"),
    ],
)
def test_bad_settings(lm_eval, shared_data, settings, message):
    settings = {"data_root": str(shared_data), "names": "piqa", **settings}
    with pytest.raises(DataError, match=message) as caught:
        make_task_pack(settings.pop("data_root"), settings.pop("names"), **settings)
    assert "\n" not in str(caught.value)


CHOICE, ABC = {"text": ["a"], "label": ["A"]}, {f"answer{x}": x for x in "ABC"}
BAD_ROWS = [
    ("mmlu", {"subject": "s", "question": "q", "choices": ["a"], "answer": 0}, "1 choices"),
    ("mmlu", {"subject": "s", "question": "q", "A": "1", "B": "2", "C": "3"}, "no field 'D'"),
    ("arc", {"question": "q", "choices": CHOICE, "answerKey": "B"}, "answerKey='B': choose one of"),
    ("arc", {"instruction": "What?", "answer": "answer1"}, "is not a question with its answers"),
    ("winogrande", {"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}, "no '_'"),
    ("winogrande", {"sentence": "a _", "option1": "a", "option2": "b", "answer": ""}, "no answer"),
    ("triviaqa", {"context": "Q", "answer": "a", "aliases": []}, "not of the form"),
    ("triviaqa", {"question": "q", "answer": {"aliases": []}}, "'aliases' is empty"),
    ("nq_open", {"question": "q", "answer": []}, "'answer' is empty"),
    ("longbench", {"context": "c", "answers": []}, "'answers' is empty"),
    ("minilongbench_qa", {"dataset": "qasper", "origin_prompt": "p", "gold": []}, "'gold' is em"),
    ("minilongbench_qa", {"dataset": "qasper", "gold": ["a"]}, "no field 'origin_prompt'"),
    ("race", {"article": "a", "problems": "[oops"}, "is no list"),
    ("race", {"article": "a", "problems": []}, "one or more problems"),
    ("lambada", {"text": "word"}, "no last word to predict"),
    ("copa", {"question": "why", "premise": "p"}, "question='why': choose one of"),
    ("siqa", {"context": "c", "question": "q", "label": 0, **ABC}, "'label' is 0, which is no ans"),
]


@pytest.mark.parametrize("name, row, message", BAD_ROWS)
def test_bad_rows(name, row, message):
    with pytest.raises(DataError, match=message):
        ROWS[name](row)


def test_middle_school_is_no_part_of_race(lm_eval, shared_data, tmp_path):
    [task] = make_task_pack(str(shared_data), "race").tasks
    assert len(task.eval_docs) == 500
    row = {"example_id": "middle1.txt", "article": "a", "question": "q", "answer": "A"}
    write_rows(tmp_path / "race" / "validation.jsonl", [row])
    with pytest.raises(DataError, match="race/validation.jsonl: no question in it for this task"):
        make_task_pack(str(tmp_path), "race")


def test_the_task_files_are_installed_with_the_package():
    settings = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '"ffn_heterogeneity.evaluate.harness_tasks" = ["*.yaml"]' in settings
