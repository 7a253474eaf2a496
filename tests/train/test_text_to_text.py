"""Prompts and responses for encoder-decoders: rows, a run, and what does not fit."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_models import byte_tokenizer, config_of, random_params, stopped_and_resumed, tiny_of
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.data.glue import PROMPTS
from ffn_heterogeneity.data.packing import Encoder, ExampleReader
from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks import get_task
from ffn_heterogeneity.data.tasks.base import Fields
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.train.shared import Shared

pytestmark = pytest.mark.usefixtures("compiled_quickly")
START = 0
PAIRS = [("ab", "x"), ("a longer prompt", "yy"), ("c " * 40, "z" * 30), ("d", "w")]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"{prompt} \n", "response": f" {answer}"} for prompt, answer in PAIRS]
    config, tokenizer = dataclasses.replace(tiny_of("t5", 4), vocab_size=258), byte_tokenizer()
    save_pretrained(config, random_params(config), root / "model", tokenizer=tokenizer)
    labels = [{"sentence": "pq"[i % 2] * 3, "label": str(i % 2)} for i in range(40)]
    return {
        "model": str(root / "model"),
        "rows": write(root / "rows.jsonl", rows),
        "sst2": write(root / "sst2.jsonl", labels),
        "text": write(root / "text.txt", ["some text"]),
    }


def test_rows_hold_prompts_and_shifted_responses(files):
    """Each with its eos; longer ones are cut before theirs; no row holds two examples."""
    tokenizer = load_model(files["model"]).tokenizer
    eos = tokenizer.eos_token_id
    data = {"task": "jsonl", "path": files["rows"], "bos": "none", "shuffle": False}
    pipeline = make_pipeline(data, tokenizer, 4, 20, 0, decoder=(8, START))
    batch = next(pipeline.train_iterator())
    assert {k: v.shape[1] for k, v in batch.items()} == {
        **dict.fromkeys(("encoder_tokens", "encoder_segment_ids"), 20),
        **dict.fromkeys(("tokens", "segment_ids", "targets", "loss_mask"), 8),
    }
    seen = []
    for i in range(4):
        real = batch["segment_ids"][i] > 0
        answer = batch["targets"][i][real]
        assert batch["tokens"][i][real].tolist() == [START, *answer[:-1]]
        np.testing.assert_array_equal(batch["loss_mask"][i], real)
        prompt = batch["encoder_tokens"][i][batch["encoder_segment_ids"][i] > 0]
        assert prompt[-1] == answer[-1] == eos
        seen.append(tuple(tokenizer.decode(ids[:-1]) for ids in (prompt, answer)))
    assert seen == [(p.rstrip()[:19], a[:7]) for p, a in PAIRS]


def test_prompts_are_those_of_the_published_code():
    assert {*PROMPTS} == {"sst2", "mnli", "cola", "mrpc"}
    none, pair = Fields(), {"sentence1": "a b", "sentence2": "c", "label": 1}
    mnli = {"premise": "p", "hypothesis": "h", "label": "contradiction"}
    asked = {
        "sst2": ({"sentence": "s", "label": 0}, "sentence: s", "negative"),
        "mnli": (mnli, "premise: p\nhypothesis: h", "contradiction"),
        "cola": ({"sentence": "s", "label": 1}, "cola sentence: s", "acceptable"),
        "mrpc": (pair, "mrpc sentence1: a b\nsentence2: c", "equivalent"),
    }
    for name, (record, prompt, answer) in asked.items():
        assert get_task(f"glue_{name}").example(record, none)[:2] == (f"{prompt}\n", answer)
    refused("fixed fields", get_task("glue_sst2").example, pair, Fields("a"), error=DataError)


def config_for(files, task="glue_sst2", **changes):
    keys = {"data__path": files["sst2"], "seq_len": 24, "target_len": 12, "steps": 150}
    keys |= {"batch_size": 8, "optimizer__warmup_steps": 1, "optimizer__learning_rate": 3e-2}
    keys |= {"eval__every": 50, "checkpoint__every": 50, "tensorboard": False, "dropout": 0.0}
    keys |= {"compute_dtype": "float32", "data__validation_fraction": 0.2}
    return config_of("t5_finetune", f"{files['model']},{task}", **(keys | changes))


def test_a_run_learns_answers_and_resumes(files, tmp_path, monkeypatch):
    together = Shared()
    config = config_for(files)
    training.run(config, tmp_path / "run", together)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    nll = [row["validation/nll"] for row in rows if "validation/nll" in row]
    assert nll[-1] < 0.2 < 1 < nll[0]
    stopped_and_resumed(config, tmp_path, monkeypatch, together)
    model = load_model(tmp_path / "run/model")
    asked = [PROMPTS["sst2"].format(x) for x in ("ppp", "qqq")]
    assert fh.generate(model, asked, max_new_tokens=10) == ["negative", "positive"]


def test_what_has_no_responses_is_rejected(files, tmp_path):
    for task in ("text", "mixture", "messages"):
        refused(f"'{files['model']},{task}'", config_for, files, task)
    config = config_for(files)
    config.data.task = "text"
    refused("the prompts of one task", training.run, config, tmp_path / "a", error=DataError)
    config = config_for(files, target_len=0)
    encoder, task = Encoder(byte_tokenizer(), eos=False), get_task("glue_sst2")
    given = (task, Fields(""), None, encoder, 24, 1, False)
    refused("end with an eos", ExampleReader, *given, decoder=(12, 0), error=DataError)
    refused("target_len=0", training.run, config, tmp_path / "b")
    llama = tiny_of("llama", 2)
    save_pretrained(llama, random_params(llama), tmp_path / "llama")
    config = config_for(files | {"model": str(tmp_path / "llama")})
    refused("a llama model is a decoder: text to text", training.run, config, tmp_path / "c")
