"""Rows of local files -> what the task files read; each form that the sets are published in.

A function takes one row and returns the fields of one question, or None for a row that is no part
of the task. Texts and their order are those of the harness's own tasks, version 0.4.13.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import list_of, mapping_of, text_of, texts_of, value_of
from ffn_heterogeneity.data.tasks.mbpp import prompt_of, setup_of, tests_of
from ffn_heterogeneity.data.tasks.superglue import CB_WORDS, COPA_WORDS, RTE_WORDS
from ffn_heterogeneity.wording import check_choice

LETTERS = "ABCDEFGH"
# LongBench's longest answers, in tokens.
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
        f"field {field!r} is {value!r:.40}, which is no answer (test sets are published without)"
    )


def gsm8k(row: Row) -> Row:
    return _texts(row, "question", "answer")


def mbpp(row: Row) -> Row:
    """A row of the full set ("text") or the sanitized one ("prompt"); programs stay as they are."""
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
    label = index_of(row, "answer", tuple("ABCD"))
    return {**_texts(row, "subject", "question"), "choices": choices, "label": label}


def hellaswag(row: Row) -> Row:
    """The activity's name and its context; wikiHow's marks in brackets go."""
    context = f"{text_of(row, 'ctx_a')} {text_of(row, 'ctx_b').capitalize()}"
    endings = texts_of(row, "endings")
    return {
        "query": _without_brackets(f"{text_of(row, 'activity_label')}: {context}"),
        "choices": [_without_brackets(ending) for ending in endings],
        "label": index_of(row, "label", len(endings)),
    }


def arc(row: Row) -> Row:
    """The hub's form, the official one (question.stem), or all in a text: "Answer1: ..."."""
    if "instruction" in row:
        return _arc_of_text(text_of(row, "instruction"), text_of(row, "answer"))
    if isinstance(row.get("question"), Mapping):
        question = mapping_of(row, "question")
        stem = text_of(question, "stem")
        options = list_of(question, "choices")
        choices = [text_of(option, "text") for option in options]
        labels = [text_of(option, "label") for option in options]
    else:
        stem, options = text_of(row, "question"), mapping_of(row, "choices")
        choices, labels = texts_of(options, "text"), texts_of(options, "label")
    key = text_of(row, "answerKey")
    check_choice("field answerKey", key, labels, DataError)
    return {"question": stem, "choices": choices, "label": labels.index(key)}


def piqa(row: Row) -> Row:
    choices = [text_of(row, key) for key in ("sol1", "sol2")]
    return {"goal": text_of(row, "goal"), "choices": choices, "label": index_of(row, "label", 2)}


def siqa(row: Row) -> Row:
    """The label counts from 1."""
    texts = _texts(row, "context", "question")
    choices = [text_of(row, f"answer{letter}") for letter in "ABC"]
    return {**texts, "choices": choices, "label": index_of(row, "label", 3, first=1)}


def winogrande(row: Row) -> Row:
    """Two beginnings, up to and with the option put for "_", and the one ending after it."""
    sentence = text_of(row, "sentence")
    before, blank, after = sentence.partition("_")
    if not blank:
        raise DataError(f"field 'sentence' has no '_' to fill: {sentence!r:.60}")
    return {
        "contexts": [before + text_of(row, key) for key in ("option1", "option2")],
        "ending": after.strip(),
        "label": index_of(row, "answer", 2, first=1),
    }


def triviaqa(row: Row) -> Row:
    """The hub's form, or "Question: ...\\nAnswer:" with aliases; then the answer is the first.

    The published question ends in its own question mark, and the prompt adds one (as the stock
    task does).
    """
    if "question" in row:
        question = text_of(row, "question")
        aliases = _answers(mapping_of(row, "answer"), "aliases")
    else:
        found = re.fullmatch(r"Question: (.*)\nAnswer:", text_of(row, "context"), re.DOTALL)
        if not found:
            raise DataError("field 'context' is not of the form 'Question: ...\\nAnswer:'")
        question, answer = found[1], text_of(row, "answer")
        aliases = [answer, *(alias for alias in texts_of(row, "aliases") if alias != answer)]
    return {"question": question, "aliases": aliases}


def nq_open(row: Row) -> Row:
    return {"question": text_of(row, "question"), "answer": _answers(row, "answer")}


def longbench(row: Row) -> Row:
    return {"context": text_of(row, "context"), "answers": _answers(row, "answers")}


def minilongbench_qa(row: Row) -> Row | None:
    """MiniLongBench's English questions, its other tasks left out; prompts are as published."""
    dataset = text_of(row, "dataset")
    if dataset not in QA_TOKENS:
        return None
    return {
        "dataset": dataset,
        "prompt": text_of(row, "origin_prompt"),
        "answers": _answers(row, "gold"),
        "max_gen_toks": QA_TOKENS[dataset],
    }


