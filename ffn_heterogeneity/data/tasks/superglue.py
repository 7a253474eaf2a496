"""SuperGLUE and DPR as text to text, and their mixture in proportion to size (T5's recipe).

The prompt is "<task> key: text key: text ..." and the answer a label word or a span, exactly as in
T5. A model without an encoder must see where the prompt ends, so the prompt ends with a line end
before the answer (ours; the papers do not specify it).

Rows may have the form of the official files or that of the hub, where labels are numbers, MultiRC
and ReCoRD are flat and WSC has no "target".
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import (
    Example,
    Fields,
    MixedTask,
    Task,
    list_of,
    mapping_of,
    text_of,
    texts_of,
    value_of,
    word_of,
)

BOOLEANS = ("False", "True")
CB_WORDS = ("entailment", "contradiction", "neutral")
RTE_WORDS = ("entailment", "not_entailment")
COPA_WORDS = ("choice1", "choice2")

# Name -> number of training examples, which is the weight in the mixture "proportional" (without a
# cap), and the official folder. ReCoRD counts gold answers, MultiRC answers, WSC only the pairs
# that corefer.
SETS = {
    "boolq": (9_427, "BoolQ"),
    "cb": (250, "CB"),
    "copa": (400, "COPA"),
    "multirc": (27_243, "MultiRC"),
    "record": (138_854, "ReCoRD"),
    "rte": (2_490, "RTE"),
    "wic": (5_428, "WiC"),
    "wsc": (259, "WSC"),
    "dpr": (1_322, "DPR"),
}
OPTIONS = {"dpr": "with_dpr"}  # the data setting that excludes it


def _form(name: str, target: str, fields: Fields, **texts: str) -> Example:
    """The prompt in the order of `texts`, and the target on the line after it."""
    if any(fields):
        raise DataError(
            f"prompt_field, response_field and text_field are {tuple(fields)}; leave them empty: "
            "the SuperGLUE tasks read fixed fields"
        )
    body = " ".join(f"{key}: {text}" for key, text in texts.items())
    return Example(f"{name} {body}\n", target)


def _labelled(name: str, words: Sequence[str], *keys: str) -> Callable[..., Example]:
    """The example of a row with a label: the texts of `keys` -> one of `words`."""

    def example(row: Mapping[str, Any], fields: Fields) -> Example:
        texts = {key: text_of(row, key) for key in keys}
        return _form(name, word_of(row, words), fields, **texts)

    return example


def multirc(row: Mapping[str, Any], fields: Fields) -> Example:
    """question, answer, paragraph -> True | False; for one answer, see `multirc_answers`."""
    texts = {key: _plain(text_of(row, key)) for key in ("question", "answer", "paragraph")}
    return _form("multirc", word_of(row, BOOLEANS), fields, **texts)


def multirc_answers(row: Mapping[str, Any], training: bool) -> list[Mapping[str, Any]]:
    """A row of the official file (a paragraph with its questions) -> one record per answer."""
    if "paragraph" in row:
        return [row]
    passage, paragraph = mapping_of(row, "passage"), value_of(row, "idx", int, "a number")
    return [
        {
            "paragraph": text_of(passage, "text"),
            "question": text_of(question, "question"),
            "answer": text_of(answer, "text"),
            "label": value_of(answer, "label", int, "0 or 1"),
            "idx": {"paragraph": paragraph, "question": value_of(question, "idx", int, "a number")},
        }
        for question in list_of(passage, "questions")
        for answer in list_of(question, "answers")
    ]


def multirc_reference(row: Mapping[str, Any]) -> dict[str, Any]:
    """The label word, and the question whose answers are judged together."""
    idx = mapping_of(row, "idx")
    group = tuple(value_of(idx, key, int, "a number") for key in ("paragraph", "question"))
    return {"label": word_of(row, BOOLEANS), "group": group}


def record(row: Mapping[str, Any], fields: Fields) -> Example:
    """query, entities, passage -> an answer; for one gold answer, see `record_answers`."""
    entities = ", ".join(texts_of(row, "entities"))
    texts = {"query": text_of(row, "query"), "entities": entities}
    passage = text_of(row, "passage")
    return _form("record", text_of(row, "answer"), fields, **texts, passage=passage)


def record_answers(row: Mapping[str, Any], training: bool) -> list[Mapping[str, Any]]:
    """A passage with its queries (or one query of the hub) -> one record per gold answer.

    Entities and answers are the distinct strings of the marked spans, in alphabetical order.
    Highlights become sentences of the passage. Outside training: one record per query.
    """
    if "qas" in row:
        passage = mapping_of(row, "passage")
        text = text_of(passage, "text")
        spans = [_span(text, entity) for entity in list_of(passage, "entities")]
        idx = value_of(row, "idx", int, "a number")
        queries = [
            (
                text_of(query, "query"),
                [text_of(answer, "text") for answer in list_of(query, "answers")],
                {"passage": idx, "query": value_of(query, "idx", int, "a number")},
            )
            for query in list_of(row, "qas")
        ]
    else:
        text, spans = text_of(row, "passage"), texts_of(row, "entities")
        queries = [(text_of(row, "query"), texts_of(row, "answers"), mapping_of(row, "idx"))]
    shared = {"passage": _fold_highlights(text), "entities": sorted(set(spans))}
    records = []
    for query, answers, idx in queries:
        answers = sorted(set(answers))
        if not answers:
            raise DataError(f"query {query!r:.40} has no gold answer: a row of a test set")
        for answer in answers if training else answers[:1]:
            one = {"query": query, "answer": answer, "answers": answers, "idx": idx}
            records.append(shared | one)
    return records


def record_reference(row: Mapping[str, Any]) -> dict[str, Any]:
    """All gold answers, and the query, whose answers are judged together."""
    idx = mapping_of(row, "idx")
    group = tuple(value_of(idx, key, int, "a number") for key in ("passage", "query"))
    return {"answers": texts_of(row, "answers"), "group": group}


def wsc(row: Mapping[str, Any], fields: Fields) -> Example:
    """The text with its *pronoun* marked -> the noun phrase it may refer to."""
    spans = wsc_spans(row)
    pronoun, index = text_of(spans, "span2_text"), value_of(spans, "span2_index", int, "a number")
    text = _mark(text_of(row, "text"), pronoun, index)
    return _wsc_form(text, text_of(spans, "span1_text"), fields)


def wsc_spans(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The holder of "span1_text", "span2_text" and "span2_index": "target", or the row itself."""
    return mapping_of(row, "target") if "target" in row else row


