"""Helpers for batches: comparison, the first few, their documents, and resuming."""

import itertools
import json

import numpy as np


def same(first, second):
    """True if two batches are equal bit by bit, dtypes included."""
    pairs = [(first[key], second[key]) for key in first] if first.keys() == second.keys() else []
    return bool(pairs) and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def texts_of(batches, key):
    """Each packed document as text, in order of appearance (the Characters tokenizer)."""
    texts = []
    for batch in batches:
        for tokens, ids in zip(batch[key], batch["segment_ids"], strict=True):
            for segment in range(1, ids.max() + 1):
                texts.append("".join(chr(i - 3) for i in tokens[ids == segment] if i > 2))
    return texts


def check_resumes(make, count, steps):
    """Iterators of `make()` resume from the states of one: (it, its states, its batches)."""
    iterator, states, batches = make(), [], []
    for _ in range(count):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    assert not same(batches[0], batches[1])
    for step in steps:
        again = make()
        again.set_state(json.loads(states[step]))
        rest = take(again, count - step)
        assert all(map(same, rest, batches[step:])) and len(rest) == count - step, step
        again.close()
    return iterator, states, batches
