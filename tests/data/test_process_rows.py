"""Several processes share one stream of tokens, for any number of them and any resume point."""

import collections
import itertools
import json

import numpy as np
import pytest
from batch_tools import same

from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError

DOCUMENTS = 103


@pytest.fixture
def lettered(write):
    """Documents of 1 to 13 characters without common ones: a token identifies its document.

    So a token that is lost or repeated shows, whatever row it was packed into.
    """
    texts = [
        "".join(chr(1000 + 20 * i + j) for j in range(1 + 7 * i % 13)) for i in range(DOCUMENTS)
    ]
    return write("lettered.jsonl", [{"text": text} for text in texts])


@pytest.fixture
def paired(write):
    records = [{"prompt": f"{i}:", "response": chr(1000 + i) * (1 + i % 5)} for i in range(57)]
    return write("paired.jsonl", records)


def share(batch_size, index, count, accumulation=1):
    """The rows of process `index` on a mesh: an equal part of every micro-batch."""
    parts = np.arange(batch_size).reshape(accumulation, count, -1)
    return parts[:, index].reshape(-1)


def iterators(config, tokenizer, batch_size, seq_len, count, accumulation=1, epochs=None):
    """One iterator per process."""
    shares = [share(batch_size, index, count, accumulation) for index in range(count)]
    sizes = (tokenizer, batch_size, seq_len, 5)
    pipelines = [make_pipeline(config, *sizes, rows=x, accumulation=accumulation) for x in shares]
    return [pipeline.train_iterator(epochs) for pipeline in pipelines]


def cut(batch, accumulation):
    """[B, T] -> [A, B / A, T], as the training loop does."""
    return {k: v.reshape(accumulation, -1, v.shape[-1]) for k, v in batch.items()}


def join(shares, accumulation):
    """The processes' rows of one batch -> the global batch [A, B / A, T]."""
    shares = [cut(share, accumulation) for share in shares]
    return {key: np.concatenate([share[key] for share in shares], axis=1) for key in shares[0]}


def step(processes, accumulation=1):
    """The next global batch of these processes, whose states must agree."""
    batch = join([next(process) for process in processes], accumulation)
    states = [process.get_state() for process in processes]
    assert all(state == states[0] for state in states)
    return batch


def close(processes):
    for process in processes:
        process.close()


def tokens_of(batch):
    """Count of each token among the targets of a batch."""
    return collections.Counter(batch["targets"][batch["loss_mask"]].tolist())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("task, accumulation", [("text", 1), ("text", 2), ("jsonl", 2)])
