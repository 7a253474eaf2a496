"""The analysis of single neurons equals the model with that neuron zeroed."""

import json

import numpy as np
import pytest
from tiny_models import config_of, random_params, save_tiny, tiny_of
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.evaluate import lesions
from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.evaluate.lesions import draw_neurons
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.criteria import layer_scores

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(
    scope="module", params=[pytest.param("llama", marks=pytest.mark.slow), "gemma2", "gpt2"]
)
def case(request, tmp_path_factory):
    root, config = tmp_path_factory.mktemp(request.param), tiny_of(request.param, 4)
    params = random_params(config, dtype=np.float32)
    save_tiny(root / "model", config, params)
    rows = np.random.default_rng(0).integers(2, config.vocab_size, (2, 13))
    np.save(root / "rows.npy", rows)
    settings = {"model": str(root / "model"), "token_ids": str(root / "rows.npy"), "others": 5}
    results = evaluation.run(config_of("analyze", "lesions", **settings), root)
    return config, params, rows, results, root, settings


def test_every_damage_is_that_of_the_whole_model(case):
    config, params, rows, results, *_ = case
    layer = massive_weights(config, params).layer
    assert results["layer_index"] == layer
    intact_nll = perplexity(config, params, rows, progress=None)["nll"]
    assert results["nll"] == pytest.approx(intact_nll, rel=1e-6)
    width, neurons = config.layers[layer].ffn_width, results["neurons"]
    assert len(neurons) == width + 5
    assert sum(row["layer"] == layer for row in neurons) == width
    assert max(abs(row["damage"]) for row in neurons) > 1e-4
    for row in [*neurons[:3], *neurons[-5:]]:
        tree = unstack(random_params(config, dtype=np.float32))
        tree["layers"][row["layer"]]["ffn"]["down"]["kernel"][row["neuron"]] = 0
        nll = perplexity(config, restack(config, tree), rows, progress=None)["nll"]
        assert row["damage"] == pytest.approx(nll - intact_nll, abs=2e-6)
        scores = layer_scores("entropy", tree["layers"][row["layer"]]["ffn"], layer=0)
        # The zeroed row has the first rank; the others keep their order.
        intact = layer_scores("entropy", unstack(params)["layers"][row["layer"]]["ffn"], layer=0)
        below = (intact < intact[row["neuron"]]).sum()
        assert row["entropy_rank"] == pytest.approx(below / (len(scores) - 1))


def test_a_batch_is_as_large_as_asked(case):
    *_, results, root, settings = case
    config = config_of("analyze", "lesions", batch_size=1, **settings)
    config.others = 0
    seen = {(x["layer"], x["neuron"]): x["damage"] for x in results["neurons"]}
    sizes = []
    with pytest.MonkeyPatch.context() as patched:
        real = lesions._nll
        patched.setattr(lesions, "_nll", lambda *a: (sizes.append(len(a[3])), real(*a))[1])
        neurons = evaluation.run(config, root / "one")["neurons"]
    assert {*sizes} == {1} and len(neurons) == len(seen) - 5
    for row in neurons:
        assert row["damage"] == pytest.approx(seen[row["layer"], row["neuron"]], abs=2e-6)


def test_it_goes_on(case):
    """Complete lines are not computed again; an incomplete line is."""
    *_, results, root, settings = case
    lines = (root / "metrics.jsonl").read_text().splitlines(keepends=True)
    changed = json.loads(lines[1]) | {"nll": 99.0}
    again = root / "again"
    again.mkdir()
    (again / "metrics.jsonl").write_text(lines[0] + json.dumps(changed) + "\n" + lines[2][:9])
    for _ in range(2):
        neurons = evaluation.run(config_of("analyze", "lesions", **settings), again)["neurons"]
        assert neurons[0]["damage"] == pytest.approx(99.0 - results["nll"])
        assert neurons[1:] == results["neurons"][1:]
    assert (again / "lesions.png").read_bytes().startswith(b"\x89PNG")


def test_each_analysis_measures_its_own_model(case, tmp_path):
    """From Python a directory may hold another model's numbers."""
    config, params, _, results, root, settings = case
    given = {"token_ids": settings["token_ids"], "others": 0}
    other = Model(config, random_params(config, 7), None, "other")
    fh.analyze(other, "lesions", tmp_path / "w", **given)
    made = fh.analyze(Model(config, params, None, "this"), "lesions", tmp_path / "w", **given)
    assert made["nll"] == pytest.approx(results["nll"], rel=1e-6)
    assert json.loads((tmp_path / "w" / "results.json").read_text())["nll"] == made["nll"]


def test_ids_of_another_model_are_refused(case, tmp_path):
    config, *_, settings = case
    np.save(tmp_path / "rows.npy", np.full((1, 8), config.vocab_size))
    config = config_of("analyze", "lesions", **settings | {"token_ids": str(tmp_path / "rows.npy")})
    refused("outside the vocabulary", evaluation.run, config, tmp_path / "w")


def test_a_damage_that_is_no_number_is_kept(case):
    *_, results, root, settings = case
    first, second, *_ = (root / "metrics.jsonl").read_text().splitlines(keepends=True)
    changed = json.loads(second) | {"nll": "nan"}
    (root / "nan").mkdir()
    (root / "nan" / "metrics.jsonl").write_text(first + json.dumps(changed) + "\n")
    neurons = evaluation.run(config_of("analyze", "lesions", **settings), root / "nan")["neurons"]
    assert np.isnan(neurons[0]["damage"]) and neurons[1:] == results["neurons"][1:]


def test_the_others_are_drawn_from_all_other_layers():
    config = tiny_of("llama", 4)
    chosen = draw_neurons(config, 1, 20, seed=3)
    own = [i for layer, i in chosen if layer == 1]
    assert own == [-1, *range(config.ffn_widths[1])]
    rest = [pair for pair in chosen if pair[0] != 1 and pair[1] >= 0]
    assert len(set(rest)) == 20 and {layer for layer, _ in rest} == {0, 2, 3}
    assert draw_neurons(config, 1, 20, seed=4) != chosen
    with pytest.raises(ValueError, match="others=-1"):
        own = {"model": "x", "token_ids": __file__, "others": -1}
        evaluation.check_config(config_of("analyze", "lesions", **own))
