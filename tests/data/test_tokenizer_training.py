"""A byte-level BPE trained here: deterministic, lossless, loaded by transformers without torch."""

import os
import sys

import pytest
from tiny_runs import refused, run_program

from ffn_heterogeneity.data.corpus.corpora import find_inputs, plan_chunks
from ffn_heterogeneity.data.corpus.documents import Layout
from ffn_heterogeneity.data.corpus.shards import tokenizer_facts
from ffn_heterogeneity.data.corpus.tokenizer_training import (
    sample_texts,
    save_tokenizer,
    train_tokenizer,
)
from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks import Example

ODD = "naïve «日本» \U0001f433\tif (x >= 0) {\r\n\n  return;}  \u200b\x00 <unk> e\u0301"


@pytest.fixture(scope="module")
def lines(shared_data):
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text()[:200_000]
    return text.split("\n\n")


@pytest.fixture(scope="module")
def trained(lines):
    return train_tokenizer(lines, 600)


def test_special_tokens_and_size(trained):
    assert len(trained) == 600 and trained.get_vocab().keys() >= {"<s>", "</s>", "<pad>"}
    assert (trained.bos_token_id, trained.eos_token_id, trained.pad_token_id) == (0, 1, 2)
    assert trained("To be")["input_ids"][0] == 0
    assert trained.encode("To be", add_special_tokens=False)[0] != 0


def test_every_text_comes_back(trained, lines):
    for text in (ODD, "".join(map(chr, range(1, 0x500))), *lines[:50]):
        ids = trained.encode(text, add_special_tokens=False)
        assert trained.decode(ids) == text
        assert max(ids, default=0) < 600
    # Merges were learnt: fewer tokens than bytes.
    text = "\n".join(lines[100:200])
    assert len(trained.encode(text, add_special_tokens=False)) < 0.6 * len(text.encode())
    ids, before = Encoder(trained, "auto").ids(Example("", "To be"))
    assert ids[0] == 0 and ids[-1] == 1 and before == 1


def test_merges_follow_from_the_counts():
    """The most frequent pair is merged first: counted by hand on a corpus of two words."""
    tokenizer = train_tokenizer(["abab abab abab"] * 5 + ["cdd cdd"] * 4, 259 + 3)
    merges = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])[259:]
    # a-b 30 times; after this merge ab-ab 15; then space-abab 10 (c-d and d-d: 8).
    assert [token for token, _ in merges] == ["ab", "abab", "Ġabab"]


def test_same_texts_same_tokenizer_whatever_the_threads(lines, trained, tmp_path):
    program = """
import sys
from ffn_heterogeneity.data.corpus.tokenizer_training import save_tokenizer, train_tokenizer
lines = open(sys.argv[1]).read().split("\\n\\n")
save_tokenizer(train_tokenizer(lines, 600), sys.argv[2])
assert not {"torch", "jax"} & set(sys.modules)
"""
    (tmp_path / "lines.txt").write_text("\n\n".join(lines))
    save_tokenizer(trained, tmp_path / "here")
    for seed, threads, name in (("1", "false", "one"), ("2", "true", "many")):
        env = {"TOKENIZERS_PARALLELISM": threads, "PYTHONHASHSEED": seed}
        command = (sys.executable, "-c", program, tmp_path / "lines.txt", tmp_path / name)
        assert run_program(*command, **env).code == 0
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "here" / file).read_bytes()


def test_auto_tokenizer_loads_it(trained, lines, tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(trained, tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for text in (ODD, *lines[:20]):
        assert loaded(text)["input_ids"] == trained(text)["input_ids"]
    assert tokenizer_facts(loaded) == tokenizer_facts(trained)
    assert loaded.pad_token == "<pad>"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_what_cannot_be_trained(caplog):
    with pytest.raises(DataError, match="vocab_size is 258; 3 special tokens and 256 bytes need"):
        train_tokenizer(["a"], 258)
    refused("no text to train the tokenizer on", train_tokenizer, ["", " \n"], 300, error=DataError)
    assert len(train_tokenizer(["abc abc"], 5000)) < 270
    assert "of 5000 requested tokens" in caplog.text


def test_the_sample_is_spread_over_the_corpus(write):
    documents = [f"document number {i:04d}" for i in range(200)]
    path = write("a.jsonl", [{"text": text} for text in documents])
    layout = Layout(chunk_bytes=350)
    chunks = plan_chunks(find_inputs(path), layout)
    assert len(chunks) == 19
    assert list(sample_texts(chunks, layout, 10**6)) == documents
    numbers = [int(text[-4:]) for text in sample_texts(chunks, layout, 1500)]
    assert len(numbers) < 60 and numbers[0] == 0 and max(numbers) > 180
    assert 0 < len(list(sample_texts(chunks, layout, 30))) <= 2


def test_the_sample_is_no_larger_than_asked(write):
    """One long document, with characters of three bytes."""
    path = write("long.txt", "日本" * 500_000)
    layout = Layout(separator="")
    chunks = plan_chunks(find_inputs(path), layout)
    for limit in (1000, 1001, 10**7):
        (text,) = sample_texts(chunks, layout, limit)
        assert min(limit, 3 * 10**6) - 3 < len(text.encode()) <= limit
