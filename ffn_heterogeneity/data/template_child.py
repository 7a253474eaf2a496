"""Renders chat templates within bounds: a line of JSON in, a line of JSON out, until stdin ends.

Started by `templates.py` with the bytes it may use beside what it has when it begins; a line says
how many seconds its rendering may compute, and what is rendered. Nothing can be trusted to end by
itself, as one operation of Python (`'x' * 10**11`, `9**9**9`) can take all of either: the kernel
ends it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template


def main(more: int) -> None:
    pages = Path("/proc/self/statm")
    if pages.exists():  # elsewhere address space is not bounded in any case
        limit = int(pages.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        seconds, request = json.loads(line)
        # Of computing, not of waiting: a busy machine changes nothing. SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            text = render_jinja_template(**request)[0][0]
            # What many times longer is than all that went in is no conversation.
            too_long = len(text) > (1 << 20) + 4 * len(line)
            reply = {"runaway": f"writes {len(text):,} characters"} if too_long else {"text": text}
            reply = json.dumps(reply)
        except MemoryError:
            reply = json.dumps({"runaway": f"wants more than {more >> 20} MB"})
        except Exception as error:  # a template is a program of its author's
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reply = json.dumps({"refused": lines[0][:200]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
