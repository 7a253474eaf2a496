"""Classifiers in transformers' form, and other poolings by the model card's lines of torch."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_models import random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.evaluate.classify import logits_of
from ffn_heterogeneity.heads import ROOT, make_head, with_head
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import loads_in, save_pretrained
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.families import FAMILIES
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.tree import flatten

HEADED = [name for name, family in FAMILIES.items() if family.classifier]


def predicted_logits(model: Model, batch: dict) -> np.ndarray:
    return np.asarray(logits_of(model.config, RunOptions(), model.params, batch))


def with_labels(family: str, pooling: str = "last", labels=("no", "yes", "maybe"), **changes):
    """(config, params) of a tiny model with a random head."""
    config = dataclasses.replace(tiny_of(family), vocab_size=258, **changes)
    if config.kind != "decoder":
        config = dataclasses.replace(config, pad_id=1 if config.is_encoder else 0)
    head = HeadConfig.of(
        "classification",
        {
            "pooling": pooling,
            "final_norm": "pooled",
            "outputs": max(len(labels), 1),
            "labels": list(labels),
            "task": "labels" if labels else "regression",
            "fields": [["text"]],
            "max_length": 0,
        },
    )
    config, params = with_head(config, random_params(config), head, jax.random.key(0))
    rng = np.random.default_rng(3)
    params[ROOT] = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f"), params[ROOT])
    return config, params


def rows_of(config, left: bool = False) -> dict:
    """Three rows of 5, 9 and 2 real tokens, none of them the padding id."""
    tokens = np.random.default_rng(1).integers(3, config.vocab_size, (3, 9))
    lengths = np.array([[5], [9], [2]])
    mask = np.arange(9) < lengths
    if config.kind == "encoder_decoder":
        np.put_along_axis(tokens, lengths - 1, config.eos_id, axis=1)
    if left:
        mask = mask[:, ::-1]
    moved = np.full_like(tokens, config.padding_id)
    moved[mask] = np.concatenate([row[:n] for row, (n,) in zip(tokens, lengths, strict=True)])
    return {"tokens": moved.astype("i"), "segment_ids": mask.astype("i")}


@pytest.mark.parametrize("family", HEADED)
def test_the_last_layers_head_is_transformers_own(family, tmp_path, torch):
    """The saved model loads in transformers with our logits, and is read back bit by bit."""
    from transformers import AutoModelForSequenceClassification

    config, params = with_labels(family)
    save_pretrained(config, params, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["id2label"] == {"0": "no", "1": "yes", "2": "maybe"}
    assert written["pad_token_id"] == config.padding_id
    assert "AutoModelForSequenceClassification" in loads_in(tmp_path / "out")
    theirs, loading_info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    back = load_model(tmp_path / "out")
    assert back.config.head == config.head
    ours = {p: x for p, x in flatten(params).items() if p != "head/kernel"}
    assert flatten(back.params).keys() == ours.keys()
    assert all(np.array_equal(ours[path], leaf) for path, leaf in flatten(back.params).items())
    right, left = (rows_of(config, left) for left in (False, True))
    made = predicted_logits(back, right)
    # Pooled by the mask, never by a fixed position (transformers #35909, #30004).
    assert np.allclose(predicted_logits(back, left), made, atol=2e-5)
    counts = config.position_rows or config.kind == "encoder_decoder"  # theirs count places
    for batch in (right,) if counts else (right, left):
        ids = torch.tensor(batch["tokens"], dtype=torch.long)
        mask = torch.tensor(batch["segment_ids"])
        with torch.no_grad():
            logits = theirs(input_ids=ids, attention_mask=mask).logits.numpy()
        assert np.allclose(made, logits, atol=1e-4)


def test_a_regression_and_somebody_elses_classifier(tmp_path, torch):
    config, params = with_labels("bert", labels=())
    save_pretrained(config, params, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    assert values["problem_type"] == "regression" and len(values["id2label"]) == 1
    del values["ffn_heterogeneity"]  # as transformers writes one
    path.write_text(json.dumps(values))
    back = load_model(tmp_path / "out")
    settings = back.config.head.settings
    assert (
        settings["labels"] == ["LABEL_0"]
        and settings["problem"] == "regression"
        and settings["outputs"] == 1
    )
    batch = rows_of(config)
    model = Model(config, params, None, "")
    assert np.array_equal(predicted_logits(back, batch), predicted_logits(model, batch))
    values["id2label"] = {"0": "a", "7": "b"}
    path.write_text(json.dumps(values))
    refused("id2label", load_model, tmp_path / "out", error=CheckpointError)


def test_a_head_survives_saved_adapters(tmp_path):
    """PEFT #577, sentence-transformers #3980: a head lost when an adapter is saved."""
    from ffn_heterogeneity.surgery import SURGERIES

    for pooling in ("last", "p32"):
        config, params = with_labels("llama", pooling)
        model, _ = SURGERIES["lora"](Model(config, params, None, ""), {"rank": 2})
        folder = tmp_path / pooling
        save_pretrained(model.config, model.params, folder, structure="keep")
        back = load_model(folder)
        assert back.config.head == config.head
        for path, leaf in flatten(params[ROOT]).items():
            assert np.array_equal(leaf, flatten(back.params[ROOT])[path])
        assert any(path.endswith("lora_a") for path in flatten(back.params))
        made, want = (predicted_logits(x, rows_of(config)) for x in (back, model))
        assert np.array_equal(made, want)


def test_every_leaf_of_a_head_is_written():
    for family in HEADED:
        config, _ = with_labels(family)
        head = make_head(config, config.head)
        leaves = head.leaves
        assert leaves.keys() == FAMILIES[family].classifier.keys()
