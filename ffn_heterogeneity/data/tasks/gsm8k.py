"""GSM8K: "Question: ...\\nAnswer: ...", loss on the answer only."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.tasks.base import Example, Fields, Task, text_of


def example(record: Mapping[str, Any], fields: Fields) -> Example:
    """Return the example; the target begins with a space, so that its first token is " word"."""
    question = text_of(record, fields.prompt or "question")
    answer = text_of(record, fields.response or "answer")
    return Example(f"Question: {question}\nAnswer:", f" {answer}")


TASK = Task("gsm8k", example, hub="openai/gsm8k:main")
