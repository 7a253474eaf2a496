"""Rules for trainable leaves, and shardings of leaves by the names of their axes.

A user's rule is `(regex, value)`; the regex is searched (not matched whole) in the leaf's path
("stack/segment_0/slot_0/ffn/down/kernel") and the first rule that matches decides. Rules are
strict in both directions, so that neither a renamed leaf nor a mistyped rule passes silently.
"""

import collections
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ffn_heterogeneity.tree import Leaf, flatten, is_auxiliary
from ffn_heterogeneity.wording import naming

MESH_AXES = ("data", "fsdp", "tensor")
# Dimension of a leaf -> the mesh axis that shards it; other dimensions are replicated. "fsdp"
# shards the model width, "tensor" heads, experts or inner neurons, and vocabulary. Layers are not
# sharded, because the scan slices them. NF4's codes hold two inputs per byte ("neurons/half"): a
# mesh that shards a kernel's inputs must divide half of them.
CUT = dict.fromkeys(("expert", "neurons", "queries", "keys", "vocab", "pooled"), "tensor")
CUT["d_model"] = "fsdp"


class RuleError(ValueError):
    """A rule matches no leaf, or a mesh cannot shard a leaf; the message names it."""


def match_rules(
    rules: Sequence[tuple[str, Any]], names: Mapping[str, Sequence[str]], default: Any
) -> dict[str, Any]:
    """Return `{path: value of the first matching rule}`.

    The value is a tuple with one value per layer if the layers of a stacked leaf differ.

    Args:
      rules: `(regex, value)` pairs, in order.
      names: path -> the leaf's names, one per layer (`models.stack.layer_names`): a regex is
        searched in the path and in the layer's name.
      default: value of leaves that no rule matches.

    Raises:
      RuleError: a rule has no effect, or an invalid regex.
    """
    compiled = []
    for pattern, value in rules:
        with naming(f"rule {pattern!r} is not a regular expression", re.error, RuleError):
            compiled.append((re.compile(pattern, re.MULTILINE), value))
    keys = {path: [f"{path}\n{name}" for name in per_layer] for path, per_layer in names.items()}
    shown = {key: key.split("\n")[-1] for per_layer in keys.values() for key in per_layer}
    first = {
        key: next((i for i, (regex, _) in enumerate(compiled) if regex.search(key)), len(rules))
        for key in shown
    }
    for i, (regex, _) in enumerate(compiled):
        if i not in first.values():
            shadow = next((name for key, name in shown.items() if regex.search(key)), None)
            why = (
                f"every leaf it matches (first: {shadow!r}) is taken by an earlier rule"
                if shadow
                else f"it matches none of the {len(shown)} leaves, e.g. {[*shown.values()][:3]}"
            )
            if not shadow and "expert" in regex.pattern:
                why += " (a layer has leaves of all its experts: single ones cannot be chosen)"
            raise RuleError(f"rule {regex.pattern!r} decides nothing: {why}. Remove or correct it")
    outcomes, values = (*(value for _, value in compiled), default), {}
    for path, per_layer in keys.items():
        layers = tuple(outcomes[first[key]] for key in per_layer)
        values[path] = layers[0] if len(set(layers)) == 1 else layers
    return values


def by_layer(values: Any, leaf: Any) -> np.ndarray:
    """A value of `match_rules`, or one per layer, shaped to broadcast against its leaf."""
    values = np.asarray(values)
    values = values if values.dtype == bool else values.astype(leaf.dtype)
    return values.reshape(values.shape + (1,) * (leaf.ndim - values.ndim))


