"""Instructions: {"instruction", "input" or "context" (may be empty), "output"}, as in Alpaca and
its successors.

Each is a conversation of one turn (`messages.py` writes and encodes it): the user says the
instruction and, on the next line, the input, as the fine-tuning tool of the massive-weights paper
puts them; in the loss is the answer alone.
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Fields, Task, reject_fields, text_of
from ffn_heterogeneity.data.tasks.messages import Message, encode_conversation


def example(record: Mapping[str, Any], fields: Fields) -> tuple[Message, Message]:
    """The two messages; DataError where one is missing or empty."""
    reject_fields(record, read=("input", "context"))
    question = text_of(record, fields.prompt or "instruction").strip()
    given = [text_of(record, name).strip() for name in ("input", "context") if name in record]
    answer = text_of(record, fields.response or "output").strip()
    asked = "\n".join(filter(None, [question, *given]))
    if not asked or not answer:
        raise DataError(f"the {'answer' if asked else 'instruction'} is empty: leave the row out")
    return Message("user", asked), Message("assistant", answer)


TASK = Task("alpaca", example, hub="llamafactory/alpaca_gpt4_en", encode=encode_conversation)
