"""Classification heads on encoder-decoders: transformers' T5, Switch by hand, a run on rows."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_models import byte_tokenizer, config_of, random_params, stopped_and_resumed, tiny_of
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.data.labelled import Form, encode_texts
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.evaluate.classify import logits_of
from ffn_heterogeneity.evaluate.inputs import row_form
from ffn_heterogeneity.heads import with_head
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.families import config_to_hf
from ffn_heterogeneity.models.families.t5_names import names
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.moefication import routed_sums
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
HEAD = HeadConfig.of("classification", {"outputs": 3, "labels": ["a", "b", "c"]})


def with_random_head(family):
    """(config, params) with random leaves, those of the head too."""
    import jax

    config = dataclasses.replace(tiny_of(family, 4), vocab_size=61, pad_id=0)
    config, params = with_head(config, random_params(config), HEAD, jax.random.key(0))
    rng = np.random.default_rng(3)
    head = {path: rng.normal(size=x.shape) for path, x in flatten(params["task_head"]).items()}
    params["task_head"] = fh.tree.unflatten({k: v.astype(np.float32) for k, v in head.items()})
    return config, params


def rows():
    """Ids with one eos, 1, each; padding on the right."""
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(2, 61, (3, 12)), np.ones((3, 12), int)
    for i, length in enumerate((12, 7, 2)):
        ids[i, length - 1], ids[i, length:], mask[i, length:] = 1, 0, 0
    return ids, mask


def state_dict(torch, config, params):
    """PyTorch's names and tensors of the model without its head."""
    made = {}
    for path, name in names(config).items():
        leaf = np.asarray(flatten(unstack(params))[path])
        leaf = leaf.swapaxes(-1, -2) if path.endswith("/kernel") else leaf
        each = enumerate(leaf) if "{e}" in name else [(0, leaf)]
        made |= {name.replace("{e}", str(e)): torch.tensor(one) for e, one in each}
    return made


@pytest.mark.parametrize("family", ["t5", "switch"])
def test_heads_equal_transformers(torch, family):
    """T5's class; for Switch, which has none, the same head on transformers' decoder."""
    import transformers

    config, params = with_random_head(family)
    values = {k: v for k, v in config_to_hf(config).items() if k != "ffn_heterogeneity"}
    values |= {"num_labels": 3, "pad_token_id": 0}
    ids, mask = rows()
    batch = {"tokens": ids, "segment_ids": mask, "valid": np.ones(3, bool)}
    ours = np.asarray(logits_of(config, RunOptions(), params, batch))
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    state = state_dict(torch, config, params)
    head = {name: torch.tensor(np.asarray(x)) for name, x in flatten(params["task_head"]).items()}
    with torch.no_grad():
        if family == "t5":
            model = transformers.T5ForSequenceClassification(transformers.T5Config(**values)).eval()
            state = {f"transformer.{name}": x for name, x in state.items()}
            for name, theirs in (("dense", "dense"), ("out", "out_proj")):
                prefix = f"classification_head.{theirs}"
                state[f"{prefix}.weight"] = head[f"{name}/kernel"].T.contiguous()
                state[f"{prefix}.bias"] = head[f"{name}/bias"]
            model.load_state_dict(state, strict=False)
            expected = model(**given).logits
        else:
            kind = transformers.SwitchTransformersConfig(**values)
            model = transformers.SwitchTransformersModel(kind).eval()
            model.load_state_dict(state, strict=False)
            shifted = torch.cat(
                [torch.zeros_like(given["input_ids"][:, :1]), given["input_ids"][:, :-1]], 1
            )
            x = model(**given, decoder_input_ids=shifted).last_hidden_state
            x = x[given["input_ids"] == 1]
            x = torch.tanh(x @ head["dense/kernel"] + head["dense/bias"])
            expected = x @ head["out/kernel"] + head["out/bias"]
    np.testing.assert_allclose(ours, expected.numpy(), atol=1e-5)


def test_one_stack_is_asked_for_by_name():
    """Before, a head of both stacks gave a dict where arrays were expected."""
    model = with_random_head("t5")
    refused("encoder-decoder: finding massive neurons", massive_weights, *model, token=1)
    refused("encoder-decoder: splitting", routed_sums, *model, [np.arange(9)], 2)


def test_rows_are_prompts_with_one_eos():
    tokenizer = byte_tokenizer()
    config = dataclasses.replace(tiny_of("t5", 4), vocab_size=258)
    form = row_form(config, "mrpc", 60)
    (row, long), _, cut = encode_texts(tokenizer, [("ab", "cd"), ("x" * 60, "y")], form)
    assert tokenizer.decode(row[:-1]) == "mrpc sentence1: ab\nsentence2: cd"
    assert row[-1] == long[-1] == 1 and len(long) == 60 and [*cut] == [False, True]
    (plain,), _, _ = encode_texts(tokenizer, [("a", "b")], row_form(config, "labels", 60))
    assert tokenizer.decode(plain[:-1]) == "a\nb"
    for texts, message in ((("a</s>b", "c"), "holds the eos 1"), (("a",), "needs 2 texts")):
        refused(message, encode_texts, tokenizer, [texts], form, error=DataError)
    none = dataclasses.replace(config, eos_id=None)
    refused("eos_id=None", row_form, none, "mrpc", 60)
    assert row_form(tiny_of("llama", 2), "mrpc", 9) == Form(False, 1, 9)


@pytest.mark.parametrize("family", ["t5", "switch"])
def test_a_run_learns_and_classifies(family, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_of(family, 4), vocab_size=258, pad_id=0)
    save_pretrained(config, random_params(config), tmp_path / "m", tokenizer=byte_tokenizer())
    path = tmp_path / "rows.jsonl"
    labelled = [{"sentence": "pq"[i % 2] * 3, "label": i % 2} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in labelled))
    keys = {
        "data__path": str(path),
        "data__validation_fraction": 0.2,
        "pooling": "last",
        "together": 1,
    }
    keys |= {"steps": 60, "batch_size": 8, "lengths": (24,), "tensorboard": False, "dropout": 0.0}
    keys |= {"optimizer__learning_rate": 3e-2, "optimizer__warmup_steps": 1}
    keys |= {"eval__every": 30, "checkpoint__every": 30, "compute_dtype": "float32"}
    settings, together = config_of("p32_glue", f"{tmp_path / 'm'},sst2", **keys), Shared()
    training.run(settings, tmp_path / "run", together)
    seen = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    accuracy = [row["validation/accuracy"] for row in seen if "validation/accuracy" in row]
    assert accuracy[-1] == 1.0
    stopped_and_resumed(settings, tmp_path, monkeypatch, together)
    model = load_model(tmp_path / "run/model")
    assert [x["prediction"] for x in fh.classify(model, ["ppp", "qqq"])] == ["negative", "positive"]
    settings.together = 2
    refused("together=2: an encoder-decoder", training.run, settings, tmp_path / "packed")
