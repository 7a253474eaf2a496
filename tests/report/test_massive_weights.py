"""The report on massive weights: attacks, the analysis, removals that keep neurons."""

from __future__ import annotations

import numpy as np
import pytest
from builders import adapted, attack, claim, lines, massive
from scipy.stats import ttest_1samp
from tiny_models import REPOSITORY

import ffn_heterogeneity as fh
from ffn_heterogeneity import papers
from ffn_heterogeneity.report import stats
from ffn_heterogeneity.report.frame import plain
from ffn_heterogeneity.report.paper import with_evaluations, write_paper
from ffn_heterogeneity.report.stats import student

STUDY = str(REPOSITORY / "docs/studies/massive_removal.py")


def test_attacks(report, tmp_path):
    right, wrong, text = [1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0], "data/c4/a.txt"
    runs = [
        attack(tmp_path / "without_tasks", "zero", 0, 20.0),
        attack(tmp_path / "none", "zero", 0, 20.0, answers=right),
        attack(tmp_path / "zero", "zero", 5, 90.0, windows=(4.5, 4.9), answers=wrong),
        attack(tmp_path / "retain", "retain", 5, 30.0, windows=(3.4, 3.5)),
        attack(tmp_path / "nothing", "retain", 0, 200.0, windows=(5.2, 5.4)),
        attack(tmp_path / "c4", "zero", 5, 120.0, windows=(4.7, 4.8), text=text),
        attack(tmp_path / "three", "zero", 3, 80.0, windows=(4.4, 4.3)),
        attack(tmp_path / "layer", "zero", 3, 81.0, layer=1),
    ]
    tables = report("massive_weights", runs)
    place = "here: windows of 512"
    rows = {row["Attack"]: row for row in tables["table_1"] if row["from"] == place}
    assert rows["-"]["WikiText"] == "20.0" and float(rows["-"]["PIQA"]) == pytest.approx(500 / 6)
    assert (rows["top-5 zeroing"]["WikiText"], rows["top-5 zeroing"]["C4"]) == ("90.0", "120.0")
    assert rows["top-5 zeroing"]["Avg. (perplexity)"] == "-"
    ours = {(r["attack"], r["k"], r["text"], r["from"]): r for r in tables["attacks"]}
    assert ours["zero", "3", "wikitext", "here, layer 1, windows of 512"]["perplexity"] == "81.0"
    place = "here, windows of 512"
    zeroed = ours["zero", "5", "wikitext", place]
    assert float(zeroed["Δ NLL vs unattacked"]) == pytest.approx((1.5 + 1.7) / 2)
    assert float(zeroed["Δ PIQA vs unattacked"]) == pytest.approx(-50)
    nothing_kept = ours["retain", "0", "wikitext", place]
    assert float(nothing_kept["Δ NLL vs unattacked"]) == pytest.approx((2.2 + 2.2) / 2)
    assert ours["zero", "5", "c4", place]["Δ NLL vs unattacked"] == "-"
    assert "bootstrap n=2" in tables["text"] and "bootstrap n=6" in tables["text"]
    points = lines(tables, "perplexity_by_k")
    assert points["small", "zero, wikitext, windows of 512", "-"] == [(0, 20), (3, 80), (5, 90)]
    assert claim(tables, "top-5 zeroing does more harm") == ("wikitext 1.25", "holds")
    assert claim(tables, "zeroing three already does harm") == ("wikitext 1.25", "holds")


def test_the_analysis_against_table_7(report, tmp_path):
    names = {"Meta-Llama-3-8B": (2427, 198, 6412, 12657, 591), "Mistral-7B-v0.1": (7310, 8572, 1)}
    runs = [massive(tmp_path / name, f"hub/{name}", 2, own) for name, own in names.items()]
    tables = report("massive_weights", runs)
    rows = {row["Models"]: row for row in tables["table_7"] if row["from"] == "here"}
    own = rows["Meta-Llama-3-8B"]
    assert (own["Layer"], own["Indices"]) == ("2", "2427, 198, 6412, 12657, 591")
    verdicts = [claim(tables, "the massive layer and its five", name)[1] for name in names]
    assert verdicts == ["holds", "does not hold"]