def wsc_pairs(row: Mapping[str, Any], training: bool) -> list[Mapping[str, Any]]:
    """The row; in training none if its pronoun does not refer to the phrase (no target)."""
    return [] if training and word_of(row, BOOLEANS) == "False" else [row]


def wsc_reference(row: Mapping[str, Any]) -> dict[str, Any]:
    """The phrase, and whether the pronoun refers to it."""
    referent = text_of(wsc_spans(row), "span1_text")
    return {"referent": referent, "label": word_of(row, BOOLEANS) == "True"}


def dpr(row: Mapping[str, Any], fields: Fields) -> Example:
    """Definite pronoun resolution, in the form of WSC: sentence, pronoun, candidates, label."""
    candidates = texts_of(row, "candidates")
    text = _mark(text_of(row, "sentence"), text_of(row, "pronoun"), 0)
    return _wsc_form(text, word_of(row, candidates), fields)


def mixed(row: Mapping[str, Any], fields: Fields) -> Example:
    """A row of the mixture, `{"member": task, "record": its row}`."""
    return _BY_NAME[row["member"]].example(row["record"], fields)


def _wsc_form(text: str, referent: str, fields: Fields) -> Example:
    return Example(f"wsc: {text}\n", _form("wsc", referent, fields).target)


def _mark(text: str, pronoun: str, index: int) -> str:
    """Mark with stars the pronoun at (or, if it is not there, nearest to) word `index`.

    The published index is off by one in a few rows, and some pronouns have punctuation attached.
    """
    places = [word.start() for word in re.finditer(r"\S+", text)]
    if not places or not 0 <= index < len(places):
        raise DataError(f"word {index} of the pronoun is not among the {len(places)} of the text")
    matches = re.finditer(rf"(?<!\w){re.escape(pronoun)}(?!\w)", text)
    starts = [match.start() for match in matches]
    if not pronoun or not starts:
        raise DataError(f"the pronoun {pronoun!r} is not in the text {text!r:.60}")
    start = min(starts, key=lambda start: abs(start - places[index]))
    end = start + len(pronoun)
    return f"{text[:start]}*{pronoun}*{text[end:]}"


def _plain(text: str) -> str:
    """Remove the mark-up of MultiRC: line breaks become spaces, bold marks are removed."""
    return re.sub(r"</?b>", "", text.replace("<br>", " "))


def _fold_highlights(passage: str) -> str:
    """Convert the summary lines of a ReCoRD passage to sentences, adding missing full stops."""
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", passage)
    return passage.replace("\n@highlight\n", ". ")


def _span(text: str, entity: Mapping[str, Any]) -> str:
    start, end = (value_of(entity, key, int, "a number") for key in ("start", "end"))
    if not 0 <= start <= end < len(text):
        raise DataError(f"entity from {start} to {end} is outside the passage of {len(text)}")
    return text[start : end + 1]


def _task(
    name: str, example: Callable[..., Example], metric: str = "accuracy", **more: Any
) -> Task:
    hub = f"aps/super_glue:{'wsc.fixed' if name == 'wsc' else name}"
    return Task(f"superglue_{name}", example, **{"hub": hub, "metrics": (metric,), **more})


_ONE_EACH = (
    _task("boolq", _labelled("boolq", BOOLEANS, "passage", "question")),
    _task("cb", _labelled("cb", CB_WORDS, "hypothesis", "premise"), "cb"),
    _task("copa", _labelled("copa", COPA_WORDS, "choice1", "choice2", "premise", "question")),
    _task(
        "multirc",
        multirc,
        "multirc",
        expand=multirc_answers,
        reference=multirc_reference,
        passage="paragraph",
    ),
    _task(
        "record",
        record,
        "record",
        expand=record_answers,
        reference=record_reference,
        passage="passage",
    ),
    _task("rte", _labelled("rte", RTE_WORDS, "hypothesis", "premise")),
    _task("wic", _labelled("wic", BOOLEANS, "sentence1", "sentence2", "word")),
    _task("wsc", wsc, "wsc", expand=wsc_pairs, reference=wsc_reference),
    _task("dpr", dpr, hub="community-datasets/definite_pronoun_resolution"),
)
_BY_NAME = {task.name: task for task in _ONE_EACH}
_MEMBERS = tuple(
    MixedTask(f"superglue_{name}", size, (f"superglue_{name}", folder, name), OPTIONS.get(name, ""))
    for name, (size, folder) in SETS.items()
)
TASKS = (*_ONE_EACH, Task("superglue", mixed, members=_MEMBERS))
