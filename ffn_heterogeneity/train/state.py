"""The state of a training step, and the split into trainable and frozen leaves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.tree import Leaf, flatten, unflatten


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run between two steps; a pytree.

    Attributes:
      step: int32 scalar, the number of finished optimizer steps.
      params: the whole parameter tree: trainable leaves float32, frozen ones in storage dtype.
      opt_state: the optimizer's state, for trainable leaves only.
      key: uint32 [2], raw data of the threefry key that every step's randomness is folded from.
        (Raw, so that a checkpoint is plain numbers.)
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def not_finite(params: Any) -> list[str]:
    """Paths of the leaves with NaN or infinity."""
    floats = {p: x for p, x in flatten(params).items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    return [path for path, leaf in floats.items() if not jnp.isfinite(leaf).all()]


def split_params(params: Any, trainable: Mapping[str, bool]) -> tuple[dict, dict]:
    """`(trainable, frozen)`, two flat dicts `{path: leaf}`; `merge_params` is the inverse."""
    leaves = flatten(params)
    missing = [path for path in leaves if path not in trainable]
    if missing:
        raise ValueError(f"trainable has no entry for the leaf {missing[0]!r}")
    return (
        {path: leaf for path, leaf in leaves.items() if trainable[path]},
        {path: leaf for path, leaf in leaves.items() if not trainable[path]},
    )


def merge_params(trainable: Mapping[str, Any], frozen: Mapping[str, Any]) -> Any:
    """The nested tree of both; keys are sorted, as in JAX, so the order is deterministic."""
    both = {**trainable, **frozen}
    return unflatten({path: both[path] for path in sorted(both)})


def create_state(
    params: Any,
    optimizer: optax.GradientTransformationExtraArgs,
    trainable: Mapping[str, bool],
    *,
    seed: int = 0,
    shardings: TrainState | None = None,
) -> TrainState:
    """Create the initial state. Trainable leaves become float32; frozen ones are unchanged.

    Args:
      params: tree of numpy or jax arrays, the same in every process. It stays valid: donating the
        state does not delete it.
      optimizer: from `make_optimizer`.
      trainable: `{path: trains}`.
      seed: seed of all randomness of the run.
      shardings: from `state_shardings`: every device gets only its part of a leaf, and the
        optimizer's state is created with its sharding. None: the default device.

    Raises:
      ValueError: a trainable leaf is not of a floating dtype.
    """
    train, frozen = split_params(params, trainable)
    for path, leaf in train.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"leaf {path!r} of dtype {leaf.dtype} cannot train: freeze it")
    if shardings is None:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = TrainState(here, jax.tree.map(lambda _: here, params), None, here)
    where = flatten(shardings.params)

    def place(leaf: Any, sharding: Any, dtype: Any = None) -> jax.Array:
        # A copy of each part, because the step donates the state and must not delete the caller's
        # arrays; on CPU an array may borrow numpy's memory.
        return jax.make_array_from_callback(
            np.shape(leaf), sharding, lambda index: np.array(leaf[index], dtype=dtype)
        )

    key = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    train = {path: place(leaf, where[path], jnp.float32) for path, leaf in train.items()}
    frozen = {path: place(leaf, where[path]) for path, leaf in frozen.items()}
    return TrainState(
        step=place(np.zeros((), np.int32), shardings.step),
        params=merge_params(train, frozen),
        opt_state=jax.jit(optimizer.init, out_shardings=shardings.opt_state)(train),
        key=place(np.asarray(key), shardings.key),
    )


def abstract_state(
    params: Any, optimizer: optax.GradientTransformationExtraArgs, trainable: Mapping[str, bool]
) -> TrainState:
    """Shapes and dtypes of `create_state`, without allocating memory."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def build(tree):
        train, frozen = split_params(tree, trainable)
        train = {path: leaf.astype(jnp.float32) for path, leaf in train.items()}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=merge_params(train, frozen),
            opt_state=optimizer.init(train),
            key=jnp.zeros((2,), jnp.uint32),
        )

    return jax.eval_shape(build, shapes)


def state_shardings(mesh: Mesh, state: TrainState, leaves: Mapping[str, Leaf]) -> TrainState:
    """The state's `NamedSharding`s: parameters by their axes, moments like their parameter.

    A leaf of the optimizer's state belongs to the parameter whose path is one of its keys. It gets
    that parameter's spec if the shapes agree; the spec without the reduced axis if it has the
    parameter's shape without one axis (Adafactor's factored rows and columns); and is replicated
    otherwise (counters).

    Args:
      leaves: `models.leaves.declared` of the parameters.
    """
    params = partition.shardings(mesh, state.params, leaves)
    by_path, shapes = flatten(params), {p: x.shape for p, x in flatten(state.params).items()}
    replicated = partition.replicated(mesh)

    def of_opt_leaf(key_path, leaf):
        names = [getattr(key, "key", getattr(key, "name", None)) for key in key_path]
        path = next((name for name in names if name in by_path), None)
        if path is None:
            return replicated
        if shapes[path] == leaf.shape:
            return by_path[path]
        axis = _reduced_axis(path, shapes[path], leaf.shape, last="v_row" in names)
        if axis is None:
            return replicated
        spec = [*by_path[path].spec, *([None] * len(shapes[path]))][: len(shapes[path])]
        return NamedSharding(mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))

    opt_state = jax.tree_util.tree_map_with_path(of_opt_leaf, state.opt_state)
    return TrainState(step=replicated, params=params, opt_state=opt_state, key=replicated)


def _reduced_axis(path: str, shape: tuple, reduced: tuple, last: bool) -> int | None:
    """The axis without which `shape` is `reduced`; `last` decides for a square kernel.

    The layer axis is never reduced; optax's "v_row" has lost the last of two equal axes.
    """
    first = 1 if path.startswith("stack/") else 0
    fitting = [i for i in range(first, len(shape)) if shape[:i] + shape[i + 1 :] == reduced]
    return (fitting[-1] if last else fitting[0]) if fitting else None
