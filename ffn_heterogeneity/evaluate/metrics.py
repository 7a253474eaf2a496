"""Metrics of answers, by name: pure functions `(predictions, references) -> {name: value}`.

What a reference is, is said by each function; the tasks of `data/tasks` make them
(`data.mixtures.questions`). Values are fractions, not percent.
"""

from __future__ import annotations

import collections
import difflib
import math
import re
import statistics
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.tasks.superglue import CB_WORDS

SUPERGLUE = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc")
# Left out when a referent is compared (T5's list).
DETERMINERS = frozenset(
    (
        "a", "an", "each", "every", "few", "her", "his", "many", "much", "my", "our", "some",
        "that", "the", "their", "these", "this", "those", "which", "whose", "your",
    )
)  # fmt: skip
STRICT_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
ANY_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")

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


def exact_match_strict(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """GSM8K: the number after the first "#### " equals the reference's; no such number is wrong."""
    return _number_match("exact_match_strict", predictions, references, strict_number)


def exact_match_flexible(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """GSM8K: the last number in the answer, in whatever form, equals the reference's."""
    return _number_match("exact_match_flexible", predictions, references, last_number)


def strict_number(text: str) -> str | None:
    """What follows the first "#### ", cleaned; None if nothing does."""
    found = STRICT_NUMBER.search(text)
    return clean_number(found[1]) if found else None


def last_number(text: str) -> str | None:
    """The last number, cleaned; None if there is none."""
    found = ANY_NUMBER.findall(text)
    return clean_number(found[-1]) if found else None


def clean_number(text: str) -> str:
    """Without $, thousands separators and a full stop at the end."""
    return re.sub(r"\.$", "", text.strip().replace("$", "").replace(",", ""))


def exact_match_triviaqa(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """TriviaQA: equal to one of the aliases, case, punctuation and articles left out."""
    return _any_match(predictions, references, normalize_triviaqa)


def exact_match_nq(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """NQ-open: equal to one of the answers under SQuAD's normalisation."""
    return _any_match(predictions, references, normalize_squad)


def pass_at_1(
    predictions: Sequence[str], references: Sequence[Mapping[str, Any]], *, allow: bool = False
) -> Scores:
    """Share of programs that pass all their tests; runs them, hence refused unless `allow`.

    A reference is `{"tests": [statements], "setup": statements}`.
    """
    from ffn_heterogeneity.evaluate import code_metrics

    _check(predictions, references)
    tests = [reference["tests"] for reference in references]
    setups = [reference["setup"] for reference in references]
    judged = code_metrics.pass_at_1(predictions, tests, setups, allow=allow)
    return {"pass_at_1": judged.pass_at_1}


def perplexity(predictions: Sequence[float], references: Sequence[int]) -> Scores:
    """exp(sum of negative log-likelihoods / sum of tokens); one of each per document, in nats.

    Infinite where a float cannot hold it (a model broken by an attack).
    """
    _check(predictions, references)
    tokens = sum(references)
    if tokens <= 0:
        raise ValueError(f"perplexity over {tokens} tokens; at least one document must have some")
    nll = math.fsum(predictions) / tokens
    # Not `nll < 700`: a NaN must stay one.
    return {"perplexity": math.inf if nll > 700 else math.exp(nll)}


METRICS: dict[str, Metric] = {
    function.__name__: function
    for function in (
        accuracy, cb, multirc, record, wsc, exact_match_strict, exact_match_flexible,
        exact_match_triviaqa, exact_match_nq, pass_at_1, perplexity,
    )
}  # fmt: skip


def get_metric(name: str) -> Metric:
    """The metric called `name`; an unknown name is a `ValueError` with the nearest ones."""
    if name in METRICS:
        return METRICS[name]
    near = difflib.get_close_matches(name, METRICS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown metric {name!r}; {hint}known: {', '.join(sorted(METRICS))}")


def score(
    names: Sequence[str], predictions: Sequence[Any], references: Sequence[Any], **options: Any
) -> Scores:
    """All metrics of a task (`Task.metrics`) in one dictionary."""
    scores: Scores = {}
    for name in names:
        scores |= get_metric(name)(predictions, references, **options)
    return scores


def superglue(scores: Mapping[str, Mapping[str, float]], *, partial: bool = False) -> Scores:
    """SuperGLUE's number: each task the mean of its metrics, then the mean of the tasks.

    Args:
      scores: of every task by name ("boolq" or "superglue_boolq").
      partial: allow a mean over fewer than the eight.

    Raises:
      ValueError: a task that is not one of the eight, or one that is missing.
    """
    tasks = {name.removeprefix("superglue_"): values for name, values in scores.items()}
    other = sorted(set(tasks) - set(SUPERGLUE))
    missing = [name for name in SUPERGLUE if name not in tasks]
    if other or not tasks or (missing and not partial):
        raise ValueError(
            f"SuperGLUE's score is over {', '.join(SUPERGLUE)}; missing: {', '.join(missing)}; not "
            f"of them: {', '.join(other) or 'none'}; partial=True allows fewer"
        )
    means = {name: _mean(values.values()) for name, values in tasks.items()}
    return {**means, "superglue": _mean(means.values())}


def wilson_interval(correct: float, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share p = correct / total (n = total, z the normal quantile):

        (p + z^2/2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2/n).

    Raises:
      ValueError: total < 1, correct outside 0 .. total, or confidence outside (0, 1).
    """
    if total < 1 or not 0 <= correct <= total or not 0 < confidence < 1:
        raise ValueError(
            f"{correct} correct of {total} at confidence {confidence}; need 0 <= correct <= total, "
            "total >= 1 and a confidence between 0 and 1"
        )
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At the ends centre and half are equal but for their rounding.
    low = (centre - half) / scale if correct else 0.0
    return max(low, 0.0), min((centre + half) / scale, 1.0) if correct < total else 1.0


def bootstrap_interval(
    metric: Metric,
    predictions: Sequence[Any],
    references: Sequence[Any],
    *,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Percentile intervals of every number of a metric, over examples drawn with replacement.

    Examples with the same "group" (the answers to a question) are drawn together, each draw as a
    group of its own.

    Raises:
      ValueError: fewer than 2 resamples, or a confidence outside (0, 1).
    """
    _check(predictions, references)
    if resamples < 2 or not 0 < confidence < 1:
        raise ValueError(f"{resamples} resamples at confidence {confidence}; need 2 and (0, 1)")
    groups = collections.defaultdict(list)
    for i, reference in enumerate(references):
        groups[_group_of(reference, i)].append(i)
    members, random = list(groups.values()), np.random.default_rng(seed)
    values = collections.defaultdict(list)
    for _ in range(resamples):
        drawn = random.integers(len(members), size=len(members))
        chosen = [(i, draw) for draw, group in enumerate(drawn) for i in members[group]]
        # A group drawn twice is two groups.
        again = [_with_group(references[i], draw) for i, draw in chosen]
        for name, value in metric([predictions[i] for i, _ in chosen], again).items():
            values[name].append(value)
    edges = (50 * (1 - confidence), 50 * (1 + confidence))
    return {
        name: tuple(float(edge) for edge in np.percentile(found, edges))
        for name, found in values.items()
    }


def normalize_squad(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's own evaluation)."""
    return _normalized(text, string.punctuation, "")


def normalize_triviaqa(text: str) -> str:
    """As SQuAD's, but punctuation (and typographic quotes) parts words (TriviaQA's evaluation)."""
    return _normalized(text, string.punctuation + "‘’´`_", " ")


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of the shares of words they have in common, counted with repeats."""
    said, meant = prediction.split(), answer.split()
    common = sum((collections.Counter(said) & collections.Counter(meant)).values())
    return 2 * common / (len(said) + len(meant)) if common else 0.0


def _normalized(text: str, punctuation: str, instead: str) -> str:
    text = text.lower().translate({ord(character): instead for character in punctuation})
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _number_match(
    name: str,
    predictions: Sequence[str],
    references: Sequence[str],
    number_of: Callable[[str], str | None],
) -> Scores:
    _check(predictions, references)
    right = []
    for prediction, reference in _pairs(predictions, references):
        gold = strict_number(reference) or last_number(reference)
        if gold is None:
            raise ValueError(
                f"no number in the reference {reference!r:.60}; GSM8K answers have one"
            )
        right.append(number_of(prediction) == gold)
    return {name: _mean(right)}


def _any_match(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    normalize: Callable[[str], str],
) -> Scores:
    _check(predictions, references)
    right = []
    for prediction, answers in _pairs(predictions, references):
        if isinstance(answers, str) or not answers:
            raise ValueError(f"reference {answers!r:.60}; expected a list of one or more answers")
        right.append(normalize(prediction) in {normalize(answer) for answer in answers})
    return {"exact_match": _mean(right)}


def _f1(pairs: Sequence[tuple[Hashable, Hashable]], label: Hashable) -> float:
    """F1 of one label over (prediction, reference) pairs."""
    both = sum(said == label == meant for said, meant in pairs)
    either = sum((said == label) + (meant == label) for said, meant in pairs)
    return 2 * both / either if either else 0.0


def _bare(phrase: str) -> str:
    words = phrase.strip().lower().split()
    return " ".join(word for word in words if word not in DETERMINERS)


def _group_of(reference: Any, otherwise: int) -> Hashable:
    grouped = isinstance(reference, Mapping) and "group" in reference
    return ("group", reference["group"]) if grouped else otherwise


def _with_group(reference: Any, group: int) -> Any:
    grouped = isinstance(reference, Mapping) and "group" in reference
    return {**reference, "group": group} if grouped else reference


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
