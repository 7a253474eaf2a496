"""Stages hand their model on, are skipped once complete, and refuse another run's folder."""

import json

import pytest

from ffn_heterogeneity.train.stages import Stage, run_stages
from ffn_heterogeneity.train.workdir import WorkdirError


def save(model, directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "m.json").write_text(json.dumps(model))


def load(directory):
    return json.loads((directory / "m.json").read_text())


def make(calls, fail=()):
    def stage(kind, name):
        def function(model, directory):
            calls.append((name, list(model)))
            if name in fail:
                raise KeyboardInterrupt
            return ["lost"] if kind == "evaluate" else [*model, name], {"seen": len(model)}

        return Stage(kind, name, function)

    kinds = [("surgery", "prune"), ("train", "recover"), ("evaluate", "score"), ("train", "more")]
    return [stage(*pair) for pair in kinds]


def test_each_stage_reads_the_last_ones_model(tmp_path):
    calls = []
    model, results = run_stages(make(calls), ["m"], tmp_path, save=save, load=load)
    assert model == ["m", "prune", "recover", "more"]
    assert [seen for _, seen in calls] == [model[:1], model[:2], model[:3], model[:3]]
    assert results["score"] == {"seen": 3}


@pytest.mark.parametrize("failing", ["recover", "score", "more"])
def test_completed_stages_are_skipped(tmp_path, failing):
    with pytest.raises(KeyboardInterrupt):
        run_stages(make([], {failing}), ["m"], tmp_path, save=save, load=load)
    calls = []
    model, results = run_stages(make(calls), ["m"], tmp_path, save=save, load=load)
    names = ["prune", "recover", "score", "more"]
    assert [name for name, _ in calls] == names[names.index(failing) :]
    assert model == ["m", "prune", "recover", "more"]
    assert results["prune"] == {"seen": 1} and results["more"] == {"seen": 3}
    calls.clear()
    assert run_stages(make(calls), ["m"], tmp_path, save=save, load=load) == (model, results)
    assert calls == []


def test_refusals(tmp_path):
    stages = make([])
    run_stages(stages, ["m"], tmp_path, save=save, load=load)
    with pytest.raises(WorkdirError, match="'01_recover', which is not one of"):
        run_stages([stages[0], stages[2]], ["m"], tmp_path, save=save, load=load)
    with pytest.raises(ValueError, match="two stages are named 'prune'"):
        run_stages([stages[0]] * 2, ["m"], tmp_path, save=save, load=load)
    with pytest.raises(ValueError, match="kind='prune'"):
        Stage("prune", "x", lambda model, directory: (model, {}))
