"""Rendering of a tokenizer's chat template in a separate process with limits on time and memory.

A template is a program from a model's directory. Jinja's sandbox blocks access to files but not
infinite loops. So transformers' function renders it in a child process (`io.child`), which starts
with the first conversation and is reused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.child import ask

# Date for templates that write the current date: Llama 3.1's default.
DATE = "2024-07-26"
SECONDS, BYTES = 4.0, 512 << 20  # CPU time, and memory in addition to the interpreter's
TULU = "chat_template='tulu' uses the built-in form"


def render_template(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], date: str = DATE, **options: bool
) -> str:
    """Render a chat like `tokenizer.apply_chat_template(messages, tokenize=False, **options)`.

    Args:
      date: date (ISO) for templates that write the current date; fixed, so runs are reproducible.

    Raises:
      DataError: the template rejects the conversation.
      ValueError: the template exceeds `SECONDS` or `BYTES`, or writes too much text; the message
        names the model. It is not an error of one conversation, so `skip_bad` does not skip it.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    request = {"conversations": [messages], "chat_template": tokenizer.get_chat_template()}
    request |= tokenizer.special_tokens_map | options | {"date": date}
    reply = ask("template", request, SECONDS, BYTES)
    if "refused" in reply:
        raise DataError(
            f"the chat template of {name} rejects the conversation ({reply['refused']}); {TULU}"
        )
    if "runaway" in reply:
        raise ValueError(f"the chat template of {name} is stopped: it {reply['runaway']}; {TULU}")
    return reply["text"]
