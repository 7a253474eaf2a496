"""Instructions in the format of Alpaca: {"instruction", "input" or "context", "output"}.

The input or context may be empty. Each record is a conversation of one turn (`messages.py` encodes
it): the user's message is the instruction and, on the next line, the input, as in the fine-tuning
tool of the massive-weights paper. Only the answer is in the loss.
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Fields, Task, reject_fields, text_of
from ffn_heterogeneity.data.tasks.messages import Message, encode_conversation


def example(record: Mapping[str, Any], fields: Fields) -> tuple[Message, Message]:
    """Return the two messages; raise DataError if one is missing or empty."""
    reject_fields(record, read=("input", "context"))
    question = text_of(record, fields.prompt or "instruction").strip()
    given = [text_of(record, name).strip() for name in ("input", "context") if name in record]
    answer = text_of(record, fields.response or "output").strip()
    asked = "\n".join(filter(None, [question, *given]))
    if not asked or not answer:
        raise DataError(f"the {'answer' if asked else 'instruction'} is empty: leave the row out")
    return Message("user", asked), Message("assistant", answer)


TASK = Task("alpaca", example, hub="llamafactory/alpaca_gpt4_en", encode=encode_conversation)
