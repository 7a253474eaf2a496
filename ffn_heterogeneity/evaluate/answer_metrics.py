"""Metrics of answers, by name: pure functions `(predictions, references) -> {name: value}`.

Each function documents the form of its references; the tasks of `data/tasks` create them
(`data.mixtures.questions`). SuperGLUE's values are fractions, not percent.

Every score is a mean of fractions whose numerators and denominators are sums over questions
(accuracy: right / asked; F1 of a label: 2 TP / (2 TP + FP + FN)), or a function of the sums
(`FORMULAS`). Each question's contributions are computed once; the scores of all questions and of
bootstrap resamples are sums of them.
"""

import collections
import dataclasses
import functools
import math
import re
import statistics
import string
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.tasks.superglue import CB_WORDS
from ffn_heterogeneity.evaluate import text_metrics
from ffn_heterogeneity.report.stats import resamples

SUPERGLUE = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc")
# Words ignored when referents are compared (T5's list).
DETERMINERS = frozenset(
    [
        *("a", "an", "the"),
        *("that", "these", "this", "those"),
        *("her", "his", "my", "our", "their", "whose", "your"),
        *("each", "every", "few", "many", "much", "some", "which"),
    ]
)

Labels = Sequence[Hashable]
Scores = dict[str, float]
# score -> [questions, fractions, 2]: contributions to numerator and denominator of each fraction.
Counts = dict[str, np.ndarray]


def _correlation_of(said: np.ndarray, meant: np.ndarray) -> float:
    """R_K from counts of predicted and reference labels; the last entries are right and total."""
    right, total, said, meant = said[-1], meant[-1], said[:-1], meant[:-1]
    spread = (total**2 - said @ said) * (total**2 - meant @ meant)
    return float((total * right - said @ meant) / spread**0.5) if spread > 0 else 0.0


# Scores that are not a mean of fractions: (numerators, denominators) -> value.
FORMULAS = {"bleu": text_metrics.bleu_of, "matthews": _correlation_of}


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric: `counts(predictions, references)` per question; calling it returns the scores.

    `signature(references)`: a description to quote with the score, or None.
    """

    counts: Callable[..., Counts]
    signature: Callable[[Sequence[Any]], str] | None = None

    def __call__(self, predictions: Sequence[Any], references: Sequence[Any], *more: Any) -> Scores:
        if len(predictions) != len(references) or not len(references):
            raise ValueError(
                f"{len(predictions)} predictions for {len(references)} references; expected one "
                "each, and at least one"
            )
        return scores(self.counts(predictions, references, *more))


def scores(counts: Counts, times: np.ndarray | None = None) -> Scores:
    """Mean of each score's fractions (0 / 0 counts as 0), or its formula.

    Args:
      times: weight of each question, [questions]; None: 1.
    """
    values = {}
    for name, table in counts.items():
        sums = table.sum(0) if times is None else np.tensordot(times, table, 1)
        above, below = sums.T
        if name in FORMULAS:
            values[name] = FORMULAS[name](above, below)
            continue
        fractions = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        values[name] = float(fractions.mean())
    return values


def bootstrap(counts: Counts, draws: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Scores of `draws` bootstrap resamples of the questions, [draws] each.

    In a resample without a label, the label's F1 is 0, as in the metric.
    """
    n = len(next(iter(counts.values())))
    times = (np.bincount(places, minlength=n) for places in resamples(n, draws, rng))
    drawn = [scores(counts, one) for one in times]
    return {name: np.array([one[name] for one in drawn]) for name in counts}


def with_ends(name: str, value: Any, low: float, high: float) -> dict[str, float]:
    """A metric and its interval in the form of result rows."""
    return {name: float(value), f"{name}_low": low, f"{name}_high": high}


@Metric
def accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> Counts:
    """Share of predictions equal to their reference, ignoring white space around texts."""
    return {"accuracy": _share(p == r for p, r in _pairs(predictions, references))}


@Metric
def macro_f1(predictions: Labels, references: Labels, labels: Labels) -> Counts:
    """Mean over `labels` of F1 = 2 TP / (2 TP + FP + FN), 0 if a label is in neither list.

    A prediction that is not a label is a false negative, but no false positive of any label.
    """
    return {"macro_f1": _f1(_pairs(predictions, references), labels)}


@Metric
def matthews(predictions: Labels, references: Labels, labels: Labels) -> Counts:
    """Correlation R_K of any number of labels (Gorodkin 2004; for two, Matthews')."""
    pairs = zip(predictions, references, strict=True)
    sides = [[*((p == x, r == x) for x in labels), (p == r, True)] for p, r in pairs]
    return {"matthews": np.array(sides, float)}


@Metric
def cb(predictions: Sequence[str], references: Sequence[str]) -> Counts:
    """CommitmentBank: F1 averaged over its three label words, and accuracy."""
    macro = macro_f1.counts(predictions, references, CB_WORDS)
    return macro | accuracy.counts(predictions, references)


