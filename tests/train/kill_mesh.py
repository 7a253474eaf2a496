"""kill_toy.py for a tiny Llama on eight fake devices: `kill_mesh.py <workdir> <steps> <d,f,t>`."""

import functools
import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from absl import logging
from mesh_program import HYPER, build, models
from tiny_models import batch_of
from train_toy import ToyBatches

from ffn_heterogeneity.train.loop import LoopConfig, Program, TrainLoop

ROWS, ACCUMULATION = 16, 2
# 1/5 of the rate for three steps: over 120 steps a rate of 0.05 amplifies the meshes'
# different rounding to 1.07e-5 of the gradient's norm (seen at step 50), and a lost step is as
# visible at this rate.
RATE = 0.01


def main(workdir: Path, steps: int, sizes: tuple[int, ...]) -> None:
    logging.set_verbosity(logging.WARNING)
    config = models()["llama"]
    state, step, _, placed = build(config, sizes, accumulation=ACCUMULATION)
    print("ready", flush=True)
    if not sys.stdin.readline():  # no reader is left
        return
    rates = {"learning_rate": RATE, "alpha": float(HYPER["alpha"])}
    program = Program(step, lambda step: rates, shardings=placed)
    when = LoopConfig(steps, checkpoint_every=2, accumulation=ACCUMULATION, tensorboard=False)
    batches = ToyBatches(ROWS, make=functools.partial(batch_of, config.vocab_size))
    loop = TrainLoop(when, program, state, batches, workdir)
    result = loop.run()
    (workdir / "end.json").write_text(json.dumps({"step": result.step}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), tuple(map(int, sys.argv[3].split(","))))
