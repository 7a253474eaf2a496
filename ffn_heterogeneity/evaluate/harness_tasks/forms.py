"""Conversion of rows of local files, in each published form, to rows of the harness's data sets.

A form takes one row and returns the fields that the task reads, or None for a row that does not
belong to the task. A missing field, a wrong type or an invalid answer is a `DataError`.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import list_of, mapping_of, text_of, texts_of, value_of
from ffn_heterogeneity.data.tasks.mbpp import prompt_of, setup_of, tests_of
from ffn_heterogeneity.data.tasks.superglue import CB_WORDS, COPA_WORDS, RTE_WORDS
from ffn_heterogeneity.wording import check_choice

# LongBench's maximum answer lengths, in tokens.
QA_TOKENS = {
    **dict.fromkeys(("2wikimqa", "hotpotqa", "musique", "triviaqa"), 32),
    "multifieldqa_en": 64,
    **dict.fromkeys(("narrativeqa", "qasper"), 128),
}
Row = Mapping[str, Any]


def index_of(row: Row, field: str, words: int | list[str] | tuple[str, ...], first: int = 0) -> int:
    """The answer's index: a number from `first` on (or its digits), or one of `words`."""
    value = value_of(row, field, object, "an answer")
    count = words if isinstance(words, int) else len(words)
    if not isinstance(words, int) and value in words:
        return list(words).index(value)
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, int) and 0 <= value - first < count:
        return value - first
    raise DataError(
        f"field {field!r} is {value!r:.40}, which is not an answer (test sets have none)"
    )


def texts(
    fields: str, label: int | tuple[str, ...] | None = None, first: int = 0
) -> Callable[[Row], Row]:
    """The form of rows of texts, and a "label" counted from `first` on (or one of the words)."""

    def form(row: Row) -> Row:
        doc: dict[str, Any] = {field: text_of(row, field) for field in fields.split()}
        if label is not None:
            doc["label"] = index_of(row, "label", label, first) + first
        return doc

    return form


def mbpp(row: Row) -> Row:
    """A row of the full set ("text") or the sanitized one ("prompt"); programs are unchanged."""
    return {
        "task_id": value_of(row, "task_id", int, "a number"),
        "prompt": prompt_of(row, text_of(row, "text" if "text" in row else "prompt")),
        "code": text_of(row, "code"),
        "tests": "\n".join(tests_of(row)),
        "test_list": tests_of(row),
        "setup": setup_of(row),
    }


def mmlu(row: Row) -> Row:
    """Four choices in "choices" and the answer's number, or in A to D and the answer's letter."""
    if "choices" in row:
        choices = texts_of(row, "choices")
        if len(choices) != 4:
            raise DataError(f"field 'choices' has {len(choices)} choices, expected 4")
    else:
        choices = [text_of(row, letter) for letter in "ABCD"]
    answer = index_of(row, "answer", tuple("ABCD"))
    return {**texts("subject question")(row), "choices": choices, "answer": answer}


def hellaswag(row: Row) -> Row:
    endings = texts_of(row, "endings")
    return {**texts("activity_label ctx_a ctx_b", len(endings))(row), "endings": endings}


def arc(row: Row) -> Row:
    """The hub's form, the official one (question.stem), or all in one text: "Answer1: ..."."""
    if "instruction" in row:
        return _arc_of_text(text_of(row, "instruction"), text_of(row, "answer"))
    if isinstance(row.get("question"), Mapping):
        question = mapping_of(row, "question")
        stem, options = text_of(question, "stem"), list_of(question, "choices")
        choices = {key: [text_of(one, key) for one in options] for key in ("text", "label")}
    else:
        stem, options = text_of(row, "question"), mapping_of(row, "choices")
        choices = {key: texts_of(options, key) for key in ("text", "label")}
    key = text_of(row, "answerKey")
    check_choice("field answerKey", key, choices["label"], DataError)
    return {"question": stem, "choices": choices, "answerKey": key}


