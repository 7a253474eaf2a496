"""Conversations: exactly the assistant's tokens are in the loss, and packed rows are separate."""

import json
import logging

import jax
import numpy as np
import pytest
from tiny_models import LLAMA, byte_tokenizer, our_logits, random_params
from tiny_runs import refused

from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks import Fields, get_task, messages
from ffn_heterogeneity.data.tasks.messages import Message, encode_conversation, end_of_turn
from ffn_heterogeneity.io.gguf.tokenizer import read_tokenizer
from ffn_heterogeneity.models import causal_lm

# Gemma's turns: no role of the system (its text opens the first turn), "model" for the assistant.
GEMMA = (
    "{{ bos_token }}{% set ns = namespace(lead='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.lead = m['content'] + '\n\n' %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' + ns.lead"
    " + m['content'] | trim + '<end_of_turn>\n' }}{% set ns.lead = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TALK = (
    Message("system", "Be brief."),
    Message("user", "Name a colour."),
    Message("assistant", "Red, I say."),
    Message("user", "Another?"),
    Message("assistant", "```python\nprint('blue')\n```"),
)


def plain(turns):
    return [{"role": role, "content": content} for role, content in turns]


def talk(*contents):
    roles = ("user", "assistant")
    return {"messages": plain((roles[i % 2], text) for i, text in enumerate(contents))}


def said_by(*roles):
    return {"messages": plain(zip(roles, "xyz", strict=False))}


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return read_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def gemma3(gemma3_tokenizer):
    before, gemma3_tokenizer.chat_template = gemma3_tokenizer.chat_template, GEMMA
    yield gemma3_tokenizer
    gemma3_tokenizer.chat_template = before


