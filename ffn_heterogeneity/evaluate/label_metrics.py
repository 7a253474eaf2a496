"""GLUE's metrics of labels and of numbers, with bootstrap intervals over rows.

All metrics of labels are functions of the confusion table C[reference, prediction]. The table of a
bootstrap resample of n rows is multinomial, n draws from C / n, so rows need not be drawn.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.glue import LabelTask
from ffn_heterogeneity.evaluate import answer_metrics as metrics
from ffn_heterogeneity.report.stats import ends, resamples

DRAWS, SEED = 1_000, 0


def task_metrics(task: LabelTask, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Compute the metrics of a task, with intervals."""
    if task.regression:
        return number_metrics(predictions, targets, task.metrics)
    return label_metrics(predictions, targets, len(task.labels), task.metrics, task.positive)


def label_metrics(
    predictions: np.ndarray,
    targets: np.ndarray,
    count: int,
    names: Sequence[str],
    positive: int = 1,
) -> dict[str, float]:
    """Compute `{name, name_low, name_high}` of each metric, and "n".

        accuracy:  sum_c C[c, c] / n
        f1:        2 TP / (2 TP + FP + FN) of one label, as in GLUE for two labels
        macro_f1:  mean F1 over all labels
        matthews:  the correlation R_K of any number of labels (Gorodkin 2004; for two, Matthews')

    0 / 0 is 0. Intervals are the middle 95% of 1,000 resamples.

    Args:
      predictions, targets: numbers of labels, [n].
      count: number of labels.
      positive: the number of the label of "f1".
    """
    meant, said = np.indices((count, count)).reshape(2, -1).tolist()
    table = np.bincount(targets.astype(int) * count + predictions.astype(int), minlength=count**2)
    n = int(table.sum())
    draws = np.random.default_rng(SEED).multinomial(n, table / n, DRAWS)
    every, results = range(count), dict[str, float]()
    kinds = {"accuracy": (metrics.accuracy,), "f1": (metrics.macro_f1, (positive,))}
    kinds |= {"macro_f1": (metrics.macro_f1, every), "matthews": (metrics.matthews, every)}
    for name in names:
        metric, *labels = kinds[name]
        counts = metric.counts(said, meant, *labels)
        each = [metrics.scores(counts, times) for times in (table, *draws)]
        value, *drawn = (next(iter(one.values())) for one in each)
        results |= metrics.with_ends(name, value, *ends(drawn))
    return results | {"n": n}


def number_metrics(
    predictions: np.ndarray, targets: np.ndarray, names: Sequence[str]
) -> dict[str, float]:
    """Metrics of numbers, in the form of `label_metrics`: "spearman", "pearson".

    Ties have their mean rank. The correlation is 0 in a resample in which either side is constant.
    """
    n, results = len(targets), dict[str, float]()
    for name in names:
        of_rows = functools.partial(_correlation, name, predictions, targets)
        drawn = [*map(of_rows, resamples(n, DRAWS, SEED))]
        results |= metrics.with_ends(name, of_rows(slice(None)), *ends(drawn))
    return results | {"n": n}


def _correlation(name: str, x: np.ndarray, y: np.ndarray, rows: Any) -> float:
    from scipy.stats import rankdata

    x, y = x[rows], y[rows]
    if name == "spearman":
        x, y = rankdata(x), rankdata(y)
    x, y = np.asarray(x, float) - np.mean(x), np.asarray(y, float) - np.mean(y)
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread > 0 else 0.0
