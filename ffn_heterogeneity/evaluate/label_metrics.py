"""Metrics of labels and of numbers, as GLUE has them, with bootstrap intervals over rows.

Of labels everything is a function of the confusion table C[reference, prediction], and a resample
of n rows has a multinomial table of n draws from C / n: no row is drawn by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ffn_heterogeneity.data.glue import LabelTask

DRAWS, SEED = 1_000, 0
_QUANTILES = (0.025, 0.975)


def task_metrics(task: LabelTask, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The metrics of a task, with intervals."""
    if task.regression:
        return number_metrics(predictions, targets, task.metrics)
    return label_metrics(predictions, targets, len(task.labels), task.metrics)


def label_metrics(
    predictions: np.ndarray, targets: np.ndarray, count: int, names: Sequence[str]
) -> dict[str, float]:
    """`{name, name_low, name_high}` of each metric, and "n".

        accuracy:  sum_c C[c, c] / n
        f1:        2 TP / (2 TP + FP + FN) of label 1, as GLUE takes it of two labels
        macro_f1:  the mean of every label's
        matthews:  the correlation R_K of any number of labels (Gorodkin 2004; of two, Matthews')

    0 / 0 is 0. Intervals are the middle 95% of 1,000 resamples.

    Args:
      predictions, targets: numbers of labels, [n].
      count: how many labels there are.
    """
    table = np.zeros((count, count))
    np.add.at(table, (targets.astype(int), predictions.astype(int)), 1)
    n = int(table.sum())
    draws = np.random.default_rng(SEED).multinomial(n, table.reshape(-1) / n, DRAWS)
    drawn = draws.reshape(DRAWS, count, count).astype(float)
    of_table = {"accuracy": _accuracy, "f1": _f1, "matthews": _matthews}
    of_table["macro_f1"] = lambda tables: _f1_of_each(tables).mean(-1)
    values = {name: (of_table[name](table), of_table[name](drawn)) for name in names}
    return _with_intervals(values) | {"n": n}


def number_metrics(
    predictions: np.ndarray, targets: np.ndarray, names: Sequence[str]
) -> dict[str, float]:
    """Metrics of numbers, in the form of `label_metrics`: "spearman", "pearson".

    Of equal numbers all have their mean rank. A resample in which either side is constant has a
    correlation of 0.
    """
    n = len(targets)
    rows = np.random.default_rng(SEED).integers(0, n, (DRAWS, n))
    values = {}
    for name in names:
        drawn = [_correlation(name, predictions[one], targets[one]) for one in rows]
        values[name] = (_correlation(name, predictions, targets), np.array(drawn))
    return _with_intervals(values) | {"n": n}


def _with_intervals(values: Mapping[str, tuple]) -> dict[str, float]:
    metrics = {}
    for name, (value, drawn) in values.items():
        low, high = np.quantile(drawn, _QUANTILES)
        metrics |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
    return metrics


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    above, below = np.asarray(above, float), np.asarray(below, float)
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _diagonal(tables: np.ndarray) -> np.ndarray:
    return np.diagonal(tables, axis1=-2, axis2=-1)


def _accuracy(tables: np.ndarray) -> np.ndarray:
    return _ratio(_diagonal(tables).sum(-1), tables.sum((-2, -1)))


def _f1_of_each(tables: np.ndarray) -> np.ndarray:
    return _ratio(2 * _diagonal(tables), tables.sum(-1) + tables.sum(-2))


def _f1(tables: np.ndarray) -> np.ndarray:
    return _f1_of_each(tables)[..., 1]


def _matthews(tables: np.ndarray) -> np.ndarray:
    total, right = tables.sum((-2, -1)), _diagonal(tables).sum(-1)
    meant, said = tables.sum(-1), tables.sum(-2)
    both = (meant * said).sum(-1)
    spread = (total**2 - (meant**2).sum(-1)) * (total**2 - (said**2).sum(-1))
    return _ratio(total * right - both, np.sqrt(spread))


def _correlation(name: str, x: np.ndarray, y: np.ndarray) -> float:
    from scipy.stats import rankdata

    if name == "spearman":
        x, y = rankdata(x), rankdata(y)
    x, y = np.asarray(x, float) - np.mean(x), np.asarray(y, float) - np.mean(y)
    return float(_ratio(x @ y, np.sqrt((x @ x) * (y @ y))))
