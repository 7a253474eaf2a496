"""WebNLG 2017: facts as triples, with the loss only on the text.

The prompt is "Triples: subject : property : object | subject : property : object\\nText:", with the
modified triples unchanged, including underscores; the text follows. The MLP Fusion authors' GPT-2
has new tokens around each part of a triple; this prompt needs none and works for any model [ours].

A row is an entry of the published XML as JSON of the same names: "category", "modifiedtripleset",
["subject | property | object"], and "lex", [{"comment", "text"}]. Only texts with the comment
"good" count, as in the authors' code: each is a training example, and all are the references of one
question. An entry without one (5 in train, 1 in validation) is ignored.
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks import base

# Categories of the training set, and those only in the test set.
SEEN = (
    "Airport",
    "Astronaut",
    "Building",
    "City",
    "ComicsCharacter",
    "Food",
    "Monument",
    "SportsTeam",
    "University",
    "WrittenWork",
)
UNSEEN = ("Artist", "Athlete", "CelestialBody", "MeanOfTransportation", "Politician")


def example(record: Mapping[str, Any], fields: base.Fields) -> base.Example:
    """The triples and the first good text, with a space so that its first token is " word"."""
    if any(fields):
        raise DataError(
            f"prompt_field, response_field and text_field are {tuple(fields)}; leave them empty: "
            "WebNLG has fixed fields"
        )
    return base.Example(f"Triples: {triples(record)}\nText:", f" {good_texts(record)[0]}")


def triples(record: Mapping[str, Any]) -> str:
    """ "subject : property : object", joined by " | "."""
    written = []
    for triple in base.texts_of(record, "modifiedtripleset"):
        parts = triple.split(" | ")
        if len(parts) != 3:
            raise DataError(f"triple {triple!r:.60} is not 'subject | property | object'")
        written.append(" : ".join(parts))
    if not written:
        raise DataError("field 'modifiedtripleset' is empty, expected one triple or more")
    return " | ".join(written)


def good_texts(record: Mapping[str, Any]) -> list[str]:
    """The texts that the annotators called good."""
    texts = base.list_of(record, "lex")
    if not texts:
        raise DataError(
            "field 'lex' is empty: a row without texts can be used neither for training nor as "
            "reference"
        )
    good = []
    for one in texts:
        lexicalisation = base.mapping_of({"lex": one}, "lex")
        if base.text_of(lexicalisation, "comment") == "good":
            good.append(base.text_of(lexicalisation, "text").strip())
    if not all(good):
        raise DataError(f"text {good.index('') + 1} of the good ones in 'lex' is empty")
    return good


def good_records(row: Mapping[str, Any], training: bool) -> list[Mapping[str, Any]]:
    """An entry -> one record per good text in training, else one with all; none without any."""
    texts = good_texts(row)
    if training:
        return [{**row, "lex": [{"comment": "good", "text": text}]} for text in texts]
    return [row] if texts else []


def reference(record: Mapping[str, Any]) -> dict[str, Any]:
    """All good texts, and the part of the test set (reported separately)."""
    category = base.word_of(record, (*SEEN, *UNSEEN), "category")
    return {"texts": good_texts(record), "part": "seen" if category in SEEN else "unseen"}


TASK = base.Task(
    "webnlg", example, expand=good_records, reference=reference, metrics=("bleu", "ter")
)