@Metric
def multirc(predictions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> Counts:
    """MultiRC: F1 of "True" over all answers, and share of questions with every answer right.

    A reference is `{"label": "True" | "False", "group": question}`. A prediction that is neither
    word counts as the wrong one (T5).
    """
    groups = collections.defaultdict(list)
    for said, reference in _pairs(predictions, references):
        label = reference["label"]
        if said not in ("True", "False"):
            said = "False" if label == "True" else "True"
        groups[reference["group"]].append((said, label))
    right = (all(said == label for said, label in pairs) for pairs in groups.values())
    f1 = [_f1(pairs, ("True",)).sum(0) for pairs in groups.values()]
    return {"f1_answers": np.stack(f1), "exact_questions": _share(right)}


@Metric
def record(predictions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> Counts:
    """ReCoRD: exact match and token F1, each the best over a query's gold answers.

    A reference is `{"answers": [...], "group": (passage, query)}`; if a group has several
    predictions (training data has one per gold answer), the first counts.
    """
    exact, overlap, seen = [], [], set()
    for prediction, reference in _pairs(predictions, references):
        if reference["group"] in seen:
            continue
        seen.add(reference["group"])
        said = normalize_squad(prediction)
        answers = [normalize_squad(answer) for answer in reference["answers"]]
        exact.append(said in answers)
        overlap.append(max(token_f1(said, answer) for answer in answers))
    return {"exact_match": _share(exact), "f1": _share(overlap)}


@Metric
def wsc(predictions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> Counts:
    """Winograd: whether the model names the referent exactly when it is the right one.

    A reference is `{"referent": phrase, "label": bool}`; the prediction is a phrase. See
    `names_referent`; an empty prediction is always wrong.
    """
    right = (
        bool(_bare(prediction)) and names_referent(prediction, r["referent"]) == bool(r["label"])
        for prediction, r in _pairs(predictions, references)
    )
    return {"accuracy": _share(right)}


def names_referent(prediction: str, referent: str) -> bool:
    """Lenient match: all words of one are in the other, ignoring case and determiners.

    "Bob" does not name "Bob's hat": only one of them has an apostrophe.
    """
    said, meant = _bare(prediction), _bare(referent)
    if ("'" in said) != ("'" in meant):
        return False
    said_words, meant_words = set(said.split()), set(meant.split())
    return bool(said_words) and (said_words <= meant_words or meant_words <= said_words)


METRICS: dict[str, Metric] = {
    metric.counts.__name__: metric for metric in (accuracy, cb, multirc, record, wsc)
} | {
    "bleu": Metric(text_metrics.bleu, functools.partial(text_metrics.signature, "BLEU")),
    "ter": Metric(text_metrics.ter, functools.partial(text_metrics.signature, "TER")),
}


def superglue(scores: Mapping[str, Mapping[str, float]]) -> Scores:
    """SuperGLUE's score: the mean over tasks of each task's mean metric.

    Args:
      scores: {task name ("boolq" or "superglue_boolq"): its metrics}.

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
    means = {name: statistics.fmean(values.values()) for name, values in tasks.items()}
    return {**means, "superglue": statistics.fmean(means.values())}


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
    # At the ends, center and half are equal up to rounding.
    low = (centre - half) / scale if correct else 0.0
    return max(low, 0.0), min((centre + half) / scale, 1.0) if correct < total else 1.0


def normalize_squad(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (as in SQuAD's evaluation)."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of the shares of words they have in common, counted with repeats."""
    said, meant = prediction.split(), answer.split()
    common = sum((collections.Counter(said) & collections.Counter(meant)).values())
    return 2 * common / (len(said) + len(meant)) if common else 0.0


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L as in LongBench (by the package `rouge`): F1 of distinct words.

    Common words are those in a longest common subsequence of any two sentences, one of each text;
    sentences end at full stops. Needs rouge_score (extra `eval`).
    """
    from rouge_score.rouge_scorer import lcs_ind

    said, meant = (
        [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]
        for text in (prediction, answer)
    )
    # In this order it finds the same one as `rouge` if several have the same length.
    common = {mine[i] for mine in said for other in meant for i in lcs_ind(mine, other)}
    words = len(set().union(*said)) + len(set().union(*meant))
    return 2 * len(common) / words if common else 0.0


def _share(values: Iterable[float]) -> np.ndarray:
    """The counts of a mean over questions."""
    return np.array([[(float(value), 1.0)] for value in values])


def _f1(pairs: Iterable[tuple[Hashable, Hashable]], labels: Labels) -> np.ndarray:
    """The counts of each label's F1 over (prediction, reference) pairs."""
    sides = [[(2.0 * (p == x == r), (p == x) + (r == x)) for x in labels] for p, r in pairs]
    return np.array(sides)


def _bare(phrase: str) -> str:
    words = phrase.strip().lower().split()
    return " ".join(word for word in words if word not in DETERMINERS)


def _pairs(predictions: Sequence[Any], references: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Texts without the white space around them."""
    for prediction, reference in zip(predictions, references, strict=True):
        yield _stripped(prediction), _stripped(reference)


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value