@pytest.fixture(scope="module")
def llama1():
    """SentencePiece that adds a space before every text and after every special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = "▁abcdefghijklmnopqrstuvwxyz<|>\n:ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    pieces = ["<unk>", "<s>", "</s>", *letters, "▁h", "▁hi", "\n▁"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "i"), ("\n", "▁")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(spaces)
    made.add_special_tokens([AddedToken(t, normalized=False) for t in pieces[:3]])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def shown(tokenizer, ids, scored):
    """Each run of consecutive scored tokens as text."""
    stretches, before = [], False
    for token, of_turn in zip(ids, scored, strict=True):
        if of_turn and not before:
            stretches.append([])
        if of_turn:
            stretches[-1].append(token)
        before = of_turn
    return [tokenizer.decode(one) for one in stretches]


# ---- the mask


@pytest.mark.parametrize(
    ("name", "template", "end"),
    [
        ("smollm2", "auto", "<|im_end|>"),
        ("smollm2", "tulu", "<|im_end|>"),
        ("gemma3", "tokenizer", "<end_of_turn>"),
        ("gemma3", "tulu", "<eos>"),
    ],
)
def test_real_tokenizers(request, name, template, end):
    """The ids are those of the whole text; only the answers with their ends are scored."""
    tokenizer = request.getfixturevalue(name)
    encoder = Encoder(tokenizer, chat_template=template)
    ids, scored = encode_conversation(TALK, encoder)
    if template == "tulu":
        lines = [f"<|{role}|>\n{text}{end if role == 'assistant' else ''}\n" for role, text in TALK]
        text = tokenizer.bos_token + "".join(lines)
    else:
        text = tokenizer.apply_chat_template(plain(TALK), tokenize=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert shown(tokenizer, ids, scored) == [TALK[2].content + end, TALK[4].content + end]
    assert ids.count(tokenizer.bos_token_id) == (5 if name + template == "smollm2auto" else 1)
    assert end_of_turn(encoder) == tokenizer.convert_tokens_to_ids(end)
    # The prompt of a model ends where its turn begins.
    start = scored.index(True)
    assert messages.prompt_ids(TALK[:2], encoder) == ids[:start]


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_conversations_meet_the_edges(request, shared_data, name):
    """Code and questions of Code-Alpaca: all can be split exactly at the edges."""
    tokenizer = request.getfixturevalue(name)
    encoder, template = Encoder(tokenizer), get_task("messages").encode
    lines = (shared_data / "tulu_v1" / "code_alpaca_2k.jsonl").read_text().split("\n")[:150]
    for row in map(json.loads, lines):
        turns = (Message("user", row["instruction"]), Message("assistant", row["output"].strip()))
        ids, scored = template(turns, encoder)
        (answer,) = shown(tokenizer, ids, scored)
        assert answer == turns[1].content + tokenizer.decode([end_of_turn(encoder)])


def test_a_space_before_every_text(llama1):
    """Llama 1: text after a special token gets a space, text after a header does not."""
    encoder = Encoder(llama1)
    turns = (Message("user", "hi"), Message("assistant", "hi you")) * 2
    ids, scored = encode_conversation(turns, encoder)
    text = "<s><|user|>\nhi\n<|assistant|>\nhi you</s>\n<|user|>\nhi\n<|assistant|>\nhi you</s>\n"
    assert ids == llama1.encode(text, add_special_tokens=False)
    answer = [llama1.convert_tokens_to_ids(t) for t in ("h", "i", "▁", "y", "o", "u", "</s>")]
    assert [t for t, s in zip(ids, scored, strict=True) if s] == answer * 2


def test_an_edge_inside_a_token_is_an_error(llama1):
    """If a header ends without a space and a turn begins with one, a token belongs to both."""
    llama1.chat_template = (
        "{% for m in messages %}{{ m['role'] + '\n' + (' ' if m['role'] == 'assistant' else '')"
        " + m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}assistant\n"
        "{% endif %}"
    )
    try:
        with pytest.raises(DataError, match="merges the edge of .* chat_template='tulu'"):
            turns = [Message("user", "hi"), Message("assistant", "you")]
            encode_conversation(turns, Encoder(llama1))
    finally:
        llama1.chat_template = None


def test_bos_is_written_once():
    tokenizer = byte_tokenizer()
    turns = (Message("user", "a"), Message("assistant", "b"))
    plain_ids, _ = encode_conversation(turns, Encoder(tokenizer, "none"))
    for template in (None, "{{ bos_token }}" + CHATTY, CHATTY):
        tokenizer.chat_template = template
        for policy in ("auto", "segment"):
            ids, scored = encode_conversation(turns, Encoder(tokenizer, policy))
            # "auto" leaves it to the template, as transformers does.
            begins = policy == "segment" or template != CHATTY
            assert (ids[0] == 0) == begins and ids[1] != 0
            assert not scored[0] and len(ids) == len(scored)
            assert template is not None or ids[1:] == plain_ids
            asked = messages.prompt_ids(turns[:1], Encoder(tokenizer, policy))
            assert asked == ids[: scored.index(True)]


CHATTY = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # The last turn has another format than the ones before it.
        (CHATTY.replace("m['content']", "(m['content'] if loop.last else '...')"), "message 3"),
        # The header of the generation prompt differs from that of an answer.
        (CHATTY.replace("'assistant: '", "'assistant: <think>'"), "message 3"),
        ("{{ raise_exception('Roles are not liked') }}", r"rejects .*\(Roles are not liked\)"),
        ("{% for m in messages %}{{ m.content.nothing.there }}{% endfor %}", "rejects"),
    ],
)
def test_templates_that_cannot_be_used(template, message):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    refused(message, encode_conversation, TALK, Encoder(tokenizer), error=DataError)
    ids, scored = encode_conversation(TALK, Encoder(tokenizer, chat_template="tulu"))
    assert shown(tokenizer, ids, scored)[0] == "Red, I say.</s>"


def test_no_template_and_no_eos(characters):
    for tokenizer, template, words in (
        (characters(), "auto", "neither a chat template nor an eos token"),
        (byte_tokenizer(), "tokenizer", "this tokenizer has no chat template"),
        (byte_tokenizer(), "chatml", "chat_template='chatml'"),
    ):
        with pytest.raises(DataError, match=words):
            encode_conversation(TALK, Encoder(tokenizer, chat_template=template))


# ---- rows of the file

BAD = {
    "no field": ({"text": "x"}, "no field 'messages'; fields seen: text"),
    "no list": ({"messages": "hello"}, "'messages' is str"),
    "empty list": ({"messages": []}, "no message of the assistant .*no messages at all"),
    "no object": ({"messages": ["hello"]}, "message 1 is str"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1: no field 'content'"),
    "null": ({"messages": [{"role": "user", "content": None}]}, "'content' is NoneType"),
    "role": (said_by("human"), "message 1: role='human': choose one of .'sys"),
    "empty": (talk("x", " \n"), r"message 2 \(assistant\) is empty"),
    "no answer": (talk("x"), r"no message of the assistant to learn from \(user\)"),
    "two users": (
        said_by("user", "user", "assistant"),
        "message 2 is of the user, but after .* must alternate",
    ),
    "assistant first": (said_by("assistant", "user"), "message 1 is"),
    "late system": (said_by("user", "assistant", "system"), "message 3 is of the system"),
    "two systems": (said_by("system", "system", "assistant"), "message 2 is of the system"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(write, name):
    record, message = BAD[name]
    path = write("talk.jsonl", [talk("a", "b"), record])
    refused(f"talk.jsonl, line 2: .*{message}", pipeline_of, path, error=DataError)


def test_bad_rows_can_be_left_out(write, caplog):
    """All rows of `BAD` are counted and reported, and the good rows are read."""
    good = [talk("a", "b"), talk("c", "d", "e", "f")]
    path = write("talk.jsonl", [good[0], *(record for record, _ in BAD.values()), good[1]])
    pipeline = pipeline_of(path, skip_bad=True)
    with caplog.at_level(logging.WARNING):
        batches = pipeline.train_iterator(epochs=1)
        rows = list(batches)
    assert (batches.counts.kept, batches.counts.bad) == (2, len(BAD))
    assert "unreadable, the last one" in caplog.text and "line 2" in caplog.text
    assert sum(int(row["loss_mask"].sum()) for row in rows) == 3 * 2  # "b", "d", "f" and their eos
    only_bad = write("bad.jsonl", [record for record, _ in BAD.values()])
    with pytest.raises(DataError, match=f"{len(BAD)} unreadable"):
        list(pipeline_of(only_bad, skip_bad=True).train_iterator())


def test_text_field_and_the_others(write):
    path = write("talk.jsonl", [{"turns": talk("a", "b")["messages"]}])
    batch = next(pipeline_of(path, text_field="turns").train_iterator(epochs=1))
    assert batch["loss_mask"].sum() == 2
    with pytest.raises(DataError, match="prompt_field is 'turns'.*leave them empty"):
        pipeline_of(path, prompt_field="turns")
    assert get_task("messages").example({"messages": plain(TALK)}, Fields()) == TALK


def pipeline_of(path, *, seq_len=96, batch_size=2, **config):
    config = {"task": "messages", "path": path, "shuffle": False, "prefetch": 0, **config}
    return make_pipeline(config, byte_tokenizer(), batch_size, seq_len, 0)


def test_long_conversations_are_cut_and_counted(write, caplog):
    """The cut is after the last token that fits; a row with only a question is dropped."""
    talks = [talk("q" * 5, "a" * 200), talk("q", "yes", "q" * 100, "no"), talk("q" * 200, "a")]
    with caplog.at_level(logging.WARNING):
        batches = pipeline_of(write("talk.jsonl", talks), packing=False).train_iterator(epochs=1)
        (batch,) = list(batches)
    counts = batches.counts
    assert (counts.kept, counts.truncated, counts.no_response) == (2, 2, 1)
    assert "cut off to fit seq_len = 96" in caplog.text and "fills seq_len = 96" in caplog.text
    # The first answer is cut by the end of the row, the second conversation after "yes".
    header = len("<|user|>\nqqqqq\n<|assistant|>\n")
    order = np.argsort([-row.sum() for row in batch["loss_mask"]])
    assert batch["loss_mask"][order[0]].tolist() == [i >= header for i in range(96)]
    assert batch["loss_mask"][order[1]].sum() == len("yes") + 1
    assert (batch["segment_ids"][order[1]] > 0).sum() == len("<|user|>\nq\n<|assistant|>\nyes") + 1


# ---- packed rows


def test_nothing_leaks_between_packed_conversations(write):
    """Another first conversation in a row changes no bit of the logits of the second."""
    first = [talk("one", "two", "three", "four"), talk("eno", "owt", "eerht", "ruof")]
    rows, params = [], random_params(LLAMA)

    @jax.jit
    def forward(params, batch):
        hidden = causal_lm.forward(LLAMA, params, batch)["hidden"]
        return causal_lm.logits(LLAMA, params, hidden)

    for conversation in first:
        path = write("talk.jsonl", [conversation, talk("five", "six")])
        batch = next(pipeline_of(path, seq_len=128, batch_size=1).train_iterator(epochs=1))
        assert set(np.unique(batch["segment_ids"])) - {0} == {1, 2}
        rows.append((batch, np.asarray(forward(params, batch))))
    (one, logits), (other, changed) = rows
    second, before = one["segment_ids"] == 2, one["segment_ids"] == 1
    assert (one["tokens"] != other["tokens"])[before].any()
    np.testing.assert_array_equal(one["tokens"][second], other["tokens"][second])
    np.testing.assert_array_equal(logits[second], changed[second])
    assert (logits[before] != changed[before]).any()
    # And they are the logits of the conversation alone.
    alone = our_logits(LLAMA, params, one["tokens"][second][None])[0]
    np.testing.assert_allclose(logits[second], alone, atol=2e-5)
    # The loss is that of the answers: their bytes and an eos each.
    counts = [int((one["loss_mask"] & (one["segment_ids"] == i)).sum()) for i in (1, 2)]
    assert counts == [len("two") + 1 + len("four") + 1, len("six") + 1]
    assert one["targets"][one["loss_mask"]].tolist().count(1) == 3


def test_the_state_names_the_template(write):
    """A run cannot be resumed if its conversations are written in another format."""
    path = write("talk.jsonl", [talk("a", "b")] * 4)
    tokenizer = byte_tokenizer()
    states = []
    for template in (None, CHATTY):
        tokenizer.chat_template = template
        config = {"task": "messages", "path": path, "prefetch": 0}
        batches = make_pipeline(config, tokenizer, 1, 64, 0).train_iterator()
        next(batches)
        if states:
            refused("data_crc", batches.set_state, states[0], error=DataError)
        states.append(batches.get_state())


# ---- the paper's fine-tuning


def test_instructions_are_conversations_of_one_turn():
    """Alpaca's rows have the same ids as the equivalent conversation."""
    encoder = Encoder(byte_tokenizer(), "auto")
    rows = [
        ({"instruction": " Add. ", "input": "1 2", "output": "3\n"}, "Add.\n1 2"),
        ({"instruction": "Sing.", "input": "", "output": "3"}, "Sing."),
        ({"instruction": "Sing.", "output": "3", "history": [], "system": ""}, "Sing."),
        ({"instruction": "Sing.", "context": "Low.", "output": "3"}, "Sing.\nLow."),
    ]
    task = get_task("alpaca")
    for row, asked in rows:
        encoded = task.encode(task.example(row, Fields()), encoder)
        other = get_task("messages")
        assert encoded == other.encode(other.example(talk(asked, "3"), Fields()), encoder)
    for row, message in (
        ({"instruction": "Sing.", "input": "", "output": " "}, "the answer is empty"),
        ({"instruction": "", "input": "", "output": "a"}, "the instruction is empty"),
        ({"instruction": "a", "input": 3, "output": "a"}, "field 'input' is int"),
        ({"prompt": "a", "output": "a"}, "no field 'instruction'"),
        ({"instruction": "a", "system": "b", "output": "a"}, "field 'system' is 'b' and is not"),
        ({"instruction": "a", "history": [["q", "a"]], "output": "a"}, "field 'history' is"),
    ):
        refused(message, task.example, row, Fields(), error=DataError)
