"""Calibration on chats that a model writes with itself."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from tiny_models import byte_tokenizer, random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.surgery import SURGERIES, own_text
from ffn_heterogeneity.surgery.calibration import calibration_rows, write_rows
from ffn_heterogeneity.surgery.own_text import CHAT, own_rows

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LLAMA = dataclasses.replace(tiny_of("llama", layers=2), vocab_size=258)
TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"


def model_of(template=TEMPLATE, seed=0, **changed):
    params = jax.tree.map(np.array, random_params(LLAMA, seed=seed))
    params["embed"]["embedding"] *= 4  # predictions that differ from token to token
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Model(dataclasses.replace(LLAMA, **changed), params, tokenizer, "tiny")


def parts(model, row):
    """(question, answer) of a row, as places [start, stop)."""
    ids = model.tokenizer.encode
    opening, reply = [0, *ids("<user>")], [1, *ids("<assistant>")]
    assert row[: len(opening)].tolist() == opening
    end = row[len(opening) :].tolist().index(1) + len(opening)
    assert row[end : end + len(reply)].tolist() == reply[: len(row) - end]
    return (len(opening), end), (end + len(reply), len(row))


def test_chats_have_the_form_of_the_template(monkeypatch):
    model = model_of()
    rows = own_rows(model, 2000, seed=3, form=CHAT)
    assert sum(len(row) - 1 for row in rows) == 2000
    places = [parts(model, row) for row in rows[:-1]]
    assert all(start < stop <= start + own_text.QUESTION for (start, stop), _ in places)
    assert all(start < stop <= start + own_text.ANSWER for _, (start, stop) in places)
    again, other = (own_rows(model, 2000, seed=seed, form=CHAT) for seed in (3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(rows, other, strict=False))
    monkeypatch.setattr(own_text, "BATCH", 2)  # several rounds, each with other draws
    many = own_rows(model, 3000, seed=3, form=CHAT)
    assert len(many) > 4 and len({row.tobytes() for row in many}) == len(many)


def test_questions_and_answers_are_drawn_where_they_stand():
    """Their mean NLL in the whole row is the entropy of the model's predictions there."""
    model, said, entropies = model_of(), [], []
    run = jax.jit(functools.partial(causal_lm.forward, model.config))
    for row in own_rows(model, 20_000, seed=2, form=CHAT)[:-1]:
        padded = np.pad(row, (0, 513 - len(row)))[None]
        hidden = run(model.params, {"tokens": padded})["hidden"][0, : len(row)]
        logits = np.asarray(causal_lm.logits(model.config, model.params, hidden), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for start, stop in parts(model, row):
            said.append(-log_p[np.arange(start, stop) - 1, row[start:stop]])
            at = log_p[start - 1 : stop - 1]
            entropies.append(-(np.exp(at) * at).sum(-1))
    said, entropies = np.concatenate(said), np.concatenate(entropies)
    error = np.std(said - entropies) / np.sqrt(len(said))
    assert abs(said.mean() - entropies.mean()) < 4 * error
    assert error < 0.02 and entropies.mean() < 5.3  # of ln 258 = 5.55


def test_a_question_ends_where_the_answer_would_begin():
    """Also where the template's header is ordinary text, as in [INST] what? [/INST]."""
    model = model_of("{{ bos_token }}Q:{% for m in messages %}{{ m['content'] }}~{% endfor %}")
    ids, most = model.tokenizer.encode, own_text.QUESTION
    (header,), opening = ids("~"), [0, *ids("Q:")]
    rows = own_rows(model, 20_000, seed=1, form=CHAT)[:-1]
    behind = [row[len(opening) :].tolist() for row in rows]
    assert all(row[: len(opening)].tolist() == opening for row in rows)
    # A header within a question would be an answer longer than any.
    assert all(len(one) <= one.index(header) + 1 + own_text.ANSWER for one in behind)
    assert any(one.index(header) < most and len(one) > most + 1 for one in behind)


def test_an_answer_ends_with_its_turn():
    """By the template's token, which the model's config need not name."""
    model = model_of(TEMPLATE.replace("{{ eos_token }}", "<|end|>"), vocab_size=259)
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    params = random_params(model.config, seed=0)
    rows = own_rows(dataclasses.replace(model, params=params), 8000, seed=1, form=CHAT)
    ended = [np.flatnonzero(row == 258) for row in rows[:-1]]
    assert all(len(at) <= 2 for at in ended) and any(len(at) == 2 for at in ended)
    assert all(at[1] == len(row) - 1 for at, row in zip(ended, rows, strict=False) if len(at) > 1)


def test_a_classifier_writes_nothing():
    model = model_of(lm_head=False)
    for form in own_text.WRITTEN:
        refused("is a classifier and writes nothing", own_rows, model, 600, form=form)


def test_a_removal_keeps_the_chats_and_reads_them_again(tmp_path):
    model = model_of()
    asked = {"criterion": "mean_state", "calibration": CHAT, "calibration_tokens": 600}
    smaller, report = SURGERIES["prune"](model, asked)
    write_rows(tmp_path / "chats.jsonl", report["own_rows"])
    again = calibration_rows(model, str(tmp_path / "chats.jsonl"))
    assert all(np.array_equal(a, b) for a, b in zip(report["own_rows"], again, strict=True))
    read = asked | {"calibration": str(tmp_path / "chats.jsonl")}
    np.testing.assert_array_equal(
        *(jax.tree.leaves(x.params)[-1] for x in (smaller, SURGERIES["prune"](model, read)[0]))
    )


def test_short_positions_leave_room_for_an_answer():
    model = model_of(max_position=64)
    rows = own_rows(model, 300, form=CHAT)
    assert max(map(len, rows)) <= 64
    assert all(stop > start for row in rows[:-1] for start, stop in parts(model, row)[1:])


@pytest.mark.parametrize(
    ("template", "changed", "message"),
    [
        (None, {}, "has no chat template: give own or a text file"),
        ("one text for all", {}, "no place for a question: it writes 'one text for all'"),
        (TEMPLATE.replace("{{ eos", "{{ m['content'] }}{{ eos"), {}, "no place for a question"),
        ("{{ messages[0]['content'] }}", {}, "no place for a question"),
        (TEMPLATE, {"max_position": 20}, "no place for a question: .* of at most 20 tokens"),
        (
            "{{ raise_exception('no users') }}",
            {},
            "rejects the conversation .no users.; give own or",
        ),
    ],
)
def test_templates_without_a_place_for_a_question(template, changed, message):
    refused(message, own_rows, model_of(template, **changed), 600, form=CHAT)
