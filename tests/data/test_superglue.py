"""SuperGLUE, DPR and MBPP as text: the published forms, official and hub fields, bad rows."""

import re

import pytest
from tiny_runs import read_rows, refused

from ffn_heterogeneity.data.mixtures import open_task, questions
from ffn_heterogeneity.data.pipeline import split_records
from ffn_heterogeneity.data.sources import DataError, open_source
from ffn_heterogeneity.data.tasks import Fields, get_task

PASSAGE = 'Ann met Bob."\n@highlight\nBob left\n@highlight\nAnn stayed'


def span(word, start):
    at = PASSAGE.index(word, start)
    return {"start": at, "end": at + len(word) - 1}


SPANS = [span("Bob", 0), span("Ann", 0), span("Bob", 12)]
ANSWERS = [span | {"text": PASSAGE[span["start"] : span["end"] + 1]} for span in SPANS]
WSC_TARGET = {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 2}

YES = {"question": "is it", "passage": "It is.", "idx": 3}
CB = {"premise": "P.", "hypothesis": "H", "idx": 0}
COPA = {"premise": "P.", "choice1": "A.", "choice2": "B.", "question": "effect", "label": 1}
CUT = {"word": "cut", "sentence1": "A cut.", "sentence2": "Cut it."}
SHE = {"text": "Ann said she left."}
SUE = {"sentence": "If Ann asks Sue, she answers as she can.", "pronoun": "she"}
SAID = [{"text": "One", "idx": 0, "label": 1}, {"text": "Six", "idx": 1, "label": 0}]
WHICH = {"question": "Which?", "idx": 56, "answers": SAID}
WHY = {"question": "Why?", "idx": 57, "answers": [{"text": "No", "idx": 2, "label": 0}]}
TEXT = {"text": "<b>Sent 1: </b>One.<br>Two.", "questions": [WHICH, WHY]}
PARAGRAPH = "paragraph: Sent 1: One. Two.\n"
LEFT = {"query": "@placeholder left"}
RECORD = {"idx": 4, "passage": {"text": PASSAGE, "entities": SPANS}}
HUB = {"passage": PASSAGE, "entities": ["Ann", "Bob"], "answers": ["Ann", "Bob"], **LEFT}
ASKED = "record query: @placeholder left entities: Ann, Bob passage: "
ASKED += 'Ann met Bob." Bob left. Ann stayed\n'

# task: official row, the same row of the hub, prompts and targets in training.
FORMS = {
    "boolq": (
        YES | {"label": True},
        YES | {"label": 1},
        [("boolq passage: It is. question: is it\n", "True")],
    ),
    "cb": (
        CB | {"label": "neutral"},
        CB | {"label": 2},
        [("cb hypothesis: H premise: P.\n", "neutral")],
    ),
    "copa": (
        COPA,
        None,
        [("copa choice1: A. choice2: B. premise: P. question: effect\n", "choice2")],
    ),
    "multirc": (
        {"idx": 6, "version": 1.1, "passage": TEXT},
        None,
        [
            (f"multirc question: Which? answer: One {PARAGRAPH}", "True"),
            (f"multirc question: Which? answer: Six {PARAGRAPH}", "False"),
            (f"multirc question: Why? answer: No {PARAGRAPH}", "False"),
        ],
    ),
    "record": (
        RECORD | {"qas": [LEFT | {"idx": 9, "answers": ANSWERS}]},
        HUB | {"idx": {"passage": 4, "query": 9}},
        [(ASKED, "Ann"), (ASKED, "Bob")],
    ),
    "rte": (
        {"premise": "P.", "hypothesis": "H.", "label": "not_entailment", "idx": 0},
        {"premise": "P.", "hypothesis": "H.", "label": 1, "idx": 0},
        [("rte hypothesis: H. premise: P.\n", "not_entailment")],
    ),
    "wic": (
        CUT | {"label": False, "start1": 2},
        CUT | {"label": 0},
        [("wic sentence1: A cut. sentence2: Cut it. word: cut\n", "False")],
    ),
    "wsc": (
        SHE | {"target": WSC_TARGET, "label": True, "idx": 0},
        {**SHE, **WSC_TARGET, "label": 1, "idx": 0},
        [("wsc: Ann said *she* left.\n", "Ann")],
    ),
    "dpr": (
        SUE | {"candidates": ["Ann", "Sue"], "label": 1},
        None,
        [("wsc: If Ann asks Sue, *she* answers as she can.\n", "Sue")],
    ),
}


def examples(write, name, row):
    source = open_task(get_task(f"superglue_{name}"), write("a.jsonl", [row]), "train")
    task = get_task(f"superglue_{name}")
    return [tuple(task.example(source[i], Fields()))[:2] for i in range(len(source))]


