"""scripts/prepare_data.py."""

import json
import shutil
from pathlib import Path

import pytest
from prepare_tools import documents_of, expected
from tiny_models import byte_tokenizer
from tiny_runs import refused

from ffn_heterogeneity.data.sources import DataError

REPOSITORY = Path(__file__).resolve().parents[2]


def configured(workdir, **changes):
    """`run` of scripts/prepare_data.py with a config."""
    from etils import epath

    from ffn_heterogeneity.launch import cli
    from ffn_heterogeneity.launch.prepare_data import run

    config = cli.load_config(str(REPOSITORY / "configs" / "prepare_data.py"))
    cli.set_keys(config, changes, "test", "configs/prepare_data.py")
    return run(config, epath.Path(workdir))


def test_a_dry_run_on_blank_documents(write, tmp_path):
    tokenizer = str(tmp_path / "tokenizer")
    byte_tokenizer().save_pretrained(tokenizer)
    blank = write("blank.txt", " \n\n ")
    changes = {"input": blank, "tokenizer": tokenizer, "dry_run": True}
    mine = tmp_path / "run" / "wandb" / "mine"
    mine.mkdir(parents=True)
    assert configured(tmp_path / "run", **changes)["tokens_at_most_about"] == 0
    assert mine.exists() and len([*(tmp_path / "run").iterdir()]) == 1


def test_script_trains_a_tokenizer_and_writes_shards(corpus, tmp_path, capsys):
    changes = {"input": ",".join(corpus), "train_tokenizer.vocab_size": 300, "shard_mb": 0.002}
    dry = configured(tmp_path / "run", dry_run=True, **changes)
    assert not (tmp_path / "run").exists()
    assert "shards: " in capsys.readouterr().out
    results = configured(tmp_path / "run", **changes)
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    assert results["vocab_size"] == 300 and results["documents"] == 87
    assert dry["shards"] == results["shards"]
    assert results["tokens"] <= dry["tokens_at_most_about"]
    from ffn_heterogeneity.io.load import load_tokenizer

    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer")
    assert documents_of(tmp_path / "run") == expected(corpus, tokenizer, tokenizer.eos_token_id)


def test_a_tokenizer_of_other_texts_is_not_taken(write, tmp_path):
    path, run_in = write("a.txt", "abcabcabc " * 300), tmp_path / "run"
    changes = {"input": path, "train_tokenizer.vocab_size": 300, "shard_mb": 0.002}
    configured(run_in, **changes)
    made = (run_in / "tokenizer" / "tokenizer.json").read_bytes()
    (run_in / "results.json").unlink()
    configured(run_in, **changes)
    write("a.txt", "xyzzyxyzzy " * 300)
    with pytest.raises(DataError, match="tokenizer was trained on .*texts_sha256 changed.*tokens"):
        configured(run_in, **changes)
    assert (run_in / "tokenizer" / "tokenizer.json").read_bytes() == made
    # Without shards nothing was made with it: it is trained again, as in a new directory.
    shutil.rmtree(run_in / "tokens")
    again, fresh = configured(run_in, **changes), configured(tmp_path / "fresh", **changes)
    assert again["tokens"] == fresh["tokens"]
    (run_in / "tokenizer" / "made_of.json").unlink()
    with pytest.raises(DataError, match="a tokenizer that was not trained by this command"):
        configured(run_in, **changes)


def test_script_refuses(corpus, smollm2_gguf, tmp_path):
    for changes, message in (
        ({}, "tokenizer='' and train_tokenizer.vocab_size=0: give one of them"),
        ({"tokenizer": "x", "train_tokenizer.vocab_size": 300}, "give one of them"),
        ({"tokenizer": "x", "processes": 0}, "processes=0 must be a number in"),
        ({"tokenizer": "x", "shard_mb": 0.0}, "shard_mb=0.0"),
        ({"tokenizer": "x", "max_tokens": -1}, "max_tokens=-1 must be a number in"),
        ({"tokenizer": "x"}, "model 'x' is not a directory"),
        ({"tokenizer": "x", "input": ""}, "no input"),
        ({"train_tokenizer.vocab_size": 258}, "vocab_size is 258; 3 special tokens and 256 bytes"),
        ({"tokenizer": str(smollm2_gguf), "model": "absent"}, "model 'absent' is not a directory"),
    ):
        refused(message, configured, tmp_path / "run", **{"input": corpus[0], **changes})
    assert not (tmp_path / "run").exists()


def test_script_compares_vocabularies(corpus, smollm2_gguf, tmp_path, monkeypatch):
    from ffn_heterogeneity.launch import prepare_data

    class Small:
        vocab_size = 49_151

    monkeypatch.setattr(prepare_data, "load_config", lambda model, revision: Small)
    changes = {"input": corpus[0], "tokenizer": str(smollm2_gguf), "model": "small"}
    with pytest.raises(DataError, match="ids up to 49151, but model small .*vocabulary of 49151"):
        configured(tmp_path / "run", **changes)
    Small.vocab_size = 49_152
    assert configured(tmp_path / "run", **changes)["vocab_size"] == 49_152
