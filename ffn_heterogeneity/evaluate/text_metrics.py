"""BLEU and TER against one or several references, by sacrebleu (extra `text`).

Both are corpus metrics, not means over texts: numerators and denominators are summed over texts
first. A reference is `{"texts": [...]}`; texts are tokenized with sacrebleu's defaults (BLEU: 13a,
cased). Values are on sacrebleu's scale, 0 to 100; TER (lower is better) may exceed 100.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.wording import extra

References = Sequence[Mapping[str, Any]]


def bleu(predictions: Sequence[str], references: References) -> dict[str, np.ndarray]:
    """Counts for n = 1 .. 4 (n-grams in a reference, n-grams), then lengths in words.

    The lengths are the prediction's and that of the reference with the nearest length.
    """
    rows = []
    for score in _each("BLEU", predictions, references):
        fractions = list(zip(score.counts, score.totals, strict=True))
        rows.append([*fractions, (score.sys_len, score.ref_len)])
    return {"bleu": np.array(rows, float)}


def bleu_of(above: np.ndarray, below: np.ndarray) -> float:
    """BLEU from sums of `bleu`'s counts: geometric mean of precisions x brevity penalty."""
    from sacrebleu.metrics.bleu import BLEU

    *correct, length = above.astype(int).tolist()
    *total, reference_length = below.astype(int).tolist()
    # The smoothing is the default of sacrebleu's class, but not of this function.
    return BLEU.compute_bleu(correct, total, length, reference_length, "exp").score


def ter(predictions: Sequence[str], references: References) -> dict[str, np.ndarray]:
    """Counts (100 x edits to the nearest reference, mean length of the references)."""
    scores = _each("TER", predictions, references)
    return {"ter": np.array([[(100 * one.num_edits, one.ref_length)] for one in scores], float)}


def signature(name: str, references: References) -> str:
    """sacrebleu's signature: the settings that a score of these references depends on.

    Raises:
      ImportError: sacrebleu is not installed.
    """
    metric = _metric(name)
    numbers = {len(reference["texts"]) for reference in references}
    metric.num_refs = numbers.pop() if len(numbers) == 1 else -1  # means "var"
    return metric.get_signature().format()


def _each(name: str, predictions: Sequence[str], references: References) -> list[Any]:
    """Score each text as a separate corpus, because `sentence_score` would warn for each BLEU."""
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