@pytest.mark.parametrize("name", FORMS)
def test_form(write, name):
    official, hub, expected = FORMS[name]
    assert examples(write, name, official) == expected
    if hub is not None:
        assert examples(write, name, hub) == expected


def test_multirc_of_the_hub(write):
    row = {"paragraph": "One.", "question": "Which?", "answer": "One", "label": 1}
    row["idx"] = {"paragraph": 0, "question": 2, "answer": 5}
    [question] = questions(get_task("superglue_multirc"), open_source(write("a.jsonl", [row])))
    assert question.prompt == "multirc question: Which? answer: One paragraph: One.\n"
    assert question.reference == {"label": "True", "group": (0, 2)}


def test_real_rows_are_counted_as_published(shared_data):
    def asked(name):
        path = str(shared_data / f"superglue_{name}" / "validation.jsonl")
        return questions(get_task(f"superglue_{name}"), open_source(path))

    answers = asked("multirc")
    assert len(answers) == 4_848
    assert len({question.reference["group"] for question in answers}) == 953
    assert len(asked("wsc")) == 104 and len(asked("boolq")) == 3_270
    labels = {question.reference for question in asked("cb")}
    assert labels == {"entailment", "contradiction", "neutral"}


def test_record_asks_once_per_gold_answer_in_training(shared_data):
    path = str(shared_data / "superglue_record" / "train.jsonl")
    rows = read_rows(path)
    gold = []
    for row in rows:
        for query in row["qas"]:
            answers = {answer["text"] for answer in query["answers"]}
            gold += [(row["idx"], query["idx"], answer) for answer in answers]
    task = get_task("superglue_record")
    source = open_task(task, path, "train")
    records = [source[i] for i in range(len(source))]
    seen = [(r["idx"]["passage"], r["idx"]["query"], r["answer"]) for r in records]
    assert sorted(seen) == sorted(gold) and len(gold) > len(rows)
    for record in records:
        assert record["answer"] in record["entities"]
        assert "@highlight" not in record["passage"]
    once = questions(task, open_source(path))
    assert len(once) == len(rows) and sum(len(q.reference["answers"]) for q in once) == len(gold)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_wsc_marks_the_word_that_the_index_names(shared_data, part):
    path = str(shared_data / "superglue_wsc" / f"{part}.jsonl")
    rows = read_rows(path)
    all_questions = questions(get_task("superglue_wsc"), open_source(path))
    odd = []
    for row, question in zip(rows, all_questions, strict=True):
        words, target = row["text"].split(" "), row["target"]
        if words[target["span2_index"]] == target["span2_text"]:
            words[target["span2_index"]] = f"*{target['span2_text']}*"
            assert question.prompt == f"wsc: {' '.join(words)}\n"
        else:
            odd.append(question.prompt)
        assert question.reference == {"referent": target["span1_text"], "label": row["label"]}
    # One row each: punctuation at the pronoun, and an index that is one off.
    expected = {"train": '"Good for *him*," he said', "validation": "might want to use *it* ,"}
    assert len(odd) == 1 and expected[part] in odd[0]
    training = open_task(get_task("superglue_wsc"), path, "train")
    assert len(training) == sum(row["label"] for row in rows) < len(rows)


ROWS = {name: form[0] for name, form in FORMS.items()}
FAR = {"passage": {"text": "t", "entities": [{"start": 0, "end": 9}]}}
UNTOLD = {"qas": [{"query": "q", "idx": 1, "answers": []}]}


def without(row, key):
    return {k: v for k, v in row.items() if k != key}


