"""One of several processes that train as one: `process_program.py <address> <count> <index> <out>`.

Process 0 writes the losses of three steps, the first gradient and the last parameters to <out>.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from tiny_models import batch_of

from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel import processes as distributed
from ffn_heterogeneity.parallel.placement import local_rows, place_batch, place_scalars, to_host
from ffn_heterogeneity.tree import flatten

ROWS, ACCUMULATION = 8, 2


def main(address: str, count: int, index: int, out: str) -> None:
    how = f"{address},{count},{index}" if count > 1 else ""
    distributed.initialize(how)
    print(distributed.devices_seen(how))
    from mesh_program import HYPER, build, models

    assert jax.process_count() == count and jax.device_count() == count
    config = models()["llama"]
    shape = (count // 2, 2, 1) if count > 1 else (1, 1, 1)
    state, step, gradient, placed = build(config, shape, accumulation=ACCUMULATION)
    rows = local_rows(placed[1], ROWS, ACCUMULATION)
    assert len(rows) * count == ROWS
    first = {k: v[rows] for k, v in batch_of(config.vocab_size, rows=ROWS, seed=0).items()}
    sharding = partition.batch_sharding(placed[1].mesh, accumulated=False)
    grads = to_host(flatten(gradient(state.params, place_batch(first, sharding))))
    losses = []
    for i in range(3):
        batch = batch_of(config.vocab_size, rows=ROWS, seed=i)
        cut = {k: v[rows].reshape(ACCUMULATION, -1, *v.shape[1:]) for k, v in batch.items()}
        state, metrics = step(state, place_batch(cut, placed[1]), place_scalars(HYPER, placed[2]))
        losses.append(float(metrics["loss"]))
    params = to_host(flatten(state.params))
    arrays = {f"gradient {k}": v for k, v in grads.items()}
    arrays |= {f"parameter {k}": v for k, v in params.items()}
    distributed.on_main(lambda: np.savez(out, losses=losses, **arrays))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
