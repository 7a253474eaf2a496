"""Weighted mixtures of a text, prompts with responses, and token shards."""

import itertools
import json

import numpy as np
import pytest
from batch_tools import same
from test_shards import make  # noqa: F401 (a fixture)
from tiny_runs import refused

from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.weighted import draws

WEIGHTS = (0.5, 0.3, 0.2)
# A token identifies its member: letters, digits, capitals.
KINDS = (range(100, 126), range(51, 61), range(1003, 1030))


@pytest.fixture
def mixture(make, write):  # noqa: F811
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + i) for i in rng.integers(0, 26, 40)) for _ in range(30)]
    pairs = [{"prompt": f"{i}" * 3, "response": f"{i * i}" * 4} for i in range(40)]
    shards = [[rng.integers(1003, 1030, 25).tolist() for _ in range(40)]]
    return (
        ("text", write("words.jsonl", [{"text": text} for text in words]), WEIGHTS[0]),
        ("jsonl", write("pairs.jsonl", pairs), WEIGHTS[1]),
        ("tokens", str(make(shards)), WEIGHTS[2]),
    )


def pipeline(mixture, characters, rows=None, seed=3, **more):
    config = {"task": "mixture", "mixture": mixture, **more}
    return make_pipeline(config, characters(), 8, 24, seed, rows=rows)


def members(batch):
    """The mixture's member of each row, from its tokens; a row never mixes members."""
    row_members = []
    for row, mask in zip(batch["targets"], batch["segment_ids"] > 0, strict=True):
        kinds = {k for k, ids in enumerate(KINDS) if {*row[mask].tolist()} & {*ids}}
        assert len(kinds) == 1
        row_members += kinds
    return row_members


def test_shares_after_2000_rows(mixture, characters):
    iterator = pipeline(mixture, characters).train_iterator()
    rows = [m for batch in itertools.islice(iterator, 250) for m in members(batch)]
    counts = np.bincount(rows, minlength=3)
    assert len(rows) == 2000 and list(counts) == [1000, 600, 400]
    assert list(iterator.shares.values()) == list(WEIGHTS)
    iterator.close()
    # In proportion: within one row of each share at every step.
    far = np.cumsum(np.eye(3)[rows], axis=0) - np.outer(np.arange(1, 2001), WEIGHTS)
    assert np.abs(far).max() < 1


@pytest.mark.parametrize("weights", [(1, 1), (7, 1, 1, 1), (0.001, 5), (3, 1e-9, 2)])
def test_draws_keep_every_share(weights):
    counts = [0] * len(weights)
    for n, _ in enumerate(itertools.islice(draws(weights, counts), 3000), 1):
        far = np.subtract(counts, n * np.array(weights) / sum(weights))
        assert np.abs(far).max() < len(weights) - 1 + 1e-9


@pytest.mark.parametrize("at", [1, 7, 30])
def test_killed_and_resumed_on_two_processes(mixture, characters, at):
    uninterrupted = pipeline(mixture, characters).train_iterator()
    batches = list(itertools.islice(uninterrupted, 40))
    uninterrupted.close()
    first = pipeline(mixture, characters).train_iterator()
    assert all(same(a, b) for a, b in zip(itertools.islice(first, at), batches, strict=False))
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    for rows in (slice(0, 4), slice(4, 8)):
        twin = pipeline(mixture, characters, rows=np.arange(8)[rows]).train_iterator()
        twin.set_state(state)
        for batch in batches[at:]:
            assert same(next(twin), {key: value[rows] for key, value in batch.items()})
        assert twin.get_state()["counts"] == [160, 96, 64]
        twin.close()


def test_validation_is_every_members_held_out_part_once(mixture, characters):
    data = pipeline(mixture, characters, validation_fraction=0.2)
    batches = list(data.validation_iterator())
    assert all(same(a, b) for a, b in zip(batches, data.validation_iterator(), strict=True))
    real = [{k: v[v_rows(batch)] for k, v in batch.items()} for batch in batches]
    kinds = [member for batch in real for member in members(batch)]
    passes = [pipeline.validation_iterator() for _, _, pipeline in data.members]
    alone = [sum(v_rows(batch).sum() for batch in one) for one in passes]
    assert list(np.bincount(kinds, minlength=3)) == alone and min(alone) > 0
    assert len(list(data.validation_iterator(1))) == 1
    assert pipeline(mixture, characters).held_out is None


def v_rows(batch):
    return (batch["segment_ids"] > 0).any(axis=1)


@pytest.mark.parametrize("more", [{"task": "jsonl"}, {"path": "a.jsonl"}])
def test_a_mixture_has_its_own_tasks_and_files(mixture, characters, more):
    refused("mixture has its own", pipeline, mixture, characters, **more, error=DataError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: (), "two members"),
        (lambda m: m[:1], "two members"),
        (lambda m: (m[0], m[0]), "twice"),
        (lambda m: (m[0], ("text", "x.txt")), r"\('text', 'x.txt'\) is not"),
        (lambda m: (m[0], (*m[1][:2], 0)), "not positive"),
        (lambda m: (m[0], (*m[1][:2], "nan")), "not positive"),
        (lambda m: (m[0], (*m[1][:2], "much")), "is not"),
        (lambda m: (m[0], (*m[1][:2], 10**400)), "is not"),
        (lambda m: ((*m[0][:2], 1e308), (*m[1][:2], 1e308)), "more than a float"),
        (lambda m: (m[0], ("text", "gone.txt", 1)), "gone.txt"),
        (lambda m: (m[0], ("texd", m[0][1], 1)), "texd"),
        (lambda m: 7, "mixture"),
    ],
)
def test_refusals(mixture, characters, change, words):
    refused(words, pipeline, change(mixture), characters, error=DataError)


def test_a_state_of_another_mixture(mixture, characters):
    one = pipeline(mixture, characters).train_iterator()
    next(one)
    heavier = (mixture[0], mixture[1], (*mixture[2][:2], 0.9))
    other = pipeline(heavier, characters).train_iterator()
    reseeded, wrong = pipeline(mixture, characters, seed=4), {"error": DataError}
    refused("cannot resume.*0.2.*0.9", other.set_state, one.get_state(), **wrong)
    refused("no end", pipeline(mixture, characters).train_iterator, 3, **wrong)
    refused("cannot resume", reseeded.train_iterator().set_state, one.get_state(), **wrong)
    one.close()
    other.close()
