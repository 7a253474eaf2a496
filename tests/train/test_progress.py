"""The progress bar of a run on a terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

BAR = """
from ffn_heterogeneity.train.console import Progress
values = {"classification": 0.6931, "nucl": -0.0465, "jreg": 0.1234, "layerwise": 12.5}
with Progress(123_456, 0) as progress:
    for step in (1, 12_345):
        progress.update(step, values, 1234.5)
"""


def test_the_bar_in_80_columns():
    """Steps, time left and speed come first; the rest is cut off, and nothing is wrapped."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen([sys.executable, "-c", BAR], stderr=theirs) as child:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    lines = shown.decode().replace("\n", "\r").split("\r")
    assert child.returncode == 0 and max(map(len, lines)) <= 80
    last = [line for line in lines if "12345/" in line][-1]
    assert (
        "12345/123456" in last and "<" in last and "1,234 tokens/s, classification 0.6931" in last
    )
