"""BLEU and TER against one or several references, by sacrebleu (extra `text`).

Both are of a corpus, no means over its texts: the sides of their fractions add up over texts first.
A reference is `{"texts": [...]}`; words are cut as sacrebleu's defaults say (BLEU: 13a, cased). The
values are sacrebleu's as well, 0 to 100; TER, which is better low, may be higher.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.wording import extra

References = Sequence[Mapping[str, Any]]


def bleu(predictions: Sequence[str], references: References) -> dict[str, np.ndarray]:
    """The counts of n = 1 .. 4 (n-grams that a reference has, n-grams), then the lengths in words
    (the prediction's, that of the reference nearest to it)."""
    rows = []
    for score in _each("BLEU", predictions, references):
        fractions = list(zip(score.counts, score.totals, strict=True))
        rows.append([*fractions, (score.sys_len, score.ref_len)])
    return {"bleu": np.array(rows, float)}


def bleu_of(above: np.ndarray, below: np.ndarray) -> float:
    """BLEU of sums of what `bleu` counts: the precisions' geometric mean x the brevity penalty."""
    from sacrebleu.metrics.bleu import BLEU

    *correct, length = above.astype(int).tolist()
    *total, reference_length = below.astype(int).tolist()
    # The smoothing is the default of its class, if not of this function.
    return BLEU.compute_bleu(correct, total, length, reference_length, "exp").score


def ter(predictions: Sequence[str], references: References) -> dict[str, np.ndarray]:
    """The counts (100 x edits to the nearest reference, mean length of the references)."""
    scores = _each("TER", predictions, references)
    return {"ter": np.array([[(100 * one.num_edits, one.ref_length)] for one in scores], float)}


def signature(name: str, references: References) -> str:
    """The settings that a score of these references depends on, as sacrebleu writes them.

    Raises:
      ImportError: sacrebleu is not installed.
    """
    metric = _metric(name)
    numbers = {len(reference["texts"]) for reference in references}
    metric.num_refs = numbers.pop() if len(numbers) == 1 else -1  # its word for "var"
    return metric.get_signature().format()


def _each(name: str, predictions: Sequence[str], references: References) -> list[Any]:
    """The score of each text as a corpus of its own: `sentence_score` would warn of each BLEU."""
    metric = _metric(name)
    return [
        metric.corpus_score([said], [[text] for text in reference["texts"]])
        for said, reference in zip(predictions, references, strict=True)
    ]


def _metric(name: str) -> Any:
    """sacrebleu's "BLEU" or "TER", with its defaults."""
    with extra("text"):
        from sacrebleu import metrics
    return getattr(metrics, name)()
