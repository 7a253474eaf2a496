"""A small run to be killed: `python kill_toy.py <workdir> <steps>` trains or resumes, to its end.

It saves after every second step and evaluates after every third. The learning rate turns its sign,
so that the best checkpoint is at times the latest and at times an old one. Before it touches the
work directory it says "ready" and waits for a line; at the end it writes `end.json`.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from absl import logging
from test_loop import TERMS, compiled, make_loop
from train_toy import HYPER

from ffn_heterogeneity.io.checkpoints import Checkpoints


def hyper(step):
    rate = -0.04 if step % 10 in (4, 5, 6) else 0.05
    return HYPER | {"learning_rate": rate, "dropout": 0.2}


def digest(tree) -> str:
    checksum = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        checksum.update(np.asarray(leaf).tobytes())
    return checksum.hexdigest()


def main(workdir: Path, steps: int) -> None:
    logging.set_verbosity(logging.WARNING)
    compiled(TERMS, 2)
    print("ready", flush=True)
    if not sys.stdin.readline():  # no reader is left
        return
    loop = make_loop(workdir, steps=steps, eval_every=3, checkpoint_every=2, hyper=hyper)
    result = loop.run()
    if result.stopped:
        sys.exit(128 + signal.Signals[result.stopped])
    checkpoints = Checkpoints(workdir / "checkpoints")
    best, _ = checkpoints.restore(result.state, result.best["step"])
    end = {"state": digest(result.state), "best": result.best, "best_state": digest(best)}
    end["kept"], end["best_step"] = checkpoints.steps(), checkpoints.best_step
    (workdir / "end.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
