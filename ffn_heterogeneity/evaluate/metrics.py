"""SuperGLUE's metrics, by name: pure functions `(predictions, references) -> {name: value}`.

What a reference is, is said by each function; the tasks of `data/tasks` make them
(`data.mixtures.questions`). Values are fractions, not percent.
"""

from __future__ import annotations

import collections
import math
import re
import statistics
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ffn_heterogeneity.data.tasks.superglue import CB_WORDS

SUPERGLUE = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc")
# Left out when a referent is compared (T5's list).
DETERMINERS = frozenset(
    (
        "a", "an", "each", "every", "few", "her", "his", "many", "much", "my", "our", "some",
        "that", "the", "their", "these", "this", "those", "which", "whose", "your",
    )
)  # fmt: skip

Scores = dict[str, float]
Metric = Callable[..., Scores]


def accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> Scores:
    """Share of predictions equal to their reference; white space around texts does not count."""
    _check(predictions, references)
    return {
        "accuracy": _mean(_stripped(p) == _stripped(r) for p, r in _pairs(predictions, references))
    }


def macro_f1(
    predictions: Sequence[Hashable], references: Sequence[Hashable], labels: Sequence[Hashable]
) -> Scores:
    """Mean over `labels` of F1 = 2 TP / (2 TP + FP + FN), 0 where a label is in neither list.

    A prediction that is no label is wrong: it misses its reference and is charged to no class.
    """
    _check(predictions, references)
    pairs = [(_stripped(p), _stripped(r)) for p, r in _pairs(predictions, references)]
    return {"macro_f1": _mean(_f1(pairs, label) for label in labels)}


def cb(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """CommitmentBank: F1 averaged over its three label words, and accuracy."""
    return macro_f1(predictions, references, CB_WORDS) | accuracy(predictions, references)


def multirc(predictions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> Scores:
    """MultiRC: F1 of "True" over all answers, and share of questions with every answer right.

    A reference is `{"label": "True" | "False", "group": question}`. A prediction that is neither
    word counts as the wrong one (T5).
    """
    _check(predictions, references)
    pairs, groups = [], collections.defaultdict(list)
    for prediction, reference in _pairs(predictions, references):
        label, said = reference["label"], _stripped(prediction)
        if said not in ("True", "False"):
            said = "False" if label == "True" else "True"
        pairs.append((said, label))
        groups[reference["group"]].append(said == label)
    return {"f1_answers": _f1(pairs, "True"), "exact_questions": _mean(map(all, groups.values()))}


def record(predictions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> Scores:
    """ReCoRD: exact match and token F1, each the best over a query's gold answers.

    A reference is `{"answers": [...], "group": (passage, query)}`; of several predictions for a
    group (training asks once per gold answer) the first counts.
    """
    _check(predictions, references)
    exact, overlap, seen = [], [], set()
    for prediction, reference in _pairs(predictions, references):
        if reference["group"] in seen:
            continue
        seen.add(reference["group"])
        said = normalize_squad(prediction)
        answers = [normalize_squad(answer) for answer in reference["answers"]]
        exact.append(said in answers)
        overlap.append(max(token_f1(said, answer) for answer in answers))
    return {"exact_match": _mean(exact), "f1": _mean(overlap)}


def wsc(predictions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> Scores:
    """Winograd: whether the model names the referent exactly when it is the right one.

    A reference is `{"referent": phrase, "label": bool}`; the prediction is a phrase. See
    `names_referent`; an empty prediction is wrong whatever the label.
    """
    _check(predictions, references)
    right = [
        bool(_bare(prediction)) and names_referent(prediction, r["referent"]) == bool(r["label"])
        for prediction, r in _pairs(predictions, references)
    ]
    return {"accuracy": _mean(right)}


def names_referent(prediction: str, referent: str) -> bool:
    """Lenient match: all words of one are words of the other, case and determiners left out.

    "Bob" does not name "Bob's hat": only one of them has an apostrophe.
    """
    said, meant = _bare(prediction), _bare(referent)
    if ("'" in said) != ("'" in meant):
        return False
    said_words, meant_words = set(said.split()), set(meant.split())
    return bool(said_words) and (said_words <= meant_words or meant_words <= said_words)


METRICS: dict[str, Metric] = {
    function.__name__: function for function in (accuracy, cb, multirc, record, wsc)
}


def superglue(scores: Mapping[str, Mapping[str, float]]) -> Scores:
    """SuperGLUE's number: each task the mean of its metrics, then the mean of the tasks.

    Args:
      scores: of every task by name ("boolq" or "superglue_boolq").

    Raises:
      ValueError: a task that is not one of the eight, or one that is missing.
    """
    tasks = {name.removeprefix("superglue_"): values for name, values in scores.items()}
    other = sorted(set(tasks) - set(SUPERGLUE))
    missing = [name for name in SUPERGLUE if name not in tasks]
    if other or missing:
        raise ValueError(
            f"SuperGLUE's score is over {', '.join(SUPERGLUE)}; missing: "
            f"{', '.join(missing) or 'none'}; not of them: {', '.join(other) or 'none'}"
        )
    means = {name: _mean(values.values()) for name, values in tasks.items()}
    return {**means, "superglue": _mean(means.values())}


def wilson_interval(correct: float, total: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share p = correct / total (n = total, z the normal quantile):

        (p + z^2/2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2/n).

    Raises:
      ValueError: total < 1, or correct outside 0 .. total.
    """
    if total < 1 or not 0 <= correct <= total:
        raise ValueError(f"{correct} correct of {total}; need 0 <= correct <= total, total >= 1")
    z = statistics.NormalDist().inv_cdf(0.975)
    share = correct / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At the ends centre and half are equal but for their rounding.
    low = (centre - half) / scale if correct else 0.0
    return max(low, 0.0), min((centre + half) / scale, 1.0) if correct < total else 1.0


def normalize_squad(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's own evaluation)."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of the shares of words they have in common, counted with repeats."""
    said, meant = prediction.split(), answer.split()
    common = sum((collections.Counter(said) & collections.Counter(meant)).values())
    return 2 * common / (len(said) + len(meant)) if common else 0.0


def _f1(pairs: Sequence[tuple[Hashable, Hashable]], label: Hashable) -> float:
    """F1 of one label over (prediction, reference) pairs."""
    both = sum(said == label == meant for said, meant in pairs)
    either = sum((said == label) + (meant == label) for said, meant in pairs)
    return 2 * both / either if either else 0.0


def _bare(phrase: str) -> str:
    words = phrase.strip().lower().split()
    return " ".join(word for word in words if word not in DETERMINERS)


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _pairs(predictions: Sequence[Any], references: Sequence[Any]) -> zip:
    return zip(predictions, references, strict=True)


def _mean(values: Any) -> float:
    values = [float(value) for value in values]
    return math.fsum(values) / len(values)


def _check(predictions: Sequence[Any], references: Sequence[Any]) -> None:
    if len(predictions) != len(references) or not len(references):
        raise ValueError(
            f"{len(predictions)} predictions for {len(references)} references; expected one each, "
            "and at least one"
        )