def winogrande(row: Row) -> Row:
    doc = texts("sentence option1 option2")(row)
    if "_" not in doc["sentence"]:
        raise DataError(f"field 'sentence' has no '_' to fill: {doc['sentence']!r:.60}")
    return {**doc, "answer": str(index_of(row, "answer", 2, first=1) + 1)}


def triviaqa(row: Row) -> Row:
    """The hub's form, or "Question: ...\\nAnswer:" with aliases, of which the first is the answer.

    The published question ends with a question mark, and the prompt adds another (as the harness's
    task does).
    """
    if "question" in row:
        question = text_of(row, "question")
        aliases = _answers(mapping_of(row, "answer"), "aliases")
    else:
        matched = re.fullmatch(r"Question: (.*)\nAnswer:", text_of(row, "context"), re.DOTALL)
        if not matched:
            raise DataError("field 'context' is not of the form 'Question: ...\\nAnswer:'")
        question, answer = matched[1], text_of(row, "answer")
        aliases = [answer, *(alias for alias in texts_of(row, "aliases") if alias != answer)]
    return {"question": question, "answer": {"aliases": aliases}}


def nq_open(row: Row) -> Row:
    return {"question": text_of(row, "question"), "answer": _answers(row, "answer")}


def longbench(row: Row) -> Row:
    answers = _answers(row, "answers")
    return {"context": text_of(row, "context"), "answers": answers, "cut": "middle"}


def minilongbench_qa(row: Row) -> Row | None:
    """MiniLongBench's English questions, without its other tasks; prompts are as published."""
    dataset = text_of(row, "dataset")
    if dataset not in QA_TOKENS:
        return None
    return {
        "dataset": dataset,
        "prompt": text_of(row, "origin_prompt"),
        "answers": _answers(row, "gold"),
        "max_gen_toks": QA_TOKENS[dataset],
        "cut": "middle",
    }


def boolq(row: Row) -> Row:
    # The original files, older than SuperGLUE, call it "answer".
    return texts("passage question", 2)({"label": row["answer"], **row} if "answer" in row else row)


def race(row: Row) -> Row | None:
    """Articles with all their problems, or one question per row (then only high school)."""
    problems: Any = [row]
    if "problems" in row:
        problems = row["problems"]
        if isinstance(problems, str):
            try:
                problems = ast.literal_eval(problems)
            except (SyntaxError, ValueError) as error:
                raise DataError(f"field 'problems' is not a list: {problems!r:.40}") from error
        if not isinstance(problems, list) or not problems:
            raise DataError("field 'problems' is not a list of one or more problems")
    elif "example_id" in row and not text_of(row, "example_id").startswith("high"):
        return None
    return {"article": text_of(row, "article"), "problems": str([*map(_problem, problems)])}


def _problem(row: Row) -> Row:
    options = texts_of(row, "options")
    if len(options) != 4:
        raise DataError(f"field 'options' has {len(options)} options, expected 4")
    answer = "ABCD"[index_of(row, "answer", tuple("ABCD"))]
    return {"question": text_of(row, "question"), "options": options, "answer": answer}


def swag(row: Row) -> Row:
    """Four endings in "choices" and "answer", or in ending0 to ending3 and "label"."""
    if "choices" in row:
        choices = texts_of(row, "choices")
        if len(choices) != 4:
            raise DataError(f"field 'choices' has {len(choices)} endings, expected 4")
        endings = {f"ending{i}": text for i, text in enumerate(choices)}
        row = {**row, **endings, "label": value_of(row, "answer", object, "an answer")}
    return texts("startphrase ending0 ending1 ending2 ending3", 4)(row)


def lambada(row: Row) -> Row:
    text = text_of(row, "text")
    if " " not in text:
        raise DataError(f"field 'text' has no last word to predict: {text!r:.40}")
    return {"text": text}


