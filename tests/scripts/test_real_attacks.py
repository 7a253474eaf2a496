"""Massive weights of SmolLM2-135M and Gemma 3 270M: found and attacked by us and by torch."""

import numpy as np
import pytest
from tiny_models import torch_model, torch_nll

from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate.lesions import _nll, resumed
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.causal_lm import RunOptions, forward
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.base import Probe
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
    """(layer, neurons by decreasing |h|) from the inputs of `down_proj` for a single bos."""
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
    massive = massive_weights(model.config, model.params)
    layer, order = found_by_torch(torch, theirs, model.config.bos_id)
    assert (massive.layer, massive.indices[:10].tolist()) == (layer, order[:10])
    print(f"{model.source}: layer {layer} (from 0), {order[:5]}, {massive.magnitudes[:5]}")
    assert massive.magnitudes[0] > 20 * np.median(massive.states[layer])


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("attack", ["zero", "retain"])
def test_perplexity_under_attack(both, torch, attack, k):
    model, theirs, rows = both
    settings = {"attack": attack, "k": k, "layer": None, "token": None}
    changed, _ = SURGERIES["attack"](model, settings)
    ours = perplexity(changed.config, changed.params, rows, progress=None)["nll"]
    layer, order = found_by_torch(torch, theirs, model.config.bos_id)
    mlp, originals = layers_of(theirs)[layer].mlp, {}
    lost = torch.isin(torch.arange(len(order)), torch.tensor(order[:k], dtype=torch.long))
    lost = lost if attack == "zero" else ~lost
    for name in ("gate_proj", "up_proj"):
        weight = getattr(mlp, name).weight.data
        originals[name] = weight.clone()
        weight[lost] = 0
    try:
        total, count = torch_nll(torch, theirs, rows)
    finally:
        for name, weight in originals.items():
            getattr(mlp, name).weight.data.copy_(weight)
    print(f"{attack} {k}: perplexity {np.exp(ours):.4f}, torch {np.exp(total / count):.4f}")
    assert abs(np.exp(ours - total / count) - 1) <= 5e-3


def test_why_gemma_with_one_neuron_is_worse_than_with_none(gemma3_gguf, shared_data):
    """The norm behind the FFN makes the one neuron's push as large on every token as on bos: where
    each token's output is divided by what the whole layer's would be, one is better than none."""
    model = load_model(gemma3_gguf)
    config, tree = model.config, unstack(model.params)
    text = (shared_data / "wikitext2" / "test.raw.txt").read_text()[:100_000]
    rows = text_windows(text, model.tokenizer, WINDOW, 2)
    scale = config.norm_offset + np.asarray(tree["layers"][0]["post_ffn_norm"]["scale"])
    seen = Probe("seen", lambda io, batch, _: (io.middle, io.ffn_output), kind="example")

    def branches(k):
        settings = {"attack": "retain", "k": k, "layer": 0, "token": None}
        params = model.params if k is None else SURGERIES["attack"](model, settings)[0].params
        batch = {"tokens": rows[:, :-1]}
        outputs = forward(config, params, batch, options=RunOptions(), probes=(seen,))
        middle, ffn = (np.asarray(x[0], np.float64) for x in outputs["probes"]["seen"])
        return middle, ffn, np.sqrt((ffn**2).mean(-1, keepdims=True) + config.norm_eps)

    def nll(middle, ffn, size):
        states = (middle + ffn / size * scale).astype(np.float32)
        rest_config, params = resumed(config, tree, states, 1)
        return float(_nll(rest_config, RunOptions(), params, rows[:, 1:], -1))

    full, one, none = (branches(k) for k in (None, 1, 0))
    by_own, by_whole, silent = nll(*one), nll(*one[:2], full[2]), nll(*none)
    print(f"one: {by_own:.3f} nats; divided as the whole: {by_whole:.3f}; none: {silent:.3f}")
    assert np.median(one[2][:, 1:]) < 0.01 * one[2][0, 0, 0]  # it is almost 0 after bos
    assert by_whole < silent < by_own - 1
