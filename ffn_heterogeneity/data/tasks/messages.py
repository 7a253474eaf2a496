"""Conversations: {"messages": [{"role": "system | user | assistant", "content": text}, ...]}.

A conversation is converted to text with the tokenizer's chat template if it has one, else in the
form of the Tulu recipe: "<|user|>\\n...\\n<|assistant|>\\n...</s>\\n", with the tokenizer's eos.
The loss covers the assistant's messages and the tokens that end its turns, but no headers.

The boundaries of a turn are found with the template itself: the assistant's turn i is the text that
`messages[: i + 1]` adds to `messages[:i]` with the generation prompt. The ids are those of the
whole text. Every id must be completely inside or outside a turn, which is checked for every
conversation: the separately encoded pieces must give the same ids.

If a template ignores `add_generation_prompt`, the header is found by rendering an answer.

White space around contents is stripped, as in the Tulu recipe and Gemma's template (for other
templates this is ours: a turn that begins with a space would share a token with its header).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ffn_heterogeneity.data.packing import Encoder, encode
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import FLAGS, Fields, Task, list_of, reject_fields, text_of
from ffn_heterogeneity.data.templates import render_template
from ffn_heterogeneity.wording import check_choice, naming

ROLES = ("system", "user", "assistant")
# Fields of a row, and of a message, that templates and other trainers use.
_OF_ROW = ("tools", "functions", "documents", "system", "system_prompt", "chat_template_kwargs")
_MEDIA = ("image", "images", "audio", "video", "videos")
_OF_MESSAGE = ("tool_calls", "tool_call", "function_call", "reasoning_content", "reasoning")
_OF_MESSAGE += ("thinking", "thought", *_MEDIA)
PROBE = "\u2603"  # a message that does not occur in headers


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


def example(record: Mapping[str, Any], fields: Fields) -> tuple[Message, ...]:
    """Return the messages: an optional system message, then user and assistant alternate.

    There is at least one answer.

    Raises:
      DataError: the field or the messages have another form; names the message.
    """
    if fields.prompt or fields.response:
        raise DataError(
            f"prompt_field is {fields.prompt!r} and response_field {fields.response!r}; leave them "
            "empty: conversations are in one field, text_field ('messages')"
        )
    reject_fields(record, (*_OF_ROW, *_MEDIA, *FLAGS))
    field = fields.text or "messages"
    messages = [_message(field, i, one) for i, one in enumerate(list_of(record, field), 1)]
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    skipped = len(messages) - len(turns)
    for i, turn in enumerate(turns):
        if turn.role != ROLES[1 + i % 2]:
            raise DataError(
                f"field {field!r}, message {i + 1 + skipped} is of the {turn.role}, but after an "
                "optional message of the system user and assistant must alternate, the user first"
            )
    if len(turns) < 2:
        seen = ", ".join(one.role for one in messages) or "no messages at all"
        raise DataError(f"field {field!r} has no message of the assistant to learn from ({seen})")
    return tuple(messages)


def _message(field: str, number: int, value: Any) -> Message:
    where = f"field {field!r}, message {number}"
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {type(value).__name__} ({value!r:.40}), expected an object")
    with naming(where, DataError, DataError):
        role, content = text_of(value, "role"), text_of(value, "content").strip()
        # Only the assistant's turns are in the loss.
        reject_fields(value, (*_OF_MESSAGE, *(FLAGS if role == "assistant" else ())))
    check_choice(f"{where}: role", role, ROLES, DataError)
    if not content:
        raise DataError(f"{where} ({role}) is empty: leave the message or the conversation out")
    return Message(role, content)


def encode_conversation(
    messages: Sequence[Message], encoder: Encoder
) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation, and a mask of the assistant's ids.

    Raises:
      DataError: the template rejects the conversation, renders a turn differently once others
        follow, or a token crosses the boundary of a turn.
    """
    text, turns = assistant_spans(messages, encoder)
    ids = encode(encoder.tokenizer, text)
    scored = [False] * len(ids)
    place = done = 0
    for start, stop in turns:
        first = _after(encoder, ids, place, text[done:start])
        place = _after(encoder, ids, first, text[start:stop])
        scored[first:place] = [True] * (place - first)
        done = stop
    if _after(encoder, ids, place, text[done:]) != len(ids):
        raise _straddles(text[done:])
    sequence = with_bos(ids, encoder)
    return sequence, [False] * (len(sequence) - len(ids)) + scored


