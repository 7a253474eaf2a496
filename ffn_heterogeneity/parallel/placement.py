"""Transfer of arrays between host and devices, with one or several processes."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding


def local_rows(sharding: NamedSharding, batch_size: int, accumulation: int) -> list[int]:
    """Rows of a global batch [batch_size, T] that this process feeds, by micro-batch.

    Args:
      sharding: sharding of accumulated batches [A, B / A, T], from `partition.batch_sharding`.
        Processes that share a part (a tensor axis across hosts) feed the same rows.

    Raises:
      ValueError: micro-batches that the mesh cannot divide into equal parts.
    """
    rows = rows_of_micro_batch(sharding.mesh, batch_size, accumulation)
    indices = sharding.devices_indices_map((accumulation, rows))
    columns = [indices[device][1] for device in sharding.addressable_devices]
    local_indices = sorted({row for column in columns for row in range(rows)[column]})
    return [micro * rows + row for micro in range(accumulation) for row in local_indices]


def rows_of_micro_batch(mesh: Mesh | AbstractMesh, batch_size: int, accumulation: int) -> int:
    """Return B / A, the rows per micro-batch.

    Raises:
      ValueError: micro-batches that the mesh cannot divide into equal parts.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % (accumulation * parts):
        raise ValueError(
            f"batch_size={batch_size} with accumulation={accumulation} cannot be cut over "
            f"{parts} devices (mesh.data x mesh.fsdp): make it a multiple of "
            f"{accumulation * parts}, or give devices to mesh.tensor"
        )
    return batch_size // accumulation


def place_batch(batch: Mapping[str, np.ndarray], sharding: Sharding | None) -> dict[str, jax.Array]:
    """Convert this process's rows of a batch to global arrays."""
    if sharding is None:
        return jax.device_put(dict(batch))
    return {
        name: jax.make_array_from_process_local_data(sharding, leaf) for name, leaf in batch.items()
    }


def place_scalars(values: Mapping[str, float], sharding: Sharding | None) -> dict[str, jax.Array]:
    """Convert floats, equal in every process, to replicated float32 scalars."""
    scalars = {name: np.float32(value) for name, value in values.items()}
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(scalars, sharding)
    return {
        name: jax.make_array_from_callback((), sharding, lambda _, v=value: v)
        for name, value in scalars.items()
    }


def to_host(tree: Any) -> Any:
    """Gather every leaf as a complete numpy array in every process, one leaf at a time."""

    def fetch(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return np.asarray(leaf)
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0))
        from jax.experimental import multihost_utils

        gather = functools.partial(multihost_utils.process_allgather, tiled=True)
        if leaf.ndim < 3:
            return np.asarray(gather(leaf))
        # Layer by layer: a device has room for one in addition to its part of the state.
        made = np.empty(leaf.shape, leaf.dtype)
        for i in range(len(leaf)):
            made[i] = gather(jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False))
        return made

    return jax.tree.map(fetch, tree)


def cut(
    batch: Mapping[str, np.ndarray], accumulation: int, stop: bool = False
) -> dict[str, np.ndarray]:
    """Reshape rows [B, ...] to micro-batches [A, B / A, ...]; several processes add a stop flag.

    Raises:
      ValueError: the accumulation does not divide the rows.
    """
    for name, leaf in batch.items():
        if leaf.shape[0] % accumulation:
            raise ValueError(
                f"batch[{name!r}] has {leaf.shape[0]} rows, which accumulation={accumulation} does "
                "not divide: choose a batch size that is a multiple of it"
            )
    parts = {k: v.reshape(accumulation, -1, *v.shape[1:]) for k, v in batch.items()}
    if jax.process_count() > 1:
        parts["stop"] = np.full(next(iter(parts.values())).shape[:2], np.int32(stop))
    return parts
