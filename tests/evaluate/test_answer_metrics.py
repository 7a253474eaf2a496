"""Metrics against scikit-learn, the harness and cases worked by hand."""

import numpy as np
import pytest
import sklearn.metrics
from tiny_runs import refused

from ffn_heterogeneity.data.tasks import tasks
from ffn_heterogeneity.evaluate import answer_metrics as metrics

CB = ("entailment", "contradiction", "neutral")


def test_every_metric_a_task_names_exists():
    named = {name for task in tasks().values() for name in task.metrics}
    assert named == set(metrics.METRICS)
    assert all(task.metrics for name, task in tasks().items() if name.startswith("superglue_"))


# ---- classes


@pytest.mark.parametrize("seed", range(5))
def test_classes_against_scikit_learn(seed):
    random = np.random.default_rng(seed)
    gold = [CB[i] for i in random.integers(0, 3, 40)]
    said = [CB[i] for i in random.integers(0, 3, 40)]
    said[3] = "maybe"  # no label
    scores = metrics.cb([f" {word}\n" for word in said], gold)
    macro = sklearn.metrics.f1_score(gold, said, labels=CB, average="macro", zero_division=0)
    assert scores["macro_f1"] == pytest.approx(macro, abs=1e-12)
    assert scores["accuracy"] == pytest.approx(
        sklearn.metrics.accuracy_score(gold, said), abs=1e-12
    )


def test_macro_f1_counts_absent_classes():
    # entailment: TP 1, FP 1, FN 0 -> 2/3; contradiction: FN 1 -> 0; neutral in neither -> 0.
    scores = metrics.cb(["entailment", "entailment"], ["entailment", "contradiction"])
    assert scores == {"macro_f1": pytest.approx(2 / 9), "accuracy": 0.5}


@pytest.mark.parametrize("seed", range(5))
def test_multirc_against_scikit_learn(seed):
    random = np.random.default_rng(seed)
    gold, said = random.integers(0, 2, (2, 60))
    group = np.sort(random.integers(0, 12, 60))
    words, pairs = ("False", "True"), zip(gold, group, strict=True)
    references = [{"label": words[label], "group": (0, int(n))} for label, n in pairs]
    scores = metrics.multirc([words[i] for i in said], references)
    assert scores["f1_answers"] == pytest.approx(sklearn.metrics.f1_score(gold, said), abs=1e-12)
    exact = [np.array_equal(gold[group == g], said[group == g]) for g in np.unique(group)]
    assert scores["exact_questions"] == pytest.approx(np.mean(exact), abs=1e-12)


def test_multirc_takes_anything_else_for_the_wrong_word():
    references = [{"label": word, "group": 0} for word in ("True", "False", "True")]
    # Said True (wrong for "False") and False (wrong for "True"), and one right: TP 1, FP 1, FN 1.
    scores = metrics.multirc(["true", "no idea", "True "], references)
    assert scores == {"f1_answers": 0.5, "exact_questions": 0.0}


# ---- texts


def test_record_takes_the_best_answer_and_each_query_once():
    one = {"answers": ["The Blues", "Chelsea F.C."], "group": (3, 1)}
    other = {"answers": ["Diego Costa"], "group": (3, 2)}
    scores = metrics.record(["chelsea fc", "wrong", "Costa"], [one, one, other])
    # "chelsea fc" is exact; of the second query 1 word of 1 and of 2: F1 = 2/3.
    assert scores == {"exact_match": 0.5, "f1": pytest.approx((1 + 2 / 3) / 2)}


@pytest.mark.parametrize(
    "prediction, answer, f1",
    [("a b", "a b", 1.0), ("", "x", 0.0), ("x x y", "x z", 2 / 5), ("x", "y", 0.0)],
)
def test_token_f1(prediction, answer, f1):
    assert metrics.token_f1(prediction, answer) == pytest.approx(f1)


PLAIN = [("The  Cat's, an  A-team!", "cats ateam"), ("A.B. theory", "ab theory")]
PLAIN += [("an ‘odd’ one", "‘odd’ one"), ("the", "")]


@pytest.mark.parametrize("text, squad", PLAIN)
def test_normalisation(text, squad):
    assert metrics.normalize_squad(text) == squad


@pytest.mark.parametrize(
    "prediction, referent, same",
    [
        ("the fuzzy bunny", "Bunny", True),
        ("Bunny", "the fuzzy bunny", True),
        ("fuzzy cat", "fuzzy bunny", False),
        ("Bob", "Bob's hat", False),
        ("Bob's hat", "his Bob's hat", True),
        ("", "Bob", False),
        ("the", "Bob", False),
        ("MARK", "mark", True),
    ],
)
def test_wsc_match(prediction, referent, same):
    assert metrics.names_referent(prediction, referent) is same
    for label in (True, False):
        scores = metrics.wsc([prediction], [{"referent": referent, "label": label}])
        empty = not prediction.replace("the", "").strip()
        assert scores["accuracy"] == float(not empty and same is label)


# ---- others


@pytest.mark.parametrize("name", sorted(metrics.METRICS))
def test_lengths_must_agree(name):
    for predictions, references in (([], []), (["x"], []), (["x"], ["x", "y"])):
        with pytest.raises(ValueError, match=f"{len(predictions)} predictions for"):
            metrics.METRICS[name](predictions, references)


def test_superglue_is_the_mean_of_means():
    scores = {f"superglue_{name}": {"accuracy": 0.5} for name in metrics.SUPERGLUE}
    scores["superglue_cb"] = {"macro_f1": 0.2, "accuracy": 0.6}
    means = metrics.superglue(scores)
    assert means["cb"] == pytest.approx(0.4)
    assert means["superglue"] == pytest.approx((7 * 0.5 + 0.4) / 8)
    del scores["superglue_rte"]
    refused("missing: rte; not of them: none", metrics.superglue, scores)
    refused("not of them: dpr", metrics.superglue, {**scores, "dpr": {"accuracy": 1.0}})


# ---- intervals


@pytest.mark.parametrize("correct, total", [(0, 10), (10, 10), (81, 263), (1, 2), (500, 1319)])
def test_wilson_solves_its_equation(correct, total):
    """The ends are the two p with (share - p)^2 = z^2 p (1 - p) / n."""
    z, share = 1.959963984540054, correct / total
    a, b, c = 1 + z**2 / total, -(2 * share + z**2 / total), share**2
    roots = sorted(np.roots([a, b, c]).real)
    assert metrics.wilson_interval(correct, total) == pytest.approx(roots, abs=1e-9)


def test_wilson_known_case():
    # Newcombe (1998), table I: 81 of 263.
    assert metrics.wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    for total in range(1, 100):
        assert metrics.wilson_interval(0, total)[0] == 0.0
        assert metrics.wilson_interval(total, total)[1] == 1.0


@pytest.mark.parametrize("bad", [(3, 2), (-1, 4), (0, 0)])
def test_wilson_refuses(bad):
    refused(f"{bad[0]} correct of {bad[1]}", metrics.wilson_interval, *bad)