def trainable_mask(
    leaves: Mapping[str, Leaf],
    freeze: Sequence[str] = (),
    train_only: Sequence[str] = (),
    names: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return `{path: trains}` from the declarations and the user's patterns.

    If a pattern splits the layers of a stacked leaf, the value is a tuple of one bool per layer
    (which is truthy: some of the leaf trains).

    Args:
      leaves: `models.leaves.declared`; data and a teacher's leaves never train.
      freeze: regexes of leaves that do not train.
      train_only: regexes of the only leaves that train (after `freeze`); empty: all of them.
      names: of the leaves' layers, as in `match_rules`.

    Raises:
      RuleError: a pattern matches nothing, or no leaf trains.
    """
    trained = [path for path, leaf in leaves.items() if leaf.trains and not is_auxiliary(path)]
    rules = [(pattern, False) for pattern in freeze] + [(pattern, True) for pattern in train_only]
    named = {path: (names or {}).get(path, (path,)) for path in trained}
    mask = match_rules(rules, named, not train_only)
    if not any(mask.values()):
        raise RuleError(
            f"no leaf is left to train: freeze={list(freeze)}, train_only={list(train_only)}"
        )
    return dict.fromkeys(leaves, False) | mask


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """Make a mesh over the three axes; (1, 1, 1) is the one-device mesh.

    Args:
      data, fsdp, tensor: sizes; one of them may be -1 and takes the remaining devices.
      devices: None: all of JAX's.

    Raises:
      ValueError: sizes that do not fit the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(data, fsdp, tensor, len(devices))
    where = arranged(sizes, devices[: math.prod(sizes)])
    return Mesh(where, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def arranged(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array of the mesh's sizes: inner axes within a slice, if sizes allow.

    A slice is a set of devices with fast connections, on GPUs a node (`slice_index`).
    (jax.make_mesh takes one slice alone, and splits axes of a v5e's torus, but not of a v6e's.)
    """
    slices = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    outer, left = [], len(slices)
    for size in sizes:
        outer.append(math.gcd(size, left))
        left //= outer[-1]
    if left > 1 or len({*slices.values()}) > 1:  # no axis crosses slices evenly
        return np.asarray(devices, object).reshape(sizes)
    inner = [size // one for size, one in zip(sizes, outer, strict=True)]
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
    more = {"devices": devices, "allow_split_physical_axes": True}
    return mesh_utils.create_hybrid_device_mesh(inner, outer, **more)


def abstract_mesh(*sizes: int) -> AbstractMesh:
    """A mesh of these sizes without devices: to plan on, not to compute on."""
    return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def mesh_sizes(data: int, fsdp: int, tensor: int, count: int) -> tuple[int, ...]:
    """The sizes on `count` devices, with -1 filled in; errors as `make_mesh`."""
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh {tuple(sizes)}: sizes are positive, at most one of them -1")
    if -1 in sizes:
        others = -math.prod(sizes)
        if count % others:
            raise ValueError(f"mesh {tuple(sizes)}: {others} does not divide {count} devices")
        sizes[sizes.index(-1)] = count // others
    if math.prod(sizes) > count:
        raise ValueError(f"mesh {tuple(sizes)} needs {math.prod(sizes)} devices, there are {count}")
    return tuple(sizes)


def spec_of(leaf: Leaf, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The mesh axes that shard the axes of a leaf.

    Experts are sharded if "tensor" divides their number, otherwise their neurons.
    """
    if not leaf.cut:
        return PartitionSpec()
    spec: list[str | None] = []
    for axis, size in zip(leaf.axes, shape, strict=True):
        cut = CUT.get(axis.removesuffix("/half"))
        whole = cut in spec or axis == "expert" and size % mesh.shape["tensor"]
        spec.append(None if whole else cut)
    return PartitionSpec(*spec)


def shardings(mesh: Mesh | AbstractMesh, tree: Any, leaves: Mapping[str, Leaf]) -> Any:
    """Return the tree of `NamedSharding`s of `tree` (arrays or ShapeDtypeStructs).

    Args:
      leaves: `models.leaves.declared` of the tree.

    Raises:
      RuleError: an axis that the mesh cannot divide into equal parts.
    """
    placed = {}
    for path, array in flatten(tree).items():
        spec = spec_of(leaves[path], array.shape, mesh)
        for size, axis, cut in zip(array.shape, leaves[path].axes, spec, strict=False):
            if cut and size % mesh.shape[cut]:
                raise RuleError(
                    f"leaf {path!r} of shape {array.shape}: its axis {axis!r} of {size} cannot be "
                    f"cut into {mesh.shape[cut]} equal parts over {cut}; choose mesh sizes that "
                    "divide it, or declare the leaf with cut=False (models/leaves.py)"
                )
        placed[path] = NamedSharding(mesh, spec)
    return jax.tree.unflatten(jax.tree.structure(tree), placed.values())


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, accumulated: bool = True) -> NamedSharding:
    """Examples over `data` and `fsdp`; `accumulated` batches are [A, B, T], others [B, T]."""
    spec = (None, ("data", "fsdp")) if accumulated else (("data", "fsdp"),)
    return NamedSharding(mesh, PartitionSpec(*spec))


def run_shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """The fields of `RunOptions` that depend on the mesh.

    `activations`: the residual stream [B, T, D], sharded over `data` and `fsdp` by example.
    `table`: the embedding [V, D] during look-up: complete rows, sharded over `tensor`, so that each
    device looks up the tokens of its rows.
    """
    return {
        "activations": NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, None)),
        "table": NamedSharding(mesh, PartitionSpec("tensor", None)),
    }


def describe_shardings(tree: Any, placed: Any) -> dict[str, dict[str, Any]]:
    """`{path: {"shape", "dtype", "spec", "bytes_per_device"}}` of every leaf, JSON-ready.

    Args:
      tree: arrays or ShapeDtypeStructs.
      placed: the tree's shardings, e.g. `state_shardings(mesh, state, leaves)`; only the mesh's
        shape is used, so the devices need not exist.

    Raises:
      ValueError: `placed` has another structure, or divides an axis into unequal parts.
    """
    if jax.tree.structure(placed) != jax.tree.structure(tree):
        raise ValueError("the shardings are those of another tree")
    described = {}
    for (path, leaf), sharding in zip(flatten(tree).items(), jax.tree.leaves(placed), strict=True):
        spec, shape = sharding.spec, tuple(leaf.shape)
        with naming(f"leaf {path!r} of shape {shape}"):
            shard_shape = NamedSharding(sharding.mesh, spec).shard_shape(shape)
        described[path] = {
            "shape": list(shape),
            "dtype": str(leaf.dtype),
            "spec": str(tuple(spec)),
            "bytes_per_device": math.prod(shard_shape) * leaf.dtype.itemsize,
        }
    return described
