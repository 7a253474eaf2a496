"""Metrics of labels and numbers against their definitions; coverage of the intervals."""

import dataclasses

import numpy as np
import pytest
from tiny_models import LLAMA

from ffn_heterogeneity.data.glue import get_task
from ffn_heterogeneity.evaluate.classify import task_of
from ffn_heterogeneity.evaluate.label_metrics import label_metrics, number_metrics, task_metrics
from ffn_heterogeneity.heads.classification import Classification
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import HeadConfig

NAMES = ("accuracy", "f1", "macro_f1", "matthews")


def by_definition(given, wanted, count):
    def f1(label):
        tp = np.sum((given == label) & (wanted == label))
        both = np.sum(given == label) + np.sum(wanted == label)
        return 2 * tp / both if both else 0.0

    one = np.eye(count)
    x, y = one[given] - one[given].mean(0), one[wanted] - one[wanted].mean(0)
    spread = np.sqrt((x * x).sum() * (y * y).sum())
    means = {"accuracy": np.mean(given == wanted), "macro_f1": np.mean([*map(f1, range(count))])}
    return means | {"f1": f1(1), "matthews": (x * y).sum() / spread if spread else 0.0}


@pytest.mark.parametrize("count", [2, 3])
def test_labels(count):
    rng = np.random.default_rng(count)
    wanted = rng.integers(0, count, 400)
    given = np.where(rng.random(400) < 0.7, wanted, rng.integers(0, count, 400))
    made = label_metrics(given, wanted, count, NAMES)
    for name, value in by_definition(given, wanted, count).items():
        assert made[name] == pytest.approx(value, abs=1e-12)
        assert made[f"{name}_low"] < value < made[f"{name}_high"]
    # Against a bootstrap that draws the rows themselves.
    rows = rng.integers(0, 400, (400, 400))
    drawn = [by_definition(given[r], wanted[r], count)["matthews"] for r in rows]
    for end, share in (("low", 0.025), ("high", 0.975)):
        assert made[f"matthews_{end}"] == pytest.approx(np.quantile(drawn, share), abs=0.02)


def test_two_labels_are_matthews_own():
    given, wanted = np.array([1, 1, 0, 0, 1, 0]), np.array([1, 0, 0, 1, 1, 0])
    tp, fp, fn, tn = 2, 1, 1, 2
    want = (tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert label_metrics(given, wanted, 2, ["matthews"])["matthews"] == pytest.approx(want)
    constant = label_metrics(np.zeros(6, int), wanted, 2, NAMES)
    assert constant["matthews"] == constant["f1"] == 0 and constant["accuracy"] == 0.5


def test_f1_is_that_of_the_tasks_label_in_any_order():
    given, wanted = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 0, 1, 1])
    task = get_task("mrpc")
    moved = get_task("mrpc", labels=task.labels[::-1])
    assert moved.labels == task.labels[::-1]
    scores = task_metrics(task, given, wanted)
    assert task_metrics(moved, 1 - given, 1 - wanted) == scores
    assert scores["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert get_task("mrpc", labels=("no", "yes")).positive == 1
    # And of a head with those labels.
    for labels, number in ((task.labels, 1), (("Equivalent", "Not_equivalent"), 0)):
        settings = vars(Classification(outputs=2, task="mrpc", labels=labels))
        head = HeadConfig.of("classification", settings)
        model = Model(dataclasses.replace(LLAMA, head=head), {}, None, "")
        assert task_of(model).positive == number


def test_numbers():
    from scipy.stats import pearsonr, spearmanr

    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 6, 300) * 1.0  # many are equal
    given = wanted + rng.normal(size=300)
    made = number_metrics(given, wanted, ["spearman", "pearson"])
    assert made["spearman"] == pytest.approx(spearmanr(given, wanted).statistic, abs=1e-12)
    assert made["pearson"] == pytest.approx(pearsonr(given, wanted).statistic, abs=1e-12)
    assert made["spearman_low"] < made["spearman"] < made["spearman_high"] and made["n"] == 300
    assert number_metrics(np.ones(9), wanted[:9], ["spearman"])["spearman"] == 0
