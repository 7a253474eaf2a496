"""A tokenizer's chat template, rendered in a process of its own with bounds on time and memory.

A template is a program that came with a model's directory. Jinja's sandbox keeps it from files, not
from looping: hence one process, started with the first conversation and kept, in which
transformers' own function renders (`template_child.py`).
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ffn_heterogeneity.data.sources import DataError

CHILD = Path(__file__).with_name("template_child.py")
SECONDS, BYTES = 4.0, 512 << 20  # of computing, and of memory beside the interpreter's
TULU = "chat_template='tulu' uses the built-in form"


def render_template(tokenizer: Any, messages: Sequence[Mapping[str, str]], **options: bool) -> str:
    """Text of a chat, as `tokenizer.apply_chat_template(messages, tokenize=False, **options)`.

    Raises:
      DataError: the template refuses the conversation.
      ValueError: it takes more than `SECONDS` or `BYTES`, or writes without end; the message names
        the model. No error of one conversation, so `skip_bad` does not go on to the next.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    request = {"conversations": [messages], "chat_template": tokenizer.get_chat_template()}
    request |= tokenizer.special_tokens_map | options
    reply = _renderer(os.getpid()).ask(json.dumps([SECONDS, request]))
    if "refused" in reply:
        raise DataError(
            f"the chat template of {name} refuses the conversation ({reply['refused']}); {TULU}"
        )
    if "runaway" in reply:
        raise ValueError(f"the chat template of {name} is stopped: it {reply['runaway']}; {TULU}")
    return reply["text"]


@functools.cache
def _renderer(process_id: int) -> _Renderer:
    """This process's; one that was forked has its own."""
    return _Renderer()


class _Renderer:
    """The other process; it ends with this one, whose end of the pipe closes then."""

    def __init__(self):
        self.lock, self.process = threading.Lock(), None

    def ask(self, line: str) -> dict[str, str]:
        """Its answer; {"runaway": why} where it had to be ended."""
        with self.lock:
            # Not kept where this is interrupted: its answer would be taken for the next one's.
            process, self.process = self.process or _start(), None
            try:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if answer.endswith("\n"):
                self.process = process
                return json.loads(answer)
            process.communicate()
        if process.returncode == -signal.SIGPROF:
            return {"runaway": f"computes for more than {SECONDS:g} s"}
        return {"runaway": f"ends the process that renders it (exit status {process.returncode})"}


def _start() -> subprocess.Popen:
    # In a session of its own: it outlives Ctrl-C while a run saves its state.
    return subprocess.Popen(
        [sys.executable, "-P", CHILD, str(BYTES)],
        text=True,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
