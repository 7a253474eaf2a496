"""Main program of `child.py`: reads and answers lines of JSON, within limits, until stdin ends.

`child.py` starts it with a task and the bytes that it may use in addition to those at its start.
Each line has the limit in seconds and the input. The kernel enforces the limits, because a single
Python operation (`'x' * 10**11`, `9**9**9`) can exhaust time or memory.
"""

import datetime
import json
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def template() -> Callable[[Any], dict[str, Any]]:
    """Return a function that renders a conversation with a chat template."""
    from transformers.utils import chat_template_utils as theirs

    def render(request: Any) -> dict[str, Any]:
        day = datetime.datetime.fromisoformat(request.pop("date"))
        # Read by its `strftime_now`; a function cannot be passed as an argument.
        theirs.__dict__["datetime"] = types.SimpleNamespace(now=lambda: day)
        text = theirs.render_jinja_template(**request)[0][0]
        # Text that is many times longer than the input is not a conversation.
        too_long = len(text) > (1 << 20) + 4 * len(json.dumps(request))
        return {"runaway": f"writes {len(text):,} characters"} if too_long else {"text": text}

    return render


def tokenizer() -> Callable[[Any], dict[str, Any]]:
    """Return a function that reads a tokenizer.json and encodes a sample of all kinds of text."""
    from tokenizers import Tokenizer

    def encode(path: Any) -> dict[str, Any]:
        count, text = 0, _sample()
        made = Tokenizer.from_file(path)
        for sample in text:
            count += len(made.encode(sample).ids)
        too_long = count > 64 * sum(map(len, text))
        return {"runaway": f"makes {count:,} tokens of a page"} if too_long else {"tokens": count}

    return encode


def archive() -> Callable[[Any], dict[str, Any]]:
    """Return a function that reads the texts of runs in a .tar (compressed or not), in memory."""
    import tarfile

    def read(request: Any) -> dict[str, Any]:
        path, names, folder, most = request
        texts = {}
        with tarfile.open(path) as opened:
            for member in opened:
                opened.members = []  # tarfile would keep them all in memory
                if member.size < 0:  # some versions of Python seek back and loop forever
                    raise ValueError(f"{member.name!r:.80} has a negative size")
                place, _, name = os.path.normpath(member.name).rpartition("/")
                if not member.isfile() or name not in names and place.split("/")[-1] != folder:
                    continue
                if member.size > most:
                    raise ValueError(f"{member.name!r:.80} has {member.size:,} bytes")
                texts[f"{place}/{name}".lstrip("/")] = opened.extractfile(member).read().decode()
        return {"texts": texts}

    return read


def _sample() -> list[str]:
    """Sample text: printable characters of the common Unicode blocks, runs of some, and words."""
    blocks = ((0x20, 0x7F), (0xA0, 0x530), (0x5D0, 0x600), (0x900, 0x980), (0x2000, 0x2070))
    blocks += ((0x3040, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAC80), (0x1F600, 0x1F640))
    every = "".join(chr(i) for start, stop in blocks for i in range(start, stop))
    runs = [
        c * 300 + "!" for c in ("a", "B", "1", " ", "\n", ".", "-", "ab", "a ", "é", "字", " \n")
    ]
    return ["", "One word, 2 numbers; it's \t all.\r\n\n" * 8, every, " ".join(every), *runs]


TASKS = {"template": template, "tokenizer": tokenizer, "archive": archive}


def main(task: str, more: int) -> None:
    answer = TASKS[task]()
    pages = Path("/proc/self/statm")
    if pages.exists():  # elsewhere the address space cannot be limited
        limit = int(pages.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        seconds, request = json.loads(line)
        # A limit on CPU time, not on waiting. SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply = json.dumps(answer(request))
        except MemoryError:
            reply = json.dumps({"runaway": f"wants more than {more >> 20} MB"})
        except BaseException as error:  # untrusted code; a library that panics
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reply = json.dumps({"refused": lines[0][:200]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
