"""The analysis of massive activations: numbers equal the model's, rows are tokens."""

import numpy as np
import pytest
from tiny_models import LLAMA, config_of, random_params, save_tiny

from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.probes.massive import STATES
from ffn_heterogeneity.surgery.attack import massive_weights

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


def test_the_analysis(directory, tmp_path, capsys):
    config = config_of("analyze", "massive", model=str(directory), sentence="ab cd")
    results = evaluation.run(config, tmp_path)
    massive = massive_weights(LLAMA, random_params(LLAMA))
    assert results["layer_index"] == massive.layer == results["layer"] - 1
    assert results["indices"] == massive.indices.tolist()[:32]
    for layer, row in enumerate(results["layers"]):
        assert list(row) == list(STATES)
        states = massive.states[layer]
        np.testing.assert_allclose(row["intermediate"]["top"], -np.sort(-states)[:3], rtol=1e-5)
        np.testing.assert_allclose(row["intermediate"]["median"], np.median(states), rtol=1e-5)
        following = results["layers"][layer + 1]["h_in"] if layer + 1 < 4 else row["h_out"]
        np.testing.assert_allclose(row["h_out"]["top"], following["top"], rtol=1e-6)
    places = {name: [row["token"] for row in rows] for name, rows in results["bos"].items()}
    alone = places["none"]
    assert len(alone) == 5 and places["first"] == ["<s>", *alone]
    assert places["middle"].index("<s>") == 2 and places["last"] == [*alone, "<s>"]
    # A token does not see what comes after it.
    for one, other in zip(results["bos"]["none"], results["bos"]["last"], strict=False):
        np.testing.assert_allclose(one["top"], other["top"], rtol=1e-5)
    assert len(results["sinks"]) == 4 and all(0 < share < 1 for share in results["sinks"])
    assert f"massive layer {results['layer']} (from 1)" in capsys.readouterr().out
    figures = {path.name for path in tmp_path.glob("*.png")}
    assert figures == {"massive_depth.png", "massive_states.png"}


def test_another_layer_and_token(directory, tmp_path):
    changes = {"model": str(directory), "layer": 3, "token": 7}
    results = evaluation.run(config_of("analyze", "massive", **changes), tmp_path)
    assert (results["layer"], results["token"]) == (4, 7)
    with pytest.raises(ValueError, match="layer=4: the model has layers 0 to 3"):
        evaluation.run(config_of("analyze", "massive", **changes | {"layer": 4}), tmp_path)
