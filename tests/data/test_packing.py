"""Packing against oracles: every document is in the packed rows."""

import collections
import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import refused, write_rows

from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks import Example, Fields, get_task

KEYS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")


def batches_of(config, tokenizer, seq_len, batch_size=4, **options):
    config = {"shuffle": False, "prefetch": 0, **config}
    pipeline = make_pipeline(config, tokenizer, batch_size, seq_len, 0, **options)
    return list(pipeline.train_iterator(epochs=1))


def rows_of(batches):
    return [
        {key: batch[key][i] for key in KEYS}
        for batch in batches
        for i in range(len(batch["tokens"]))
    ]


def segments_of(row):
    """(tokens, targets, mask) of each document of a row; checks the row's structure on the way."""
    ids, segments = row["segment_ids"], []
    for segment in range(1, ids.max() + 1):
        where = np.flatnonzero(ids == segment)
        assert (np.diff(where) == 1).all() and len(where)
        assert (row["positions"][where] == np.arange(len(where))).all()
        segments.append((row["tokens"][where], row["targets"][where], row["loss_mask"][where]))
    padding = ids == 0
    filled = int((~padding).sum())
    assert (ids[:filled] > 0).all(), "padding only at the end"
    assert (np.diff(ids[:filled]) >= 0).all()
    for key in ("tokens", "targets", "loss_mask", "positions"):
        assert not row[key][padding].any()
    for tokens, targets, _ in segments:  # targets are the next inputs, inside the document
        assert (targets[:-1] == tokens[1:]).all()
    return segments


def check_batch(batch, batch_size, seq_len):
    assert set(batch) == set(KEYS)
    for key, value in batch.items():
        assert value.shape == (batch_size, seq_len)
        assert value.dtype == (np.bool_ if key == "loss_mask" else np.int32), key


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seq_len", [96, 512])
def test_gsm8k_every_example_comes_back(shared_data, write, bpe, packing, seq_len):
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").split("\n")[:300]
    records = [json.loads(line) for line in lines]
    config = {"task": "gsm8k", "path": write("g.jsonl", records), "packing": packing}

    expected, response_tokens = collections.Counter(), 0
    for record in records:  # the oracle: written from the format alone
        before = [0, *bpe.encode(f"Question: {record['question']}\nAnswer:")]
        ids = [*before, *bpe.encode(f" {record['answer']}"), 1][: seq_len + 1]
        if len(before) < seq_len + 1:
            expected[tuple(ids)] += 1
            response_tokens += len(ids) - len(before)

    batches = batches_of(config, bpe, seq_len)
    actual, masked = collections.Counter(), 0
    for batch in batches:
        check_batch(batch, 4, seq_len)
    for row in rows_of(batches):
        segments = segments_of(row)
        assert packing or len(segments) <= 1
        for tokens, targets, mask in segments:
            actual[(*tokens.tolist(), int(targets[-1]))] += 1
            first = int(np.argmax(mask))
            assert mask[first:].all() and not mask[:first].any()
            assert bpe.decode(tokens[: first + 1]).endswith("\nAnswer:")
            masked += int(mask.sum())
    assert actual == expected
    assert masked == response_tokens
    if seq_len == 512:
        # Rows are used: first fit wastes little, one example per row much.
        fill = np.mean([row["segment_ids"] > 0 for row in rows_of(batches)])
        assert (fill > 0.8) == packing