def assistant_spans(
    messages: Sequence[Message], encoder: Encoder
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and [start, stop) of each of the assistant's turns.

    A turn stops after its end token; the white space that templates add after it is not part of the
    answer.
    """
    text, spans = render(messages, encoder), []
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = render(messages[:i], encoder, answer=True)
        upto = render(messages[: i + 1], encoder)
        body = upto[len(before) :].rstrip()
        if not (text.startswith(upto) and upto.startswith(before) and body):
            raise DataError(
                f"the chat template renders message {i + 1}, of the assistant, unlike its "
                "generation prompt, or differently when others follow, so its place is unknown; "
                "chat_template='tulu' uses the built-in form"
            )
        spans.append((len(before), len(before) + len(body)))
    return text, spans


def prompt_ids(messages: Sequence[Message], encoder: Encoder) -> list[int]:
    """Return the ids of a conversation with the generation prompt for the assistant."""
    return with_bos(encode(encoder.tokenizer, render(messages, encoder, answer=True)), encoder)


def end_of_turn(encoder: Encoder) -> int | None:
    """Return the special or added token that ends the assistant's turns, or None.

    (A part of a marker that is ordinary text would also end other words.) None, too, if the
    template renders no answer behind its generation prompt, such as one that begins a thought.
    """
    last = []
    for answer in ("one", "7 7"):
        talk = Message("user", "a"), Message("assistant", answer)
        try:
            ids, scored = encode_conversation(talk, encoder)
        except DataError:
            return None
        last.append([token for token, of_turn in zip(ids, scored, strict=True) if of_turn][-1])
    tokenizer = encoder.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return last[0] if last[0] == last[1] and last[0] in special else None


def with_bos(ids: list[int], encoder: Encoder) -> list[int]:
    """Prepend a bos if the policy requires it and the template did not add one.

    "auto" leaves it to the tokenizer's template, if that is used.
    """
    if encoder.bos_id is None or ids[:1] == [encoder.bos_id]:
        return ids
    if encoder.auto_bos and not _is_tulu(encoder):
        return ids
    return [encoder.bos_id, *ids]


def _is_tulu(encoder: Encoder) -> bool:
    """True if conversations have the built-in form, not that of the tokenizer's template."""
    missing = not getattr(encoder.tokenizer, "chat_template", None)
    return encoder.chat_template == "tulu" or (encoder.chat_template == "auto" and missing)


def render(messages: Sequence[Message], encoder: Encoder, answer: bool = False) -> str:
    """Render a conversation; with `answer`, followed by the generation prompt.

    Raises:
      DataError, ValueError: no template; or as `render_template`.
    """
    tokenizer = encoder.tokenizer
    if _is_tulu(encoder):
        return _tulu(messages, tokenizer, answer)
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "chat_template is 'tokenizer', but this tokenizer has no chat template; 'tulu' uses "
            "the built-in form"
        )

    def written(*messages: Message, answer: bool) -> str:
        turns = [message._asdict() for message in messages]
        date = encoder.template_date
        return render_template(tokenizer, turns, date, add_generation_prompt=answer)

    text = written(*messages, answer=answer)
    if not answer or encoder.invites:
        return text
    encoder.invites = text != (start := written(*messages, answer=False))
    if encoder.invites:
        return text
    try:
        answered = written(*messages, Message("assistant", PROBE), answer=False)
    except DataError:  # the template renders no answers
        return text
    header, probe, _ = answered.removeprefix(start).partition(PROBE)
    return text + header if probe and answered.startswith(start) and header.strip() else text


def _tulu(messages: Sequence[Message], tokenizer: Any, answer: bool) -> str:
    eos = getattr(tokenizer, "eos_token", None)
    if not eos:
        raise DataError(
            "this tokenizer has neither a chat template nor an eos token to end the assistant's "
            "turns with: add one of them"
        )
    parts = []
    for role, content in messages:
        parts.append(f"<|{role}|>\n{content}{eos if role == 'assistant' else ''}\n")
    return "".join(parts) + ("<|assistant|>\n" if answer else "")


def _after(encoder: Encoder, ids: Sequence[int], place: int, text: str) -> int:
    """End of the ids of `text`, which begin at `place`."""
    # Tokenizers add no space before a piece inside a text, but some do after a special token.
    for piece in (encoder.continuation(text) if place else None, encode(encoder.tokenizer, text)):
        if piece is not None and ids[place : place + len(piece)] == piece:
            return place + len(piece)
    raise _straddles(text)


def _straddles(text: str) -> DataError:
    return DataError(
        f"the tokenizer merges the edge of {text[:40]!r} with the neighboring text, so a token is "
        "only partly the assistant's; chat_template='tulu' uses the built-in form, skip_bad=True "
        "drops such conversations"
    )


TASK = Task("messages", example, hub="allenai/tulu-v1-sft-mixture", encode=encode_conversation)
