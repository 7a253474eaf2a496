"""Massive weights of SmolLM2-135M and Gemma 3 270M: found and attacked by us and by torch alone."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import torch_model, torch_nll

from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.attack import massive_weights

pytestmark = pytest.mark.slow
WINDOW, WINDOWS, KS = 512, 40, (0, 1, 2, 3, 5, 10, 30)


@pytest.fixture(scope="module", params=["smollm2_gguf", "gemma3_gguf"])
def both(request, torch, shared_data, tmp_path_factory):
    """(our model, torch's, windows with bos of WikiText-2)."""
    model = load_model(request.getfixturevalue(request.param))
    directory = tmp_path_factory.mktemp("model")
    save_pretrained(model.config, unstack(model.params), directory)
    text = (shared_data / "wikitext2" / "test.raw.txt").read_text()
    rows = text_windows(text[:400_000], model.tokenizer, WINDOW, WINDOWS)
    assert rows.shape == (WINDOWS, WINDOW + 1) and (rows[:, 0] == model.config.bos_id).all()
    return model, torch_model(torch, directory), rows


def layers_of(theirs):
    return theirs.model.layers


def found_by_torch(torch, theirs, bos):
    """(layer, neurons by falling |h|) from what `down_proj` is given when bos stands alone."""
    seen, hooks = [], []
    for layer in layers_of(theirs):
        hook = layer.mlp.down_proj.register_forward_pre_hook
        hooks.append(hook(lambda _, x: seen.append(x[0][0, 0].abs())))
    with torch.no_grad():
        theirs(torch.tensor([[bos]]))
    for hook in hooks:
        hook.remove()
    half = seen[: -(-len(seen) // 2)]
    layer = int(torch.stack([x.max() for x in half]).argmax())
    return layer, torch.argsort(-seen[layer], stable=True).tolist()


def test_the_massive_layer_is_the_same(both, torch):
    model, theirs, _ = both
    found = massive_weights(model.config, model.params)
    layer, order = found_by_torch(torch, theirs, model.config.bos_id)
    assert (found.layer, found.indices[:10].tolist()) == (layer, order[:10])
    print(f"{model.source}: layer {layer} (from 0), {order[:5]}, {found.magnitudes[:5]}")
    assert found.magnitudes[0] > 20 * np.median(found.states[layer])


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("attack", ["zero", "retain"])
def test_perplexity_under_attack(both, torch, attack, k):
    model, theirs, rows = both
    settings = {"attack": attack, "k": k, "layer": None, "token": None}
    changed, _ = SURGERIES["attack"](model, settings)
    ours = perplexity(changed.config, changed.params, rows, progress=None)["nll"]
    layer, order = found_by_torch(torch, theirs, model.config.bos_id)
    mlp, kept = layers_of(theirs)[layer].mlp, {}
    lost = torch.isin(torch.arange(len(order)), torch.tensor(order[:k], dtype=torch.long))
    lost = lost if attack == "zero" else ~lost
    for name in ("gate_proj", "up_proj"):
        weight = getattr(mlp, name).weight.data
        kept[name] = weight.clone()
        weight[lost] = 0
    try:
        total, count = torch_nll(torch, theirs, rows)
    finally:
        for name, weight in kept.items():
            getattr(mlp, name).weight.data.copy_(weight)
    print(f"{attack} {k}: perplexity {np.exp(ours):.4f}, torch {np.exp(total / count):.4f}")
    assert abs(np.exp(ours - total / count) - 1) <= 5e-3
