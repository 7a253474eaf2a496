"""Conversations: {"messages": [{"role": "system | user | assistant", "content": text}, ...]}.

A conversation becomes text by the tokenizer's chat template where it has one, else in the form of
the Tulu recipe: "<|user|>\\n...\\n<|assistant|>\\n...</s>\\n", the eos being the tokenizer's own.
In the loss is what the assistant says and the token that ends its turn, no header of a turn.

Where a turn begins and ends in the text is asked of the template itself: the assistant's turn i is
what `messages[: i + 1]` adds to `messages[:i]` with the header that invites an answer. The ids are
those of the whole text; each is wholly inside or outside a turn, which is checked for every
conversation: the pieces, encoded one by one, must be the whole.

A template that ignores `add_generation_prompt` invites no answer: the header is then found by
writing an answer, and is treated alike.

Contents lose the white space around them, as in the Tulu recipe and Gemma's template (for other
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
# Fields that templates and other trainers use: of a row, and of a message.
_OF_ROW = ("tools", "functions", "documents", "system", "system_prompt", "chat_template_kwargs")
_MEDIA = ("image", "images", "audio", "video", "videos")
_OF_MESSAGE = ("tool_calls", "tool_call", "function_call", "reasoning_content", "reasoning")
_OF_MESSAGE += ("thinking", "thought", *_MEDIA)
_PROBE = "\u2603"  # an answer that no header holds


class Message(NamedTuple):
    """One turn."""

    role: str
    content: str


def example(record: Mapping[str, Any], fields: Fields) -> tuple[Message, ...]:
    """The turns: at most one of the system, then user and assistant in turn, one answer at least.

    Raises:
      DataError: the field or the turns are not so; the message names the turn.
    """
    if fields.prompt or fields.response:
        raise DataError(
            f"prompt_field is {fields.prompt!r} and response_field {fields.response!r}; leave them "
            "empty: conversations are in one field, text_field ('messages')"
        )
    reject_fields(record, (*_OF_ROW, *_MEDIA, *FLAGS))
    field = fields.text or "messages"
    found = [_message(field, i, one) for i, one in enumerate(list_of(record, field), 1)]
    turns = found[1:] if found and found[0].role == "system" else found
    skipped = len(found) - len(turns)
    for i, turn in enumerate(turns):
        if turn.role != ROLES[1 + i % 2]:
            raise DataError(
                f"field {field!r}, message {i + 1 + skipped} is of the {turn.role}, but after an "
                "optional message of the system user and assistant must alternate, the user first"
            )
    if len(turns) < 2:
        seen = ", ".join(one.role for one in found) or "no messages at all"
        raise DataError(f"field {field!r} has no message of the assistant to learn from ({seen})")
    return tuple(found)


def _message(field: str, number: int, value: Any) -> Message:
    where = f"field {field!r}, message {number}"
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {type(value).__name__} ({value!r:.40}), expected an object")
    with naming(where, DataError, DataError):
        role, content = text_of(value, "role"), text_of(value, "content").strip()
        # No other turn is in the loss.
        reject_fields(value, (*_OF_MESSAGE, *(FLAGS if role == "assistant" else ())))
    check_choice(f"{where}: role", role, ROLES, DataError)
    if not content:
        raise DataError(f"{where} ({role}) is empty: leave the message or the conversation out")
    return Message(role, content)


def encode_conversation(
    messages: Sequence[Message], encoder: Encoder
) -> tuple[list[int], list[bool]]:
    """The ids of a whole conversation, and which of them are the assistant's.

    Raises:
      DataError: the template refuses the conversation, writes a turn otherwise once others follow,
        or lets a token straddle the edge of a turn.
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
    whole = with_bos(ids, encoder)
    return whole, [False] * (len(whole) - len(ids)) + scored


def assistant_spans(
    messages: Sequence[Message], encoder: Encoder
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and [start, stop) of each of the assistant's turns in it.

    A turn stops after the token that ends it; the white space that templates put after that is
    written by nobody who answers.
    """
    whole, found = render(messages, encoder), []
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = render(messages[:i], encoder, answer=True)
        upto = render(messages[: i + 1], encoder)
        body = upto[len(before) :].rstrip()
        if not (whole.startswith(upto) and upto.startswith(before) and body):
            raise DataError(
                f"the chat template writes message {i + 1}, of the assistant, not as it invites an "
                "answer or not as it does when others follow, so its place cannot be told; "
                "chat_template='tulu' uses the built-in form"
            )
        found.append((len(before), len(before) + len(body)))
    return whole, found


def prompt_ids(messages: Sequence[Message], encoder: Encoder) -> list[int]:
    """The ids of a conversation and of the header that invites the assistant to go on."""
    return with_bos(encode(encoder.tokenizer, render(messages, encoder, answer=True)), encoder)


def end_of_turn(encoder: Encoder) -> int | None:
    """The special or added token that ends the assistant's turns; None where there is none (a part
    of a marker that is ordinary text also ends other words)."""
    last = []
    for answer in ("one", "7 7"):
        ids, scored = encode_conversation(
            (Message("user", "a"), Message("assistant", answer)), encoder
        )
        last.append([token for token, of_turn in zip(ids, scored, strict=True) if of_turn][-1])
    tokenizer = encoder.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return last[0] if last[0] == last[1] and last[0] in special else None


def with_bos(ids: list[int], encoder: Encoder) -> list[int]:
    """The ids, after a bos where the policy asks for one that the template did not write itself."""
    if encoder.bos_id is None or ids[:1] == [encoder.bos_id]:
        return ids
    return [encoder.bos_id, *ids]


def render(messages: Sequence[Message], encoder: Encoder, answer: bool = False) -> str:
    """The text of a conversation; with `answer` the header of the assistant's next turn, too.

    Raises:
      DataError, ValueError: there is no template; or as `render_template`.
    """
    tokenizer, template = encoder.tokenizer, encoder.chat_template
    own = getattr(tokenizer, "chat_template", None)
    if template == "tulu" or (template == "auto" and not own):
        return _tulu(messages, tokenizer, answer)
    if not own:
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
        whole = written(*messages, Message("assistant", _PROBE), answer=False)
    except DataError:  # it writes no answers
        return text
    header, found, _ = whole.removeprefix(start).partition(_PROBE)
    return text + header if found and whole.startswith(start) and header.strip() else text


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
    """Where the ids of `text`, which begin at `place`, end."""
    # Inside a text no space is put before a piece, but after a special token some tokenizers do.
    for piece in (encoder.continuation(text) if place else None, encode(encoder.tokenizer, text)):
        if piece is not None and ids[place : place + len(piece)] == piece:
            return place + len(piece)
    raise _straddles(text)


def _straddles(text: str) -> DataError:
    return DataError(
        f"the tokenizer joins the edge of {text[:40]!r} with the text beside it, so no token is "
        "wholly the assistant's there; chat_template='tulu' uses the built-in form, skip_bad=True "
        "drops such conversations"
    )


TASK = Task("messages", example, hub="allenai/tulu-v1-sft-mixture", encode=encode_conversation)