@pytest.mark.parametrize(("expert", "said"), [
    (4, "2 (expert 4); 7310, 7530, 11981, 7492, 3178, experts from 1"),
    (5, "2 (expert 4); 7310, 7530, 11981, 7492, 3178, experts from 0"),
    (3, None),
])  # fmt: skip
def test_mixtral_against_table_7(report, tmp_path, expert, said):
    """The paper's "2 (expert 4)" may be counted from 0 or from 1."""
    own, name = (7310, 7530, 11981, 7492, 3178), "Mixtral-8x7B-v0.1"
    place = {"expert": expert, "expert_index": expert - 1}
    tables = report("massive_weights", [massive(tmp_path / name, f"hub/{name}", 2, own, **place)])
    rows = {row["Models"]: row for row in tables["table_7"] if row["from"] == "here"}
    assert rows[name]["Layer"] == f"2 (expert {expert} from 1, {expert - 1} from 0)"
    measured, verdict = claim(tables, "the massive layer and its five", name)
    assert verdict == ("holds" if said else "does not hold")
    assert measured.endswith(said or "2 (expert 3); 7310, 7530, 11981, 7492, 3178, experts from 1")


def test_tasks_of_an_attacked_adapter_are_not_its_own(tmp_path):
    runs = [adapted(tmp_path / "lora")]
    for k, answers in ((0, [1, 1, 1, 0]), (3, [0, 1, 0, 0])):
        own = {"model": f"{runs[0]}/model", "answers": answers}
        runs.append(attack(tmp_path / f"lora_{k}", "zero", k, 9.0, **own))
    rows = with_evaluations(plain(fh.results(*runs)))
    own = rows[(rows["run"] == runs[0]) & rows.task.notna()]
    assert [by.rpartition("/")[2] for by in own["by"]] == ["lora_0"] and set(own.value) == {0.75}


def test_paired_intervals_against_a_plain_loop():
    rng = np.random.default_rng(3)
    own, base = rng.normal(1.0, 0.2, 40), rng.normal(2.0, 0.2, 40)
    found = stats.bootstrap(own - base)
    draws = np.random.default_rng(0).integers(40, size=(10_000, 40))
    means = [(own - base)[draw].mean() for draw in draws]
    np.testing.assert_allclose((found.low, found.high), np.percentile(means, [2.5, 97.5]))


def test_a_share_has_the_interval_of_its_test():
    """The ends are where a t test of (base - own) - r (base - goal) has p = 0.05."""
    rng = np.random.default_rng(3)
    own, base = rng.normal(1.0, 0.2, 20), rng.normal(2.0, 0.4, 20)
    share = papers.load(STUDY).functions["share"]
    found = share(dict(enumerate(own)), dict(enumerate(base)), {None: 0.5})
    assert found.mean == pytest.approx((base - own).mean() / (base - 0.5).mean())
    for r in (found.low, found.high):
        assert ttest_1samp(base - own - r * (base - 0.5), 0).pvalue == pytest.approx(0.05)
    # One seed of twenty gains: every draw is 0 or more, but it is not significantly different from
    # 0.
    gain = np.eye(20)[0]
    some = share(dict(enumerate(base - gain)), dict(enumerate(base)), {None: 0.5})
    assert some.low < 0 < some.mean < some.high
    # Randomness only in the goal; a goal that is not significantly different from the base.
    lost = share({None: 3.0}, {None: 1.0}, dict(enumerate(base)))
    interval = student(base - 1)
    assert (lost.low, lost.high) == pytest.approx((2 / interval.high, 2 / interval.low))
    wide = share({None: 3.0}, {None: 2.0}, dict(enumerate(base)))
    assert (wide.low, wide.high) == (-np.inf, np.inf)


def test_a_damaged_analysis_is_named(tmp_path):
    massive(tmp_path / "a", "m")
    (tmp_path / "a" / "results.json").write_text('{"layer": 2}')
    with pytest.raises(ValueError, match=r"a/results.json is no analysis"):
        write_paper(papers.load("massive_weights"), [str(tmp_path / "a")], tmp_path / "out")
