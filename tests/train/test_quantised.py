"""Adapters on a quantised base, which is unchanged, saved and read; exports are folded."""

import json

import numpy as np
import pytest
from tiny_models import TEXT, WIDE, config_of, our_logits, save_tiny
from tiny_runs import refused, small_run

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the quantised model at the start, the run's directory and results)."""
    root = tmp_path_factory.mktemp("qlora")
    (root / "text.txt").write_text(TEXT)
    model = save_tiny(root / "tiny", WIDE)
    settings = small_run(root / "text.txt", steps=4, eval__every=2, checkpoint__every=2)
    settings |= {"lora__rank": 3, "losses__nucl__weight": 0.01}
    config = config_of("nucl_finetune", f"{model},text,lora,nf4", **settings)
    results = training.run(config, root / "run")
    before, _ = SURGERIES["nf4"](load_model(model), {"targets": "attention/|ffn/"})
    return before, root / "run", results


def test_codes_stay_and_adapters_alone_are_checkpointed(trained):
    before, run, results = trained
    before, after = (flatten(unstack(x.params)) for x in (before, load_model(run / "model")))
    added = {path.split("/")[-1] for path in set(after) - set(before)}
    assert added == {"lora_a", "lora_b", "lora_scale"}
    for path, leaf in before.items():
        assert np.asarray(leaf).tobytes() == after[path].tobytes(), path
    assert after["layers/2/ffn/down/nf4_codes"].dtype == np.uint8
    assert "layers/2/ffn/down/kernel" not in after
    assert results["final"]["validation/nll"] < results["first"]["validation/nll"]
    record = json.loads((run / "checkpoints/4/info/metadata").read_text())
    names = {name.split(".")[-1] for name in record["tree"] if "params" in name}
    assert names == {"lora_a", "lora_b"}


def test_folded_it_is_a_plain_model_of_the_same_function(trained, torch, tmp_path):
    import transformers

    quantised = load_model(trained[1] / "model")
    plain, _ = SURGERIES["fold"](quantised)
    left = {path.split("/")[-1] for path in flatten(plain.params)}
    assert left == {"kernel", "embedding", "scale"}
    tokens = np.arange(2, 30)[None]
    ours = our_logits(quantised.config, quantised.params, tokens)
    folded = our_logits(plain.config, plain.params, tokens)
    assert np.linalg.norm(folded - ours) <= 1e-5 * np.linalg.norm(ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained[1] / "model")
    with torch.no_grad():
        their_logits = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.linalg.norm(their_logits - ours) <= 1e-5 * np.linalg.norm(ours)


def test_a_quantised_base_does_not_train_by_itself(trained, tmp_path):
    """Norms and embedding do not train either, unless a config names them."""
    _, run, _ = trained
    settings = small_run(run.parent / "text.txt", steps=1)
    config = config_of("nucl_finetune", f"{run.parent / 'tiny'},text,nf4", **settings)
    for freeze, only, words in (
        ((), (), "/nf4_codes: the base is quantized, its kernels"),
        (("embed/",), (), "/nf4_codes: the base is quantized, its kernels"),
        ((), ("nf4_codes",), "nf4_codes.* decides nothing"),
    ):
        config.freeze, config.train_only = freeze, only
        refused(words, training.run, config, tmp_path / "run")
    config.train_only = ("norm/scale",)
    with config.unlocked():
        del config.losses["nucl"]
    assert training.run(config, tmp_path / "run")["trainable_parameters"] == 9 * WIDE.d_model


def test_a_saved_adapted_model_goes_on(trained, tmp_path):
    _, run, _ = trained
    small = small_run(run.parent / "text.txt", steps=1)
    config = config_of("nucl_finetune", f"{run / 'model'},text", **small)
    assert training.run(config, tmp_path / "run")["trainable_parameters"] > 0


def test_what_cannot_act_refuses_by_name(trained):
    quantised = load_model(trained[1] / "model")
    codes = "holds codes or factors in place of kernels: fold"
    for name, settings, words in (
        ("prune", {"criterion": "entropy", "ratio": 0.25}, codes),
        ("attack", {"attack": "zero", "k": 2, "layer": None, "token": None}, codes),
        ("nf4", {"targets": "ffn/"}, "has adapters: quantise before"),
        ("lora", {"rank": 0, "alpha": 1.0, "targets": "ffn/"}, "rank=0"),
    ):
        refused(words, SURGERIES[name], quantised, settings)
