"""Small runs and their files: settings, flags, rows, programs, and rejected calls."""

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def refused(words: str, function, *arguments, error: type = ValueError, **settings) -> None:
    """Check that the call fails with this message, in one line."""
    with pytest.raises(error, match=words) as caught:
        function(*arguments, **settings)
    assert "\n" not in str(caught.value)


def small_run(text: Path | str, prefix: str = "", **changes) -> dict:
    """A config's keys for two small steps on a text; "__" in a key means a dot."""
    keys = {"steps": 2, "batch_size": 2, "seq_len": 16, "dropout": 0.0, "tensorboard": False}
    keys |= {"data__path": str(text), "data__passage_chars": 100, "data__validation_fraction": 0.2}
    keys |= {"optimizer__learning_rate": 1e-2, "optimizer__warmup_steps": 0, "eval__max_batches": 1}
    return {prefix + key: value for key, value in (keys | changes).items()}


def flags_of(config: str = "", workdir: Path | str = "", **keys) -> list[str]:
    """A script's flags; `keys` are its config's, with "__" for dots."""
    named = {"config": config, "workdir": workdir}
    flags = [f"--{name}={value}" for name, value in named.items() if value]
    return flags + [f"--config.{key.replace('__', '.')}={value}" for key, value in keys.items()]


class Finished(NamedTuple):
    """A script's exit code and its two outputs."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The single line of a user's error; fails if there are more or none."""
        assert self.code == 2, self
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error:")]
        assert len(lines) == 1 and self.err.rstrip().endswith(lines[0]), self.err
        return lines[0]


def run_program(*command, cwd: Path = REPOSITORY, given: str | None = None, **environment):
    """Exit code and outputs of a separate process; `given` is its input."""
    pipes = {"input": given, "capture_output": True, "text": True}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=os.environ | environment, **pipes)
    return Finished(done.returncode, done.stdout, done.stderr)


def write_rows(path: Path, rows) -> Path:
    """Writes rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def read_rows(path) -> list:
    # Not splitlines(): JSON strings may hold U+2028 as it is.
    return [json.loads(line) for line in Path(path).read_text("utf-8").split("\n") if line]


def write_halves(root: Path, **counts: int) -> None:
    """Writes <name>.jsonl for each count of rows, labelled by the half of the alphabet they use."""
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        rows = []
        for i in range(count):
            letters = list("abcdefghijklm" if i % 2 else "nopqrstuvwxyz")
            text = "".join(rng.choice(letters, rng.integers(4, 20)))
            rows.append({"sentence": text, "label": ("low", "high")[i % 2], "score": i % 2 + 0.5})
        write_rows(root / f"{name}.jsonl", rows)


def metrics(workdir: Path) -> list:
    """All rows of a run's metrics, without the clock's numbers."""
    from ffn_heterogeneity.io.metrics import read_metrics

    rows = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("timing/")} for row in rows]


def stop_at_batch(monkeypatch, number: int) -> None:
    """SIGTERM comes while the `number`-th batch from here on is made."""
    from ffn_heterogeneity.data.pipeline import BatchIterator

    inner, calls = BatchIterator.__next__, itertools.count(1)

    def interrupting(self):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self)

    monkeypatch.setattr(BatchIterator, "__next__", interrupting)


@contextlib.contextmanager
def bounded():
    """At most 1 GB more, and 20 seconds."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "kilobytes"
    assert time.perf_counter() - start < 20
