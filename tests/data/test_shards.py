"""Token shards read: rows against a brute-force oracle and the text pipeline; resuming; errors."""

import itertools
import json
import shutil

import numpy as np
import pytest
from batch_tools import check_resumes, same, take
from tiny_runs import refused

from ffn_heterogeneity.data.batches import take_rows
from ffn_heterogeneity.data.corpus import shards as module
from ffn_heterogeneity.data.corpus.shards import ShardWriter, open_corpus
from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.token_rows import TokenRows, split, whole

KEYS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


@pytest.fixture
def make(tmp_path, characters):
    """`make(shards)`: lists of documents, each a list of ids -> a directory."""

    def _make(shards, name="corpus", dtype="uint16", eos=2):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        entries = []
        for number, documents in enumerate(shards):
            with ShardWriter(directory, f"shard-{number:06d}", np.dtype(dtype)) as writer:
                for ids in documents:
                    writer.add(ids)
                entries.append(writer.close())
        facts = module.tokenizer_facts(characters(), "characters")
        manifest = {"format": "token shards", "version": 1, "dtype": dtype, "shards": entries}
        manifest |= {"tokenizer": facts, "policy": {"eos_id": eos}}
        (directory / "manifest.json").write_text(json.dumps(manifest))
        return directory

    return _make


def random_documents(seed, count, longest):
    generator = np.random.default_rng(seed)
    return [
        generator.integers(3, 60_000, generator.integers(1, longest + 1)).tolist()
        for _ in range(count)
    ]


def oracle(documents, seq_len, bos):
    """Rows made position by position: [(token, target, segment, position, True), ...] each."""
    stream = []
    for number, ids in enumerate(documents):
        sequence = ids if bos == "none" else [1, *ids]
        stream += [(x, y, number) for x, y in zip(sequence[:-1], sequence[1:], strict=True)]
    rows = []
    for start in range(0, len(stream), seq_len):
        row, segment, position, before = [], 0, 0, None
        for x, y, number in stream[start : start + seq_len]:
            segment, position = (segment + 1, 0) if number != before else (segment, position + 1)
            x = 1 if bos == "segment" and position == 0 else x
            row.append((x, y, segment, position, True))
            before = number
        rows.append(row + [(0, 0, 0, 0, False)] * (seq_len - len(row)))
    return np.asarray(rows)


@pytest.mark.parametrize("bos", ["segment", "document", "none"])
@pytest.mark.parametrize("longest, seq_len", [(1, 4), (3, 16), (40, 8), (300, 32), (7, 500)])
def test_rows_are_the_stream_cut_into_pieces(make, characters, bos, longest, seq_len):
    shards = [random_documents(seed, count, longest) for seed, count in enumerate((20, 1, 13))]
    corpus = open_corpus(make(shards))
    encoder = Encoder(characters(), bos)
    documents = [ids for shard in shards for ids in shard]
    expected = oracle(documents, seq_len, bos)
    if not len(expected):  # documents of one token, and no bos
        with pytest.raises(DataError, match="leave no token to predict"):
            TokenRows(whole(corpus), encoder, seq_len)
        return
    rows = TokenRows(whole(corpus), encoder, seq_len)
    assert len(rows) == len(expected) and rows.positions == (expected[..., 2] > 0).sum()
    order = np.random.default_rng(0).permutation(len(rows))  # any order: random access
    batch = rows.batch(order)
    for column, key in enumerate(KEYS[:4]):
        np.testing.assert_array_equal(batch[key], expected[order][..., column])
    np.testing.assert_array_equal(batch["loss_mask"], expected[order][..., 4] == 1)
    lengths = [[len(ids) - (bos == "none") for ids in shard] for shard in shards]
    assert [rows.where(position).split("shard-")[1] for position in range(rows.positions)] == [
        f"{i:06d}.tokens, document {d + 1}"
        for i, shard in enumerate(lengths)
        for d, n in enumerate(shard)
        for _ in range(n)
    ]


