"""Prompt and response records with common field names."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example, Fields, Task, reject_fields, text_of

# (prompt fields, response field, separator). The first pair whose fields all exist is used. Prompt
# and completion pairs are joined verbatim: by convention they contain the white space.
PAIRS = (
    (("prompt",), "response", ""),
    (("prompt",), "completion", ""),
    (("instruction", "input"), "output", "\n"),
    (("instruction", "context"), "output", "\n"),
    (("instruction", "context"), "response", "\n"),
    (("instruction",), "output", "\n"),
    (("instruction",), "response", "\n"),
    (("question",), "answer", "\n"),
    (("input",), "output", "\n"),
    (("source",), "target", "\n"),
)


def example(record: Mapping[str, Any], fields: Fields) -> Example:
    """Prompt and response; joined verbatim when the fields are named, else as in `PAIRS`."""
    if fields.prompt and fields.response:
        return Example(text_of(record, fields.prompt), text_of(record, fields.response))
    if fields.prompt or fields.response:
        raise DataError(
            f"prompt_field is {fields.prompt!r} and response_field {fields.response!r}: "
            "name both or neither"
        )
    for prompts, response, separator in PAIRS:
        if response in record and all(name in record for name in prompts):
            reject_fields(record, read=prompts)
            parts = [text_of(record, name) for name in prompts]
            prompt = "\n".join(text for text in parts if text)  # "input" is often left empty
            return Example(prompt + separator, text_of(record, response))
    known = ", ".join(f"{'+'.join(prompts)}/{response}" for prompts, response, _ in PAIRS)
    raise DataError(
        f"no known prompt and response fields; fields seen: {', '.join(map(str, record)) or 'none'}"
        f"; known pairs: {known}; or set prompt_field and response_field"
    )


TASK = Task("jsonl", example)
