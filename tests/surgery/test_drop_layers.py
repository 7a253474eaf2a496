"""Whole blocks removed by their displacement."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from test_states import model_of, rows_of
from tiny_models import (
    batch_of,
    our_logits,
    random_params,
    structured,
    tiny_of,
    torch_logits,
    torch_model,
)
from tiny_runs import refused

from ffn_heterogeneity.heads import with_head
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.calibration import write_rows
from ffn_heterogeneity.tree import flatten

DROP = SURGERIES["drop_layers"]
LLAMA = dataclasses.replace(tiny_of("llama"), vocab_size=258)


def streams_of(config, params, tokens):
    """[the residual stream before each block and after the last]."""
    streams = [causal_lm.embed(config, params, tokens, RunOptions())]
    for i, leaves in enumerate(unstack(params)["layers"]):
        streams.append(causal_lm.one_layer(config, i, leaves, streams[-1], {"tokens": tokens})[0])
    return streams


def without_output(config, params, skipped):
    """The parameters with all that these blocks add to the residual stream set to 0."""
    tree = unstack(jax.tree.map(np.array, params))
    for i in skipped:
        for path, leaf in flatten(tree["layers"][i]).items():
            if re.match(r"(attention/out|ffn/down)/(kernel|bias|lora_b)", path):
                leaf[...] = 0
    return restack(config, tree)


def in_float64(tokens, *models):
    """The last hidden states of (config, parameters)."""
    options = RunOptions(compute_dtype=np.float64)
    with jax.enable_x64(True):
        wide = [(c, jax.tree.map(lambda x: np.asarray(x, np.float64), p)) for c, p in models]
        made = [causal_lm.forward(c, p, {"tokens": tokens}, options=options) for c, p in wide]
        return [np.asarray(one["hidden"]) for one in made]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_neox", "mixtral"])
def test_it_is_to_skip_those_blocks(family):
    config = LLAMA if family == "llama" else tiny_of(family)
    params = random_params(config)
    if family != "mixtral":
        params = structured(config, params)
    tokens = batch_of(config.vocab_size)["tokens"]
    smaller, report = DROP(model_of(config, params), {"layers": "1,3-4"})
    assert report["dropped"] == [1, 3, 4] and smaller.config.n_layers == 3
    kept = [config.layers[i] for i in (0, 2, 5)]
    assert list(smaller.config.layers) == kept, "with their windows and widths"
    wanted, ours = in_float64(
        tokens,
        (config, without_output(config, params, (1, 3, 4))),
        (smaller.config, smaller.params),
    )
    np.testing.assert_allclose(ours, wanted, atol=1e-6)
    names = {path.split("/", 2)[-1] for path in flatten(unstack(params)["layers"][0])}
    ours = {path.split("/", 2)[-1] for path in flatten(unstack(smaller.params)["layers"][0])}
    assert ours == names, "adapters and masks stay"


def test_those_that_move_the_stream_least_go(tmp_path):
    """Against displacements in float64 from the streams of single rows."""
    params = jax.tree.map(np.array, random_params(LLAMA))
    for name in ("attention/out", "ffn/down"):  # blocks 2 and 4 do little
        for path, leaf in flatten(params["stack"]).items():
            if path.endswith(f"{name}/kernel"):
                leaf[[2, 4]] *= 0.05
    rows, moved, tokens = rows_of(LLAMA), 0.0, 0
    for row in rows:
        streams = np.stack(streams_of(LLAMA, params, row[None])).astype(np.float64)[:, 0]
        before, after = streams[:-1], streams[1:]
        norms = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
        moved += (1 - (before * after).sum(-1) / norms).sum(-1) / 2
        tokens += len(row)
    write_rows(tmp_path / "own.jsonl", rows)
    asked = {"blocks": 2, "calibration": str(tmp_path / "own.jsonl")}
    _, report = DROP(model_of(LLAMA, params), asked)
    np.testing.assert_allclose(report["psi"], moved / tokens, rtol=1e-4, atol=1e-7)
    assert report["dropped"] == sorted(np.argsort(moved)[:2].tolist()) == [2, 4]


def test_own_text_is_the_default_and_is_kept():
    _, report = DROP(model_of(LLAMA), {"calibration_tokens": 600, "seed": 2})
    assert sum(len(row) - 1 for row in report["own_rows"]) == 600
    assert len(report["dropped"]) == 1 and report["parameters_removed_percent"] > 0


def test_on_shapes_the_last_are_taken(tmp_path):
    model = model_of(LLAMA)

    def on_shapes(params):
        return DROP(dataclasses.replace(model, params=params), {"blocks": 2})[0].params

    shapes = jax.eval_shape(on_shapes, model.params)
    named, _ = DROP(model, {"layers": "4,5"})
    assert jax.tree.map(np.shape, shapes) == jax.tree.map(np.shape, named.params)
    assert "taken to be the last" in DROP.assumed({"blocks": 2}) and not DROP.assumed(
        {"layers": "4"}
    )


def test_heads_that_read_the_last_state_stay():
    model = model_of(LLAMA)
    for pooling, words in (("last", None), ("p32", "reads every block")):
        head = HeadConfig.of("classification", {"outputs": 2, "pooling": pooling})
        config, params = with_head(LLAMA, model.params, head, jax.random.key(0))
        headed = dataclasses.replace(model, config=config, params=params)
        if words:
            refused(words, DROP, headed, {"layers": "1"})
        else:
            smaller, _ = DROP(headed, {"layers": "1"})
            assert np.array_equal(
                smaller.params["task_head"]["out"]["kernel"], params["task_head"]["out"]["kernel"]
            )


def test_what_is_wrong_is_said():
    model = model_of(LLAMA)
    refused("6 of 6 blocks would go", DROP, model, {"layers": "all"})
    refused("layer 6 is out of range", DROP, model, {"layers": "6"})
    refused("blocks=0", DROP, model, {"blocks": 0})
    refused("needs calibration text", DROP, model, {"calibration": ""})


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_transformers_loads_it(torch, family, tmp_path):
    config = tiny_of(family)
    smaller, _ = DROP(model_of(config), {"layers": "0,3"})
    save_pretrained(smaller.config, smaller.params, tmp_path / "model")
    tokens = batch_of(config.vocab_size)["tokens"]
    theirs = torch_logits(torch, torch_model(torch, tmp_path / "model"), tokens)
    np.testing.assert_allclose(
        our_logits(smaller.config, smaller.params, tokens), theirs, atol=1e-4
    )