def test_fraction_holds_out_whole_documents_of_every_shard(make, characters):
    shards = [random_documents(seed, count, 30) for seed, count in enumerate((10, 1, 20, 9))]
    corpus = open_corpus(make(shards))
    training, held = split(corpus, 0.2)
    read = [
        [span.shard.document(d).tolist() for span in parts for d in range(span.first, span.last)]
        for parts in (training, held)
    ]
    assert len(read[1]) == 8 and len(read[0]) == 32
    assert read[1] == shards[0][8:] + shards[2][16:] + shards[3][7:]
    assert sorted(read[0] + read[1]) == sorted(ids for shard in shards for ids in shard)
    assert split(corpus, 0.0) == (whole(corpus), [])
    for fraction, count in ((1e-6, 1), (0.9999, 39)):  # at least one, and not all
        training, held = split(corpus, fraction)
        assert sum(span.last - span.first for span in held) == count
        assert sum(span.last - span.first for span in training) == 40 - count
    refused("validation_fraction=1.0", split, corpus, 1.0, error=DataError)
    with pytest.raises(DataError, match="1 document cannot be split"):
        split(open_corpus(make([[[5, 6]]], "one")), 0.5)


def test_every_target_once_an_epoch_in_a_new_order(make, characters):
    shards = [random_documents(seed, 30, 50) for seed in range(3)]
    config = {"task": "tokens", "path": str(make(shards)), "validation_fraction": 0.1}
    pipeline = make_pipeline(config, characters(), 4, 16, seed=5)
    epochs = list(pipeline.train_iterator(epochs=2))
    targets = np.concatenate([batch["targets"][batch["loss_mask"]] for batch in epochs])
    training = [ids for shard in shards for ids in shard[:27]]
    expected = np.sort(np.concatenate(training))
    np.testing.assert_array_equal(np.sort(targets), np.sort(np.tile(expected, 2)))
    rows = len(pipeline.train)
    seen = np.concatenate([batch["targets"] for batch in epochs])
    assert not np.array_equal(seen[:rows], seen[rows : 2 * rows])
    held = list(pipeline.validation_iterator())
    targets = np.concatenate([batch["targets"][batch["loss_mask"]] for batch in held])
    assert targets.tolist() == list(itertools.chain(*[i for s in shards for i in s[27:]]))
    assert len(take(pipeline.validation_iterator(1), 9)) == 1
    epoch = pipeline.train_iterator(epochs=1)
    assert len(list(epoch)) == -(-rows // 4) and epoch.counts.loss_tokens == len(expected)


@pytest.mark.parametrize(("documents", "epochs"), [(30, 1), (1, 7)])
def test_counts_follow_what_was_read(make, characters, documents, epochs):
    """Counts are right if a batch has the last, padded row several times."""
    shards = [random_documents(1, documents, 50)]
    config = {"task": "tokens", "path": str(make(shards)), "prefetch": 0}
    iterator = make_pipeline(config, characters(), 4, 16, 0).train_iterator(epochs=epochs)
    batches = list(iterator)
    assert iterator.counts.loss_tokens == sum(int(batch["loss_mask"].sum()) for batch in batches)


def test_one_row_a_step_without_end(make, characters):
    config = {"task": "tokens", "path": str(make([random_documents(1, 4, 30)])), "prefetch": 0}
    iterator = make_pipeline(config, characters(), 1, 16, 0).train_iterator()
    rows = [next(iterator)["tokens"] for _ in range(9)]  # a second epoch
    assert {row.shape for row in rows} == {(1, 16)}
    iterator.close()


def test_resumes_to_the_very_next_batch(make, characters):
    config = {"task": "tokens", "path": str(make([random_documents(s, 40, 60) for s in (1, 2)]))}

    def make(**rows):
        return make_pipeline(config, characters(), 8, 32, seed=3, **rows).train_iterator()

    iterator, states, batches = check_resumes(make, 25, (0, 1, 7, 24))  # several epochs
    # Another process's share and another order of rows: a position has the same number in both.
    share = make(rows=range(2, 5))
    share.set_state(json.loads(states[7]))
    for actual, batch in zip(take(share, 5), batches[7:], strict=False):
        assert same(actual, take_rows(batch, np.arange(2, 5)))
    share.close()
    for change, named in (
        ({"seed": 4}, "seed was 3, is 4"),
        ({"seq_len": 16}, "seq_len was 32, is 16"),
        ({"validation_fraction": 0.1}, "data_crc was"),
        ({"bos": "document"}, "bos was"),
    ):
        options = {"seq_len": 32, "seed": 3}
        options |= {key: change[key] for key in change if key in options}
        changed = config | {key: change[key] for key in change if key not in options}
        other = make_pipeline(changed, characters(), 8, **options).train_iterator()
        refused(named, other.set_state, json.loads(states[3]), error=DataError)
        other.close()
    iterator.close()


def test_a_validation_directory_of_its_own(make, characters):
    train, other = make([[[5, 6, 7]]], "train"), make([[[8, 9]], [[10]]], "other")
    config = {"task": "tokens", "path": str(train), "validation_path": str(other)}
    config |= {"validation_fraction": 0.5}  # no more rows are read
    pipeline = make_pipeline(config, characters(), 2, 4, 0)
    (batch,) = pipeline.validation_iterator()
    assert batch["targets"].tolist() == [[8, 9, 10, 0], [0, 0, 0, 0]]
    assert batch["tokens"].tolist() == [[1, 8, 1, 0], [0, 0, 0, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 2, 0], [0, 0, 0, 0]]
    (train.parent / "link").symlink_to(train)
    twice = config | {"validation_path": str(train.parent / "link")}
    refused("both read it", make_pipeline, twice, characters(), 2, 4, 0, error=DataError)


def test_uint32_holds_what_uint16_cannot(make, characters):
    assert module.token_dtype(65_536) == np.uint16 and module.token_dtype(65_537) == np.uint32
    directory = make([[[65_536, 4_000_000_000 // 2], [7]]], dtype="uint32")
    shard = open_corpus(directory).shards[0]
    assert shard.document(0).tolist() == [65_536, 2_000_000_000]
    assert (directory / "shard-000000.tokens").stat().st_size == 12


def test_a_work_directory_is_as_good_as_its_tokens(make, tmp_path):
    directory = make([[[5, 6]]])
    (tmp_path / "run").mkdir()
    shutil.move(directory, tmp_path / "run" / "tokens")
    assert open_corpus(tmp_path / "run").directory == tmp_path / "run" / "tokens"


def flipped(content):
    return content[:3] + bytes([content[3] ^ 1]) + content[4:]


# File of the second shard, the damage to its bytes, and the error message.
DAMAGES = {
    "truncated": ("tokens", lambda x: x[:-2], r"8 bytes, .* says 10 \(truncated\); run .*prepare"),
    "emptied": ("tokens", lambda x: b"", "empty; run .*_data.py with the same settings again"),
    "changed": ("tokens", flipped, "its SHA-256 is not the manifest's"),
    "index": ("documents", lambda x: x + b"\0", "25 bytes, but the manifest says 24; run"),
    "missing": ("documents", lambda x: None, "no such file"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_files(make, what):
    directory = make([[[5, 6]], [[7, 8, 9], [10, 11]]])
    suffix, change, message = DAMAGES[what]
    path = directory / f"shard-000001.{suffix}"
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    refused(f"000001.{suffix}: {message}", open_corpus, directory, error=DataError)
    if what == "changed":  # which this setting does not check
        assert open_corpus(directory, verify=False).shards[1].document(1).tolist() == [10, 11]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x["shards"][1].update(tokens=0), ".tokens: the manifest says that it is empty"),
        (lambda x: x.update(version=2), "'token shards' of version 2, this code .* version 1"),
        (lambda x: x.pop("format"), "manifest.json: not a manifest of token shards"),
        (lambda x: x.update(shards=[]), "corpus: no shards"),
    ],
)
def test_damaged_manifests(make, change, message):
    directory = make([[[5, 6]], [[7, 8, 9], [10, 11]]])
    open_corpus(directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    change(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    refused(message, open_corpus, directory, error=DataError)


def test_refusals(make, characters, bpe, tmp_path):
    config = {"task": "tokens", "path": str(make([[[5, 6]]]))}
    for change, tokenizer, seq_len, words in (
        ({}, bpe, 4, "made with the tokenizer of characters .*not this model's"),
        ({"packing": False}, characters(), 4, "set packing=True"),
        ({}, characters(), 1, "seq_len is 1"),
        ({"path": ""}, characters(), 4, "needs the directory of the shards, path is ''"),
        ({"path": str(tmp_path)}, characters(), 4, "no manifest.json; .*/prepare_data.py makes"),
    ):
        refused(words, make_pipeline, config | change, tokenizer, 2, seq_len, 0, error=DataError)
    words = "ids up to 1999, but model tiny has a vocabulary of 512"
    refused(words, module.check_vocabulary, bpe, 512, "tiny", error=DataError)
    module.check_vocabulary(bpe, 2000, "tiny")
    (tmp_path / "corpus" / "manifest.json").unlink()
    (tmp_path / "corpus" / "progress").mkdir()
    unfinished = "unfinished: run the same command again"
    refused(unfinished, open_corpus, tmp_path / "corpus", error=DataError)


def test_another_eos_is_said(make, characters, caplog):
    config = {"task": "tokens", "path": str(make([[[5, 6]]], eos=None))}
    make_pipeline(config, characters(), 2, 4, 0)
    assert "documents were prepared with eos None; this run's eos is 2" in caplog.text
