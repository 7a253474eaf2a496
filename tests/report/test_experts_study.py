"""docs/studies/experts.py on runs with known numbers: the seed is the unit, draws are averaged."""

import json

import numpy as np
import pytest
from tiny_models import REPOSITORY

from ffn_heterogeneity import papers
from ffn_heterogeneity.report.paper import draw_all, gather
from ffn_heterogeneity.report.stats import student

# Method -> (stages' first, its settings, NLL after recovery of models 0, 1 and 2; of draws).
RUNS = {
    "whole": ("before", {}, [3.0, 3.1, 3.2]),
    "rule=reap": ("remove", {"rule": "reap", "ratio": 0.5, "calibration": "t"}, [3.3, 3.4, 3.6]),
    "own": ("remove", {"rule": "reap", "ratio": 0.5, "calibration": "own"}, [3.4, 3.5, 3.7]),
    "top_1": (
        "remove",
        {"rule": "reap", "ratio": 0.5, "calibration": "t", "top_k": 1},
        [3.8, 3.9, 4.0],
    ),
    "draw0": ("remove", {"rule": "random", "ratio": 0.5, "seed": 0}, [4.0, 4.2, 4.4]),
    "draw1": ("remove", {"rule": "random", "ratio": 0.5, "seed": 1}, [4.4, 4.6, 5.0]),
    "m_smoe": ("merge", {"method": "m_smoe", "ratio": 0.5, "calibration": "t"}, [3.9, 3.9, 3.9]),
    "resmoe": ("merge", {"method": "resmoe", "share": 0.375, "ratio": 0.5}, [3.5, 3.5, 3.6]),
    "fuse": ("fuse", {"method": "fusion", "ratio": 0.5}, [3.3, 3.5, 3.4]),
    "prune": ("prune", {"criterion": "entropy", "ratio": 0.75}, [5.0, 5.1, 5.2]),
}
DEFAULTS = {
    "remove": {"rule": "reap", "ratio": 0.5, "top_k": None, "calibration": "own", "seed": 0},
    "merge": {"method": "m_smoe", "ratio": 0.5, "share": 0.375, "calibration": "own"},
    "fuse": {"method": "fusion", "ratio": 0.5},
    "prune": {"criterion": "entropy", "ratio": 0.5},
}


def write(path, first, settings, seed, after):
    stages = [first, "before", "recover", "after"] if first != "before" else ["before", "recover"]
    stages += ["after"] * (first == "before")
    config = {"stages": stages, "model": f"runs/moe_{seed}/model", "seeds": []}
    config |= {name: dict(values) for name, values in DEFAULTS.items()}
    if first in config:
        config[first] |= settings
    config["recover"] = {"kind": "train", "base": f"nucl_finetune:runs/moe_{seed}/model,tokens"}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    for i, stage in enumerate(stages):
        if stage in ("before", "after"):
            nll = after + 0.5 * (stage == "before")
            texts = {"code": {"nll": nll, "accuracy": 0.5}, "web": {"nll": nll, "accuracy": 0.25}}
            results = {"nll": nll, "perplexity": 9.0, "accuracy": 0.125, "texts": texts}
            (path / f"{i:02d}_{stage}").mkdir()
            (path / f"{i:02d}_{stage}/results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    for name, (first, settings, losses) in RUNS.items():
        for seed, nll in enumerate(losses):
            write(root / f"half_{seed}" / name, first, settings, seed, nll)
    study = papers.load(str(REPOSITORY / "docs/studies/experts.py"))
    frames = gather(study, [str(root)])[1]
    return {one.key: one for one in draw_all(study, frames)}


def table(one):
    """{(method, kept, calibration, active): {column: cell}}."""
    header = list(one.header)
    return {tuple(row[:4]): dict(zip(header[4:], row[4:], strict=True)) for row in one.rows}


def test_the_unit_is_the_model_and_draws_count_as_their_mean(drawn):
    rows = table(drawn["equal_parameters"])
    own = rows["random experts", "50%", "-", "100%"]
    means = np.mean([RUNS["draw0"][2], RUNS["draw1"][2]], axis=0)
    assert own["NLL after 100 steps"] == student(list(means))
    assert own["NLL before recovery"] == pytest.approx(student(list(means + 0.5)))
    assert [own[f"model {i}"] for i in range(3)] == pytest.approx(list(means))
    assert own["Δ vs whole"] == pytest.approx(student(list(means - RUNS["whole"][2])))
    assert rows["REAP", "50%", "in-domain", "100%"]["accuracy"].mean == 0.125
    assert ("REAP", "50%", "self-generated", "100%") in rows
    assert ("ResMoE", "50%", "-", "100%") in rows and ("M-SMoE", "50%", "in-domain", "100%") in rows
    assert ("neurons by entropy", "25%", "-", "25%") in rows
    assert ("REAP", "50%", "in-domain", "50%") not in rows


def test_the_other_tables_and_the_claims(drawn):
    flops = table(drawn["equal_flops"])
    assert set(flops) == {
        ("whole", "100%", "-", "100%"),
        ("REAP", "50%", "in-domain", "50%"),
        ("fusion", "50%", "-", "50%"),
    }
    kinds = table(drawn["kinds"])["fusion", "50%", "-", "50%"]
    assert (kinds["code"].mean, kinds["web"].mean) == (0.5, 0.25)
    verdicts = {}
    for statement, _, when, measured, verdict in drawn["claims"].rows:
        if when == "after 100 steps":
            verdicts[statement] = (measured, verdict)
    measured, verdict = verdicts["removing experts costs less than merging them"]
    assert verdict == "holds" and measured.startswith(
        "REAP - M-SMoE at 50% -0.4667 [-0.8461, -0.08"
    )
    assert verdicts["fusion of neurons costs less than merging experts"][1] == "holds"
    assert verdicts["removing experts costs less than narrowing them"][1] == "open"


def test_trainings_alone_are_the_mean_over_layers_and_seeds(tmp_path):
    """At the last evaluation; dense models, and mixtures by the weight of their balance loss."""
    for name, seed, experts, loads in (("a", 0, 8, [2, 4]), ("b", 1, 8, [3, 7]), ("d", 0, None, 0)):
        shape = {"layers": 2, "d_model": 8} | ({"experts": experts} if experts else {})
        balance = {"load_balance": {"weight": 0.01}} if experts else {"jreg": {"weight": 0.0}}
        config = {"shape": shape, "losses": balance, "seed": seed, "steps": 9}
        steps = [{"step": i, "validation/nll": 5.0 - i - seed} for i in (0, 9)]
        if experts:
            steps = [row | {"validation/load_balance/max_load": loads} for row in steps]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
        (tmp_path / name / "results.json").write_text(json.dumps({"steps": 9}))
    study = papers.load(str(REPOSITORY / "docs/studies/experts.py"))
    drawn = {one.key: one for one in draw_all(study, gather(study, [str(tmp_path)])[1])}
    header, rows = drawn["training"].header, drawn["training"].rows
    rows = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    mixture, dense = rows["mixture, balance weight 0.01"], rows["dense"]
    assert mixture["validation NLL"].mean == -4.5 and mixture["largest load / mean"].mean == 4
    assert dense["validation NLL"] == -4 and dense["largest load / mean"] is None
    points = [row for row in drawn["loads"].rows if row[0] == "layer 2" and row[3] == 1]
    assert [row[-1] for row in points] == [7, 7]
    assert not drawn["equal_parameters"].rows and not drawn["kinds"].rows
