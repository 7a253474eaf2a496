"""A tokenizer's chat template, rendered in a process of its own with bounds on time and memory.

A template is a program that came with a model's directory. Jinja's sandbox keeps it from files, not
from looping: hence one process, started with the first conversation and kept, in which
transformers' own function renders (`io.child`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.child import ask

# The day that templates write which ask for today: Llama 3.1's own default.
DATE = "2024-07-26"
SECONDS, BYTES = 4.0, 512 << 20  # of computing, and of memory beside the interpreter's
TULU = "chat_template='tulu' uses the built-in form"


def render_template(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], date: str = DATE, **options: bool
) -> str:
    """Text of a chat, as `tokenizer.apply_chat_template(messages, tokenize=False, **options)`.

    Args:
      date: the day (ISO) of a template that writes today's: of the run, whenever it runs.

    Raises:
      DataError: the template refuses the conversation.
      ValueError: it takes more than `SECONDS` or `BYTES`, or writes without end; the message names
        the model. No error of one conversation, so `skip_bad` does not go on to the next.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    request = {"conversations": [messages], "chat_template": tokenizer.get_chat_template()}
    request |= tokenizer.special_tokens_map | options | {"date": date}
    reply = ask("template", request, SECONDS, BYTES)
    if "refused" in reply:
        raise DataError(
            f"the chat template of {name} refuses the conversation ({reply['refused']}); {TULU}"
        )
    if "runaway" in reply:
        raise ValueError(f"the chat template of {name} is stopped: it {reply['runaway']}; {TULU}")
    return reply["text"]
