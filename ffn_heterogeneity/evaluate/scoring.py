"""Log-probabilities of continuations; shared prefixes are computed only once.

Requests (context, continuation) share prefixes: the answers of one question share the question, the
questions of one subject the few-shot examples. Sorted requests form the depth-first order of a tree
of tokens, which is laid out in rows: a request adds only the tokens that it does not share with the
previous one. A token sees only its ancestors (`subtree_ends` in the batch of `causal_lm.forward`),
and its position is its depth, so the results equal those of separate requests. Several trees share
a row: there is almost no padding, and a whole evaluation needs one or two compiled programs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.evaluate.inputs import OVERFLOW
from ffn_heterogeneity.models.causal_lm import RunOptions, forward, logits, require_decoder
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.generate import bucket, check_vocabulary
from ffn_heterogeneity.progress import bar

ROW_TOKENS = 512
# Float32 logits in memory at the same time.
LOGIT_BYTES = 2**28


class Score(NamedTuple):
    """log p of a continuation (nats, summed over tokens), and whether greedy decoding gives it."""

    logprob: float
    greedy: bool


@dataclasses.dataclass
class Row:
    """Tokens of several requests in depth-first order, and the requested probabilities.

    Attributes:
      tokens, positions: for each place; the position is the token's depth in its tree.
      ends: place after the token's last descendant: place t sees place s iff s <= t < ends[s].
      asked: {(place, token): index} for the probability of `token` after the token at `place`.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
    asked: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)


class RowPlan(NamedTuple):
    """Rows, and for every request (row, indices of its probabilities there)."""

    rows: list[Row]
    places: list[tuple[int, list[int]]]