def copa(row: Row) -> Row:
    doc = texts("question premise choice1 choice2", COPA_WORDS)(row)
    check_choice("field question", doc["question"], ("cause", "effect"), DataError)
    if not (doc["choice1"] and doc["choice2"]):
        raise DataError("field 'choice1' or 'choice2' is empty")
    return doc


def wic(row: Row) -> Row:
    places = {key: value_of(row, key, int, "a number") for key in ("start1", "end1")}
    return {**texts("sentence1 sentence2", 2)(row), **places}


def _arc_of_text(instruction: str, answer: str) -> Row:
    """Parse "...: <question>\\n\\nAnswer1: <a> Answer2: <b>\\n\\nAnswer format: answer1"."""
    form = r".*?: (.*)\n\nAnswer1: (.*)\n\nAnswer format: (.*)"
    match = re.fullmatch(form, instruction, re.DOTALL)
    names, choices = [], []
    if match:
        names = match[3].strip().split("/")
        choices = re.split(r" Answer\d: ", match[2])
    if not match or len(names) != len(choices) or answer not in names:
        raise DataError(
            f"field 'instruction' is not a question with its answers, {answer!r:.40} among them: "
            f"{instruction!r:.60}"
        )
    return {
        "question": match[1],
        "choices": {"text": choices, "label": names},
        "answerKey": answer,
    }


def _answers(row: Row, field: str) -> list[str]:
    if not (answers := texts_of(row, field)):
        raise DataError(f"the question has no answer: {field!r} is empty")
    return answers


class LocalTask(NamedTuple):
    """A task's file and its rows.

    Attributes:
      stock: folder of the harness's task files; "": the task file is in this folder.
      folder: folder of its rows, under the root.
      form: function that reads a row.
      shots: examples before each question; None: the task file's number.
      also: further names of the file of questions.
    """

    stock: str
    folder: str
    form: Callable[[Row], Row | None]
    shots: int | None = None
    also: tuple[str, ...] = ()


# All groups and subjects of MMLU are read as "mmlu".
TASKS = {
    "arc_challenge": LocalTask("arc", "arc_challenge", arc),
    "arc_easy": LocalTask("arc", "arc_easy", arc),
    "boolq": LocalTask("super_glue", "superglue_boolq", boolq),
    "cb": LocalTask("super_glue", "superglue_cb", texts("premise hypothesis", CB_WORDS)),
    "copa": LocalTask("super_glue", "superglue_copa", copa),
    "gsm8k": LocalTask("gsm8k", "gsm8k", texts("question answer")),
    "hellaswag": LocalTask("hellaswag", "hellaswag", hellaswag, 10),
    "lambada_openai": LocalTask("lambada", "lambada", lambada),
    "longbench_multi_news": LocalTask("", "longbench", longbench),
    "mbpp": LocalTask("", "mbpp", mbpp),
    "minilongbench_qa": LocalTask("", "longbench", minilongbench_qa),
    "mmlu": LocalTask("mmlu/default", "mmlu", mmlu, 5),
    "nq_open": LocalTask("nq_open", "nq_open", nq_open, 5),
    "piqa": LocalTask("piqa", "piqa", texts("goal sol1 sol2", 2)),
    "race": LocalTask("race", "race", race, also=("validation",)),
    "sciq": LocalTask(
        "sciq",
        "sciq",
        texts("support question distractor1 distractor2 distractor3 correct_answer"),
    ),
    "sglue_rte": LocalTask("super_glue", "superglue_rte", texts("premise hypothesis", RTE_WORDS)),
    "social_iqa": LocalTask(
        "siqa", "siqa", texts("context question answerA answerB answerC", 3, first=1)
    ),
    "swag": LocalTask("swag", "swag", swag),
    "triviaqa": LocalTask("triviaqa", "triviaqa", triviaqa, 5),
    "wic": LocalTask("super_glue", "superglue_wic", wic),
    "winogrande": LocalTask("winogrande", "winogrande", winogrande),
}