@pytest.mark.parametrize("bos", ["segment", "document", "none"])
@pytest.mark.parametrize("packing", [True, False])
def test_text_predicts_every_token_once(shared_data, write, bpe, bos, packing):
    text = (shared_data / "wikitext2" / "validation.txt").read_text(encoding="utf-8")[:60_000]
    parts = [text[:25_000], text[25_000:25_300], text[25_300:]]
    files = [write(f"{i}.txt", piece) for i, piece in enumerate(parts)]
    config = {"path": files, "bos": bos, "packing": packing, "passage_chars": 10**9}
    documents = [([0] if bos != "none" else []) + bpe.encode(p) + [1] for p in parts]
    inputs = np.concatenate([d[:-1] for d in documents])
    targets = np.concatenate([d[1:] for d in documents])

    rows = rows_of(batches_of(config, bpe, 64))
    segments = [s for row in rows for s in segments_of(row)]
    assert np.array_equal(np.concatenate([s[1] for s in segments]), targets)
    assert all(mask.all() for _, _, mask in segments)
    got = np.concatenate([s[0] for s in segments])
    starts = np.cumsum([0] + [len(s[0]) for s in segments])[:-1]
    if bos == "segment":
        assert (got[starts] == 0).all()
        got, inputs = np.delete(got, starts), np.delete(inputs, starts)
    assert np.array_equal(got, inputs)
    if packing:  # only the last row may have free space
        assert all((row["segment_ids"] > 0).all() for row in rows[: -(-len(targets) // 64) - 1])


def test_passages_have_bos_and_eos_where_the_document_begins_and_ends(write, characters):
    path = write("a.txt", "aaaa\n\nbbbb\n\ncccc")
    for bos, firsts in (("document", [1, ord("b") + 3, ord("c") + 3]), ("segment", [1, 1, 1])):
        config = {"path": path, "bos": bos, "passage_chars": 6, "packing": False}
        rows = [r for r in rows_of(batches_of(config, characters(), 32)) if r["segment_ids"].any()]
        documents = [segments_of(row)[0] for row in rows]
        assert [tokens[0] for tokens, _, _ in documents] == firsts
        assert [targets[-1] == 2 for _, targets, _ in documents] == [False, False, True]


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(
        st.tuples(st.text("ab ", max_size=9), st.text("xyz", max_size=14)), min_size=1, max_size=12
    ),
    seq_len=st.integers(2, 20),
    batch_size=st.integers(1, 5),
    special=st.tuples(st.sampled_from([1, None]), st.sampled_from([2, None])),
)
def test_any_pairs(tmp_path_factory, characters, documents, seq_len, batch_size, special):
    rows = [{"prompt": prompt, "response": response} for prompt, response in documents]
    path = write_rows(tmp_path_factory.mktemp("pairs") / "p.jsonl", rows)
    bos, eos = special
    expected = collections.Counter()
    for prompt, response in documents:
        before = ([] if bos is None else [bos]) + [ord(c) + 3 for c in prompt]
        ids = before + [ord(c) + 3 for c in response] + ([] if eos is None else [eos])
        ids = ids[: seq_len + 1]
        if response and len(ids) > max(len(before), 1):
            mask = tuple(i >= len(before) for i in range(1, len(ids)))
            expected[(tuple(ids), mask)] += 1
    config = {"task": "jsonl", "path": str(path)}
    if not expected:
        with pytest.raises(DataError, match="none of its"):
            batches_of(config, characters(bos, eos), seq_len, batch_size)
        return
    actual = collections.Counter()
    for row in rows_of(batches_of(config, characters(bos, eos), seq_len, batch_size)):
        for tokens, targets, mask in segments_of(row):
            actual[((*tokens.tolist(), int(targets[-1])), tuple(mask.tolist()))] += 1
    assert actual == expected


def test_an_end_appended_and_loss_on_the_prompt(write, characters):
    """The end is part of the last passage of the response, before the eos; it is cut first."""
    pairs = [{"prompt": "ab", "response": "xyz"}, {"prompt": "abcdef", "response": " "}]
    ids = [ord(character) + 3 for character in "abxyz\n[eod]"]
    for on_prompt, seq_len in ((False, 32), (True, 32), (True, 4)):
        config = {"task": "jsonl", "path": write("p.jsonl", pairs), "append": "\n[eod]"}
        config["loss_on_prompt"] = on_prompt
        (row,) = rows_of(batches_of(config, characters(), seq_len, 1))
        ((tokens, targets, mask),) = segments_of(row)
        assert [*tokens[:1], *targets] == [1, *ids, 2][: seq_len + 1]
        first = 0 if on_prompt else 2
        assert mask.tolist() == [i >= first for i in range(len(targets))]
    config = {"path": write("a.txt", "aaaa\n\nbbbb"), "passage_chars": 6, "append": "!"}
    (row,) = rows_of(batches_of(config, characters(), 32, 1))
    ends = [characters().decode(targets) for _, targets, _ in segments_of(row)]
    assert "".join(ends) == "aaaa\n\nbbbb!"


def test_no_token_spans_prompt_and_target(bpe):
    ids, before = Encoder(bpe).ids(Example("The king", "dom of heaven"))
    assert ids == [0, *bpe.encode("The king"), *bpe.encode("dom of heaven"), 1]
    assert bpe.decode(ids[1:before]) == "The king" and bpe.decode(ids[before:-1]) == "dom of heaven"


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_real_tokenizers_see_the_text_as_if_whole(shared_data, request, model):
    """The boundaries of the GSM8K form are between words: separate tokenisation changes nothing."""
    from ffn_heterogeneity.io.load import load_tokenizer

    if model == "gemma3":
        tokenizer = request.getfixturevalue("gemma3_tokenizer")
    else:
        tokenizer = load_tokenizer(request.getfixturevalue("smollm2_gguf"))
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").split("\n")[:200]
    encoder = Encoder(tokenizer)
    for record in map(json.loads, lines):
        example = get_task("gsm8k").example(record, Fields())
        ids, before = encoder.ids(example)
        text = f"Question: {record['question']}\nAnswer: {record['answer']}"
        middle = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [tokenizer.bos_token_id, *middle, tokenizer.eos_token_id]
        assert tokenizer.decode(ids[before:-1]).strip() == record["answer"].strip()


def test_a_dummy_prefix_is_not_put_before_the_target():
    """Llama-2-like SentencePiece: " x" continues a prompt as "_x", not as "_ _x"."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", "\n", "\u2581", "\u2581a", "a", "\u2581b", "b", ":"]
    ids, merges = {word: i for i, word in enumerate(words)}, [("\u2581", "a"), ("\u2581", "b")]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
    parts = [pre_tokenizers.Metaspace(prepend_scheme="first", split=False)]
    parts.append(pre_tokenizers.Split(Regex("\n"), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    assert wrapped.convert_ids_to_tokens(wrapped.encode("b")) == ["\u2581b"]  # the dummy prefix
    for prompt, target in (("a:", " b"), ("a:", "b"), ("a:\n", "b b"), ("a:", "\nb")):
        ids, before = Encoder(wrapped).ids(Example(prompt, target))
        assert ids == [0, *wrapped.encode(prompt + target), 1]
        assert ids[1:before] == wrapped.encode(prompt)


def test_policies_need_their_tokens(characters):
    assert Encoder(characters()).bos == "segment"
    assert Encoder(characters(bos=None)).bos == "none"
    assert Encoder(characters(), eos=False).ids(Example("", "a")) == ([1, 100], 1)
    refused("has no bos token", Encoder, characters(bos=None), "segment", error=DataError)
    with pytest.raises(DataError, match="bos='first': choose one of .'auto', 'segment'"):
        Encoder(characters(), "first")


def test_truncated_and_dropped_are_counted_and_said(write, characters, caplog):
    records = [{"prompt": "p" * 3, "response": "r" * 20}] * 12
    records += [{"prompt": "p" * 8, "response": "r"}, {"prompt": "p", "response": "  "}]
    records += [{"prompt": "p" * 7, "response": "r"}]  # bos + 7: one free position, for "r"
    config = {"task": "jsonl", "path": write("a.jsonl", records), "shuffle": False}
    pipeline = make_pipeline(config, characters(), 2, 8, 0)
    with caplog.at_level(logging.WARNING):
        iterator = pipeline.train_iterator(epochs=1)
        rows = rows_of(list(iterator))
    counts = iterator.counts
    assert (counts.documents, counts.kept) == (15, 13)
    assert (counts.truncated, counts.no_response, counts.empty) == (13, 1, 1)
    lost = [r for r in rows if r["segment_ids"].any()]
    assert counts.loss_tokens == sum(r["loss_mask"].sum() for r in lost) == 12 * 5 + 1
    text = caplog.text
    assert "10 of 10 documents so far: end of the response cut off to fit seq_len = 8" in text
    assert "the prompt alone fills seq_len = 8" in text and "nothing to predict" in text
    assert text.count("cut off") == 2  # at 1 and at 10, not at each


@pytest.mark.parametrize("epochs", [1, None])
def test_nothing_left_is_an_error_not_an_endless_search(write, characters, epochs):
    long_prompts = [{"prompt": "p" * 50, "response": "r"}] * 7
    empty = [{"text": ""}, {"text": "   \n"}] * 3
    for task, records, message in (
        ("jsonl", long_prompts, "none of its 7 records.*7 with a prompt that fills"),
        ("text", empty, r"none of its 6 records.*\(6 empty"),
    ):
        config = {"task": task, "path": write(f"{task}.jsonl", records)}
        iterator = make_pipeline(config, characters(), 2, 16, 0).train_iterator(epochs)
        refused(message, next, iterator, error=DataError)