@pytest.mark.parametrize(
    "name, row, message",
    [
        ("boolq", without(ROWS["boolq"], "passage"), "no field 'passage'; fields seen: question"),
        ("boolq", ROWS["boolq"] | {"label": -1}, "field 'label' is -1, which is not an answer"),
        ("boolq", ROWS["boolq"] | {"label": None}, "'label' is None.*False or 0, True or 1"),
        ("boolq", ROWS["boolq"] | {"passage": 3}, r"'passage' is int \(3\), expected text"),
        ("cb", without(ROWS["cb"], "label"), "no field 'label'"),
        ("cb", ROWS["cb"] | {"label": "maybe"}, "'maybe', which is not an answer; known: entail"),
        ("copa", without(ROWS["copa"], "choice2"), "no field 'choice2'"),
        ("multirc", {"idx": 1, "passage": {"text": "t"}}, "no field 'questions'"),
        ("multirc", {"idx": 1, "passage": "t"}, "'passage' is str .*expected an object"),
        ("record", without(ROWS["record"], "passage"), "no field 'passage'"),
        ("record", ROWS["record"] | FAR, "entity from 0 to 9 is outside the passage of 1"),
        ("record", ROWS["record"] | UNTOLD, "query 'q' has no gold answer"),
        ("record", FORMS["record"][1] | {"answers": [3]}, r"'answers' holds int \(3\)"),
        ("wic", without(ROWS["wic"], "word"), "no field 'word'"),
        ("wsc", {"text": "t", "label": True}, "no field 'span2_text'"),
        ("wsc", ROWS["wsc"] | {"text": "Ann said it, too"}, "pronoun 'she' is not in the text"),
        ("wsc", ROWS["wsc"] | {"text": "she left"}, "word 2 of the pronoun is not among the 2"),
        ("dpr", ROWS["dpr"] | {"label": 2}, "field 'label' is 2"),
        ("dpr", ROWS["dpr"] | {"candidates": "Ann"}, "expected a list"),
    ],
)
def test_a_bad_row_names_its_place(write, name, row, message):
    path = write("bad.jsonl", [ROWS[name], row])
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 2: .*{message}") as caught:
        questions(get_task(f"superglue_{name}"), open_source(path))
    assert "\n" not in str(caught.value)


def test_a_bad_row_is_left_out_if_asked(write, caplog):
    path = write("a.jsonl", [ROWS["wsc"], without(ROWS["wsc"], "label"), ROWS["wsc"]])
    task = get_task("superglue_wsc")
    with caplog.at_level("WARNING"):
        source = open_task(task, path, "train", skip_bad=True)
    assert len(source) == 2 and source.groups.tolist() == [0, 2]
    assert "1 of 3 rows are left out" in caplog.text and "line 2" in caplog.text


@pytest.mark.parametrize(("name", "field"), [("multirc", "paragraph"), ("record", "passage")])
def test_the_hubs_rows_of_a_passage_are_held_out_together(write, name, field):
    """There every answer or query is a row of its own, with the passage in it."""
    row = FORMS[name][1] or {"paragraph": "", "question": "Which?", "answer": "One", "label": 1}
    rows = [row | {field: f"Passage {i}."} for i in (*range(6), *range(6))]
    source = open_task(get_task(f"superglue_{name}"), write("a.jsonl", rows), "train")
    parts = split_records(source, 0.3)
    sets = [{part[i]["record"][field] for i in range(len(part))} for part in parts]
    assert len(sets[0] | sets[1]) == 6 and sets[1] and not sets[0] & sets[1]


def test_wsc_without_a_referring_pair_has_no_examples(write):
    path = write("a.jsonl", [ROWS["wsc"] | {"label": False}])
    with pytest.raises(DataError, match="none of its 1 rows is an example of superglue_wsc"):
        open_task(get_task("superglue_wsc"), path, "train")


def test_fields_cannot_be_renamed():
    with pytest.raises(DataError, match="leave them empty: the SuperGLUE tasks read fixed fields"):
        get_task("superglue_boolq").example(ROWS["boolq"], Fields(prompt="passage"))


def test_a_mixture_is_evaluated_task_by_task(write):
    with pytest.raises(DataError, match="mixture: evaluate its tasks one by one: superglue_boolq"):
        questions(get_task("superglue"), open_source(write("a.jsonl", [ROWS["boolq"]])))


# ---- MBPP

MBPP = {"text": "Write a function.", "code": "def f():\r\n\treturn 1", "task_id": 11}
MBPP |= {"test_setup_code": "import math", "challenge_test_list": []}
MBPP["test_list"] = ["assert f() == 1", "assert f() < 2"]


def test_mbpp_form():
    example = get_task("mbpp").example(MBPP, Fields())
    assert example.prompt == (
        "You are an expert Python programmer, and here is your task: Write a function. Your code "
        "should pass these tests:\n\nassert f() == 1\nassert f() < 2\n[BEGIN]\n"
    )
    assert example.target == "def f():\n\treturn 1\n[DONE]"


def test_mbpp_of_both_sets(shared_data):
    full = open_source(str(shared_data / "mbpp" / "train.jsonl"))
    sanitized = open_source(str(shared_data / "mbpp" / "sanitized.jsonl"))
    asked = questions(get_task("mbpp"), full) + questions(get_task("mbpp"), sanitized)
    assert len(asked) == 374 + 427
    assert all(re.search(r"\[BEGIN\]\n$", question.prompt) for question in asked)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"test_list": []}, "'test_list' is empty"),
        ({"test_list": [1]}, "'test_list' holds int"),
        ({"code": None}, "'code' is NoneType"),
    ],
)
def test_bad_mbpp(change, message):
    refused(message, get_task("mbpp").example, MBPP | change, Fields(), error=DataError)