def boolq(row: Row) -> Row:
    # The original files, older than SuperGLUE, call it "answer".
    field = "answer" if "answer" in row and "label" not in row else "label"
    return {**_texts(row, "passage", "question"), "label": index_of(row, field, 2)}


def race(row: Row) -> Row | None:
    """Articles with all their problems, or one question a row (then those of high school only).

    Of an article the last problem is asked; those before it stand there answered.
    """
    if "problems" in row:
        problems = row["problems"]
        if isinstance(problems, str):
            try:
                problems = ast.literal_eval(problems)
            except (SyntaxError, ValueError) as error:
                raise DataError(f"field 'problems' is no list: {problems!r:.40}") from error
        if not isinstance(problems, list) or not problems:
            raise DataError("field 'problems' is not a list of one or more problems")
    else:
        if "example_id" in row and not text_of(row, "example_id").startswith("high"):
            return None
        problems = [row]
    text = f"Article: {text_of(row, 'article')}\n\n"
    for problem in problems[:-1]:
        text += _answered(problem)
    last = problems[-1]
    choices = texts_of(last, "options")
    label = index_of(last, "answer", tuple(LETTERS[: len(choices)]))
    return {"text": text + text_of(last, "question"), "choices": choices, "label": label}


def sciq(row: Row) -> Row:
    keys = ("distractor1", "distractor2", "distractor3", "correct_answer")
    texts = _texts(row, "support", "question")
    return {**texts, "choices": [text_of(row, key) for key in keys], "label": 3}


def swag(row: Row) -> Row:
    """Four endings in "choices" and "answer", or in ending0 to ending3 and "label"."""
    if "choices" in row:
        choices, label = texts_of(row, "choices"), "answer"
    else:
        choices, label = [text_of(row, f"ending{i}") for i in range(4)], "label"
    label = index_of(row, label, len(choices))
    return {"startphrase": text_of(row, "startphrase"), "choices": choices, "label": label}


def lambada(row: Row) -> Row:
    text = text_of(row, "text")
    if " " not in text:
        raise DataError(f"field 'text' has no last word to predict: {text!r:.40}")
    return {"text": text}


def cb(row: Row) -> Row:
    texts = _texts(row, "premise", "hypothesis")
    return {**texts, "label": index_of(row, "label", CB_WORDS)}


def copa(row: Row) -> Row:
    """The premise without its full stop, "because" or "therefore", and two ways to go on."""
    words = {"cause": "because", "effect": "therefore"}
    question = text_of(row, "question")
    check_choice("field question", question, words, DataError)
    choices = [text_of(row, key) for key in COPA_WORDS]
    return {
        "text": f"{text_of(row, 'premise').strip()[:-1]} {words[question]}",
        "choices": [f" {choice[:1].lower()}{choice[1:]}" for choice in choices],
        "label": index_of(row, "label", COPA_WORDS),
    }


def rte(row: Row) -> Row:
    texts = _texts(row, "premise", "hypothesis")
    return {**texts, "label": index_of(row, "label", RTE_WORDS)}


def wic(row: Row) -> Row:
    one, two = text_of(row, "sentence1"), text_of(row, "sentence2")
    start, end = (value_of(row, key, int, "a number") for key in ("start1", "end1"))
    text = (
        f"Sentence 1: {one}\nSentence 2: {two}\nQuestion: Is the word '{one[start:end]}' used in "
        "the same way in the two sentences above?\nAnswer:"
    )
    return {"text": text, "label": index_of(row, "label", 2)}


def _arc_of_text(instruction: str, answer: str) -> Row:
    """From "...: <question>\\n\\nAnswer1: <a> Answer2: <b>\\n\\nAnswer format: answer1/answer2"."""
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
    return {"question": match[1], "choices": choices, "label": names.index(answer)}


def _texts(row: Row, *fields: str) -> dict[str, str]:
    return {field: text_of(row, field) for field in fields}


def _answers(row: Row, field: str) -> list[str]:
    if not (answers := texts_of(row, field)):
        raise DataError(f"the question has no answer: {field!r} is empty")
    return answers


def _without_brackets(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _answered(problem: Row) -> str:
    """A problem with its answer: put into the gap at the end, or after the question."""
    question, options = text_of(problem, "question"), texts_of(problem, "options")
    answer = options[index_of(problem, "answer", tuple(LETTERS[: len(options)]))]
    if question.endswith("  _  ."):
        return f"{question[:-5]}{answer}\n"
    return f"Question: {question}\nAnswer: {answer}\n"


# Questions whose answer is one of several texts, a label, or what the model writes.
CHOICES = (mmlu, hellaswag, arc, piqa, siqa, winogrande, race, sciq, swag, copa)
LABELS = (boolq, cb, rte, wic)
WRITTEN = (gsm8k, mbpp, triviaqa, nq_open, lambada, longbench, minilongbench_qa)
# What task files may name.
ROWS: dict[str, Callable[[Row], Row | None]] = {
    function.__name__: function for function in (*CHOICES, *LABELS, *WRITTEN)
}