@pytest.mark.parametrize("count", [2, 4])
def test_the_rows_of_processes_are_the_batches_of_one(
    lettered, paired, characters, task, accumulation, count, packing
):
    path = lettered if task == "text" else paired
    config = {"path": path, "task": task, "packing": packing}
    sizes = (8, 16)
    [alone] = iterators(config, characters(), *sizes, 1, epochs=3)
    batches = [cut(batch, accumulation) for batch in alone]
    processes = iterators(config, characters(), *sizes, count, accumulation, epochs=3)
    shares = [list(process) for process in processes]
    assert len(batches) > 8 and {len(share) for share in shares} == {len(batches)}
    for batch, *parts in zip(batches, *shares, strict=True):
        assert all(len(shard["tokens"]) == 8 // count for shard in parts)
        assert same(batch, join(parts, accumulation))
    assert not same(batches[0], batches[1])


@pytest.mark.parametrize("data", ["gsm8k", "lettered", "paired"])
def test_a_state_goes_on_with_any_number_of_processes(request, shared_data, bpe, characters, data):
    """GSM8K within an epoch; the small files (about 6 and 3 batches per epoch) over several."""
    if data == "gsm8k":
        path, tokenizer, seq_len = str(shared_data / "gsm8k" / "test.jsonl"), bpe, 256
    else:
        path, tokenizer, seq_len = request.getfixturevalue(data), characters(), 16
    config = {"task": {"lettered": "text", "paired": "jsonl"}.get(data, data), "path": path}
    sizes, accumulation, saved_at = (8, seq_len), 2, 9
    [alone] = iterators(config, tokenizer, *sizes, 1)
    batches = [cut(next(alone), accumulation) for _ in range(16)]
    alone.close()
    first = iterators(config, tokenizer, *sizes, 2, accumulation)
    for batch in batches[:saved_at]:
        assert same(batch, step(first, accumulation))
    saved = json.dumps(first[1].get_state())
    assert saved == json.dumps(first[0].get_state()) and "process" not in saved
    close(first)
    for count in (1, 4):
        # The split into micro-batches may change, too: the global batches are equal.
        for parts in (accumulation, 1):
            later = iterators(config, tokenizer, *sizes, count, parts)
            for process in later:
                process.set_state(json.loads(saved))
            for batch in batches[saved_at:]:
                rows = {key: value.reshape(-1, seq_len) for key, value in batch.items()}
                assert same(cut(rows, parts), step(later, parts))
            close(later)


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_on_changing_processes_has_every_token_once(lettered, characters, packing):
    with open(lettered, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    expected = collections.Counter(ord(c) + 3 for text in texts for c in text)
    expected[2] = DOCUMENTS  # the ends of the documents
    config = {"path": lettered, "packing": packing, "bos": "document"}
    # An epoch on one number of processes, then one whose number changes at every third batch.
    for counts in ([1], [2], [4], [2, 1, 4]):
        actual, batches, state = collections.Counter(), 0, None
        for count in itertools.cycle(counts):
            processes = iterators(config, characters(), 4, 16, count, epochs=1)
            for process in processes:
                if state is not None:
                    process.set_state(state)
            for _ in range(3):
                shares = [next(process, None) for process in processes]
                if None in shares:
                    break
                batches += 1
                actual.update(tokens_of(join(shares, 1)))
            state = processes[-1].get_state()
            close(processes)
            if None in shares:
                break
        assert shares == [None] * count, "all processes end together"
        assert batches >= 11 and actual == expected, counts


def test_validation_rows(shared_data, bpe):
    config = {"task": "gsm8k", "path": str(shared_data / "gsm8k" / "test.jsonl")}
    config["validation_fraction"] = 0.05

    def batches(**options):
        return list(make_pipeline(config, bpe, 8, 256, 5, **options).validation_iterator())

    expected = batches()
    for count, accumulation in ((2, 1), (2, 2), (4, 2)):
        parts = [share(8, index, count, accumulation) for index in range(count)]
        shares = [batches(rows=rows, accumulation=accumulation) for rows in parts]
        for batch, *parts in zip(expected, *shares, strict=True):
            assert same(cut(batch, accumulation), join(parts, accumulation))


def test_rows_the_caller_chooses(lettered, characters):
    def first(**options):
        pipeline = make_pipeline({"path": lettered}, characters(), 8, 16, 0, **options)
        with_rows = pipeline.train_iterator()
        batch = next(with_rows)
        with_rows.close()
        assert len(pipeline.rows) == len(batch["tokens"])
        return batch

    full_batch = first()
    for rows in (range(2, 4), range(8), [6, 1], np.array([0, 1, 4, 5]), range(7, 3, -1)):
        assert same(first(rows=rows), {k: v[rows] for k, v in full_batch.items()})
    rows = [1, 0, 5, 4]
    assert same(first(rows=rows, accumulation=2), {k: v[rows] for k, v in full_batch.items()})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"accumulation": 3}, "batch_size is 8; .* multiple of the 3 micro-batches.*as 9 is"),
        ({"accumulation": 3, "rows": [0]}, "batch_size is 8; .* multiple of the 3 micro-batches"),
        ({"accumulation": 0}, "accumulation=0 must be a number in"),
        ({"rows": []}, r"rows is \[\]; it must be a sequence of"),
        ({"rows": [0.5]}, r"rows is \[0.5\]; it must be a sequence of"),
        ({"rows": [True, False]}, "it must be a sequence"),
        ({"rows": [0, 8]}, r"rows is \[0, 8\]; it must hold different rows .* 0 .. 7"),
        ({"rows": [-1]}, "it must hold different rows"),
        ({"rows": [3, 3]}, "it must hold different rows"),
        ({"rows": np.arange(9).repeat(9)}, "it must hold different rows"),
        ({"rows": range(4, 4)}, "it must be a sequence of one or more"),
        ({"rows": [0, 1], "accumulation": 2}, "equally many rows of each micro-batch"),
        ({"rows": [4, 0], "accumulation": 2}, r"micro-batch \(4 rows .*\), in their order"),
        ({"rows": [0, 4, 5], "accumulation": 2}, "equally many rows of each micro-batch"),
    ],
)
def test_bad_rows(lettered, characters, options, message):
    with pytest.raises(DataError, match=message) as caught:
        make_pipeline({"path": lettered}, characters(), 8, 16, 0, **options)
    assert "\n" not in str(caught.value)


def test_fewer_records_than_processes(write, characters):
    config = {"path": write("one.txt", "a single record")}
    processes = iterators(config, characters(), 4, 8, 4, epochs=1)
    assert [len(list(process)) for process in processes] == [1] * 4


def test_counts_are_those_of_all_processes(lettered, characters):
    config = {"path": lettered, "packing": False}
    pipelines = [
        make_pipeline(config, characters(), 4, 16, 0, rows=rows) for rows in (None, range(2, 4))
    ]
    alone, shared = (pipeline.train_iterator(epochs=1) for pipeline in pipelines)
    assert len(list(alone)) == len(list(shared)) == 26
    assert alone.counts == shared.counts and alone.counts.documents == DOCUMENTS
