"""Requests that share prefixes get the same scores as single requests."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from scipy.special import log_softmax
from tiny_models import LLAMA, random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.evaluate.scoring import _asked_scores, plan_rows, score
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def requests_of(seed: int = 0, vocab: int = 29) -> list[tuple[list[int], list[int]]]:
    """Questions with four answers after few-shot examples (some equal), and one short request."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(3):
        shots = rng.integers(0, vocab, 6).tolist()
        for _ in range(3):
            question = shots + rng.integers(0, vocab, rng.integers(1, 5)).tolist()
            answers = [rng.integers(0, vocab, n).tolist() for n in (1, 1, 4, 2)]
            requests += [(question, answer) for answer in [*answers, answers[2]]]
    requests.append(([3], [5]))
    return [requests[i] for i in rng.permutation(len(requests))]


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens):
    hidden = causal_lm.forward(config, params, {"tokens": tokens})["hidden"]
    return causal_lm.logits(config, params, hidden)


def alone(config, params, context, continuation) -> tuple[float, bool]:
    """Scores from the logits of the whole row, in float64."""
    ids = context + continuation
    # Later tokens do not matter, and one length compiles once.
    row = np.array([ids + [0] * (24 - len(ids))])
    logits = np.asarray(logits_of(config, params, row)[0], np.float64)
    logits = logits[len(context) - 1 : len(ids) - 1]
    chosen = log_softmax(logits, axis=-1)[np.arange(len(continuation)), continuation]
    return chosen.sum(), bool((logits.argmax(-1) == continuation).all())


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt2", "llama"])
def test_scores_equal_those_of_each_request_alone(name):
    config = dataclasses.replace(LLAMA, vocab_size=29, layers=(LayerConfig(12),) * 2)
    config = config if name == "llama" else tiny_of(name, layers=4)
    params, requests = random_params(config), requests_of()
    # A greedy continuation among them.
    context = requests[0][0]
    row = np.array([context + [0] * (24 - len(context))])
    likeliest = int(logits_of(config, params, row)[0, len(context) - 1].argmax())
    requests.append((context, [likeliest]))
    scores = score(config, params, requests, batch_tokens=32, progress=None)
    lengths = {len(context + continuation) for context, continuation in requests}
    assert max(lengths) > 3  # longer than Gemma's windows here
    for request, (logprob, greedy) in zip(requests, scores, strict=True):
        expected = alone(config, params, *request)
        assert abs(logprob - expected[0]) <= 1e-4, request
        assert greedy == expected[1], request
    assert scores[-1].greedy


def test_what_is_shared_is_computed_once():
    requests = requests_of()
    plan = plan_rows(requests, row_tokens=48)
    inputs = {tuple(c + a)[:n] for c, a in requests for n in range(1, len(c + a))}
    laid = sum(len(row.tokens) for row in plan.rows)
    assert max(len(row.tokens) for row in plan.rows) <= 48
    # Every distinct prefix once, except those that two rows share.
    assert len(inputs) <= laid <= len(inputs) + 16 * (len(plan.rows) - 1)
    assert laid < sum(len(c + a) - 1 for c, a in requests) / 2
    one = plan_rows(requests, row_tokens=10_000)
    assert len(one.rows) == 1 and len(one.rows[0].tokens) == len(inputs)
    # Equal pairs of question and answer are scored once.
    places = [(c + a, n) for c, a in requests for n in range(len(c), len(c + a))]
    assert len(one.rows[0].asked) == len({(tuple(ids[:n]), ids[n]) for ids, n in places})


def test_one_program_for_any_requests():
    """A width that no other test here uses: one or two programs, by the scores per batch."""
    config = dataclasses.replace(LLAMA, layers=(LayerConfig(13),))
    params, before = random_params(config), _asked_scores._cache_size()
    for seed in (1, 2, 3):
        score(config, params, requests_of(seed, 258)[:40], batch_tokens=64, progress=None)
    assert 1 <= _asked_scores._cache_size() - before <= 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (([], [1]), "request 1: context and continuation need at least one"),
        (([1], []), "request 1: context and continuation need at least one"),
        (([1], [258]), "request 1: token id 258 is outside the vocabulary of 258"),
        (([-1], [2]), "request 1: token id -1 is outside"),
        (([1] * 128, [2]), None),
        (([1] * 128, [2, 3]), "request 1 has 129 tokens, the model 128 positions"),
    ],
)
def test_requests_that_cannot_be(request_, message):
    config = dataclasses.replace(LLAMA, layers=(LayerConfig(12),))
    params = random_params(config)
    requests = [([1], [2]), request_]
    if message is None:
        assert len(score(config, params, requests, batch_tokens=64, progress=None)) == 2
    else:
        refused(message, score, config, params, requests, batch_tokens=64, progress=None)


def test_nan_weights_are_said():
    config = dataclasses.replace(LLAMA, layers=(LayerConfig(12),))
    params = random_params(config)
    params["final_norm"]["scale"] = np.full(16, np.nan, np.float32)
    with pytest.raises(ValueError, match="log-probabilities are NaN"):
        score(config, params, [([1], [2])], batch_tokens=64, progress=None)
    assert score(config, params, [], progress=None) == []
