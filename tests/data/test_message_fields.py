"""Fields and headers of conversations that change what is learned."""

import pytest
from test_messages import talk
from tiny_models import byte_tokenizer
from tiny_runs import refused

from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.tasks import Fields, get_task
from ffn_heterogeneity.data.tasks.messages import Message, encode_conversation, prompt_ids

CALL = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
MEANING = {
    "tool_calls": CALL, "function_call": CALL[0], "reasoning_content": "2 + 2", "thinking": "x",
    "weight": 0, "weight ": 0.5, "train": False, "images": ["a.png"], "loss_weight": 0,
}  # fmt: skip


@pytest.mark.parametrize("field", [*MEANING, "tools", "system", "documents"])
def test_fields_that_change_what_is_learned_are_rejected_by_name(field):
    """Fields of a message or its row; empty fields and a weight of 1 change nothing."""
    row = talk("add 2 and 2", "4")
    neutral = {"weight": 1, "train": True}.get(name := field.strip())
    (row["messages"][1] if field in MEANING else row)[name] = neutral
    assert get_task("messages").example(row, Fields())[1].content == "4"
    value = MEANING.get(field, CALL)
    (row["messages"][1] if field in MEANING else row)[name] = value
    refused(
        f"field '{name}' is .* and is not supported", get_task("messages").example, row, Fields()
    )
    if field == "tools":
        pair = {"prompt": "a", "response": "b", "tools": CALL}
        refused("field 'tools'", get_task("jsonl").example, pair, Fields())


HEADED = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"


def test_a_header_that_is_no_invitation_is_not_learned():
    """A template that ignores add_generation_prompt, also where the answer is in the header."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = HEADED
    for answer in ("4", "a", "|>"):
        encoder = Encoder(tokenizer)
        turns = (Message("user", "2+2"), Message("assistant", answer), Message("user", "b"),
                 Message("assistant", answer))  # fmt: skip
        ids, scored = encode_conversation(turns, encoder)
        learned = tokenizer.decode([i for i, of_turn in zip(ids, scored, strict=True) if of_turn])
        assert learned == f"{answer}</s>" * 2
        asked = tokenizer.decode(prompt_ids(turns[:1], encoder))
        assert asked.endswith("2+2</s>\n<|assistant|>\n")


def test_what_changes_nothing_is_read():
    """Flags of turns that are never in the loss, and empty fields, also as JSON in a string."""
    row = talk("a", "b") | {"tools": "[]", "images": False, "weight": 1}
    row["messages"][0] |= {"train": False, "weight": 0}
    row["messages"][1] |= {"thinking": False}
    assert len(get_task("messages").example(row, Fields())) == 2


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"question": "q", "context": "c", "answer": "a"}, "context"),
        ({"instruction": "i", "input": "x", "response": "r"}, "input"),
        ({"instruction": "i", "input": "x", "context": "c", "output": "o"}, "context"),
        ({"prompt": "p", "completion": "c", "weight": 0}, "weight"),
        ({"prompt": "p", "completion": "c", "system_prompt": "s"}, "system_prompt"),
    ],
)
def test_a_field_that_the_pair_does_not_read_is_rejected(row, field):
    refused(f"field '{field}'", get_task("jsonl").example, row, Fields())
    assert get_task("jsonl").example(row | {field: "" if field != "weight" else 1}, Fields())


def test_a_template_that_ends_the_text_itself_invites_nothing():
    """Text of another conversation never becomes a header."""
    tokenizer = byte_tokenizer()
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}</s>{% endif %}"
    tokenizer.chat_template = text + "{% endfor %}"
    encoder = Encoder(tokenizer, "none")
    for asked in ("my secret", "two"):
        ids = prompt_ids([Message("user", asked)], encoder)
        assert tokenizer.decode(ids) == f"<user>{asked}</s>"
    numbered = "{% for m in messages %}[{{ loop.index }}:{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.chat_template = numbered
    turns = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    for count, last in ((1, "[2:assistant]"), (3, "[4:assistant]")):
        assert tokenizer.decode(prompt_ids(turns[:count], encoder)).endswith(last)