def plan_rows(requests: Sequence[tuple[Sequence[int], Sequence[int]]], row_tokens: int) -> RowPlan:
    """Lay out requests (context ids, continuation ids) in rows of at most `row_tokens` places.

    Args:
      row_tokens: at least every request's length - 1 (its last token is only predicted).
    """
    inputs = [(*context, *continuation)[:-1] for context, continuation in requests]
    rows: list[Row] = []
    places: list[tuple[int, list[int]]] = [(0, [])] * len(requests)
    path: list[int] = []  # places of the previous request's tokens
    before: Sequence[int] = ()
    for i in sorted(range(len(requests)), key=inputs.__getitem__):
        ids = inputs[i]
        shared = _shared(before, ids) if rows else 0
        if not rows or len(rows[-1].tokens) + len(ids) - shared > row_tokens:
            rows.append(Row())
            path, shared = [], 0
        row = rows[-1]
        del path[shared:]
        for depth in range(shared, len(ids)):
            path.append(len(row.tokens))
            row.tokens.append(ids[depth])
            row.positions.append(depth)
            row.ends.append(0)
        for place in path:  # provisional: later descendants move it
            row.ends[place] = len(row.tokens)
        context, continuation = requests[i]
        asked = [
            row.asked.setdefault((path[len(context) - 1 + j], token), len(row.asked))
            for j, token in enumerate(continuation)
        ]
        places[i] = len(rows) - 1, asked
        before = ids
    return RowPlan(rows, places)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def score(
    config: ModelConfig,
    params: dict,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    options: RunOptions = RunOptions(),
    batch_tokens: int = 2048,
    progress: str | None = "score",
) -> list[Score]:
    """Compute log p(continuation | context) of every request, in nats.

    Args:
      params: stacked tree, on the device.
      requests: (context ids, continuation ids), neither empty.
      batch_tokens: tokens per batch.
      progress: label of the progress bar; None: no bar.

    Raises:
      ValueError: an empty context or continuation, an id outside the vocabulary, a request longer
        than the model's positions, or a NaN among the logits.
    """
    if not requests:
        return []
    longest = _check(config, requests)
    width = bucket(max(min(ROW_TOKENS, batch_tokens), longest), config.row_limit)
    plan = plan_rows(requests, width)
    size = max(1, min(batch_tokens // width, len(plan.rows)))
    batches = [plan.rows[start : start + size] for start in range(0, len(plan.rows), size)]
    # One size for all batches, so one program.
    pairs = bucket(max(sum(len(row.asked) for row in rows) for rows in batches))
    scores: list[tuple[np.ndarray, np.ndarray]] = []
    with bar(progress, total=len(requests)) as shown:
        in_row = np.bincount([row for row, _ in plan.places], minlength=len(plan.rows))
        for rows in batches:
            done = len(scores)
            scores += _score_rows(config, options, params, rows, (size, width, pairs))
            shown.update(int(in_row[done : len(scores)].sum()))
    return [
        Score(float(scores[row][0][asked].sum(dtype=np.float64)), bool(scores[row][1][asked].all()))
        for row, asked in plan.places
    ]


def _check(config: ModelConfig, requests) -> int:
    """Check the requests and return the longest input's length."""
    require_decoder(config, "scoring of continuations")
    longest = 0
    for i, (context, continuation) in enumerate(requests):
        if not len(context) or not len(continuation):
            raise ValueError(f"request {i}: context and continuation need at least one token")
        size = len(context) + len(continuation) - 1
        if size > config.max_position:
            raise ValueError(
                f"request {i} has {size} tokens, the model {config.max_position} positions"
            )
        check_vocabulary([*context, *continuation], config.vocab_size, f"request {i}: ")
        longest = max(longest, size)
    return longest


def _score_rows(config, options, params, rows, sizes) -> list[tuple]:
    """[(log-probabilities, whether likeliest)] of the tokens requested in each row.

    Args:
      sizes: number of rows, their width, and number of requested pairs, all with padding.
    """
    size, width, count = sizes
    names = ("tokens", "positions", "subtree_ends")
    batch = {name: np.zeros((size, width), np.int32) for name in names}
    # Padding sees itself, so that no softmax is over an empty set.
    batch["subtree_ends"][:] = np.arange(1, width + 1)
    asked = []
    for b, row in enumerate(rows):
        places = len(row.tokens)
        batch["tokens"][b, :places] = row.tokens
        batch["positions"][b, :places] = row.positions
        batch["subtree_ends"][b, :places] = row.ends
        asked += [(b * width + place, token) for place, token in row.asked]
    pairs = np.zeros((count, 2), np.int32)
    pairs[: len(asked)] = asked
    scores = jax.device_get(_asked_scores(config, options, params, batch, pairs))
    logprobs, greedy = (values[: len(asked)] for values in scores)
    if np.isnan(logprobs).any():
        raise ValueError(f"the log-probabilities are NaN: {OVERFLOW}")
    splits = np.cumsum([len(row.asked) for row in rows])[:-1]
    return list(zip(np.split(logprobs, splits), np.split(greedy, splits), strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _asked_scores(config, options, params, batch, pairs_n2):
    """(log p, whether the token is the likeliest) of `pairs`: (flat place, token), both [N]."""
    hidden = forward(config, params, batch, options=options)["hidden"]
    hidden_pd = hidden.reshape(-1, hidden.shape[-1])
    count = pairs_n2.shape[0]
    # A power of two, or 1.5 times one, like the buckets, so that it divides them.
    chunk = 1
    while chunk * 2 * config.vocab_size * 4 <= LOGIT_BYTES and count % (chunk * 2) == 0:
        chunk *= 2

    def some(pairs_c2):
        place_c, token_c = pairs_c2[:, 0], pairs_c2[:, 1]
        logits_cv = logits(config, params, hidden_pd[place_c])
        target_c = jnp.take_along_axis(logits_cv, token_c[:, None], axis=-1)[:, 0]
        logprob_c = target_c - jax.nn.logsumexp(logits_cv, axis=-1)
        return logprob_c, jnp.argmax(logits_cv, axis=-1) == token_c

    logprob, greedy = jax.lax.map(some, pairs_n2.reshape(-1, chunk, 2))
    return logprob.reshape(-1), greedy.reshape(-1)
