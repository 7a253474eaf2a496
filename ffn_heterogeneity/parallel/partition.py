"""Ordered path rules: which leaves train, which decay, how each is sharded.

A rule is `(regex, value)`; the regex is searched (not matched whole) in the leaf's path
("stack/segment_0/slot_0/ffn/down/kernel") and the first rule that matches decides. Rules are
strict in both directions, so that neither a renamed leaf nor a mistyped rule passes silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ffn_heterogeneity.adapters import data_leaves, leaf_axes
from ffn_heterogeneity.paths import flatten, is_auxiliary, path_str
from ffn_heterogeneity.wording import naming

MESH_AXES = ("data", "fsdp", "tensor")


class RuleError(ValueError):
    """A leaf without a rule, or a rule without a leaf; the message names it."""


class _Defaults:
    """Marker: the rules after it are the library's own and may match nothing."""

    def __repr__(self):
        return "DEFAULTS"


DEFAULTS = _Defaults()
Rules = Sequence["tuple[str, Any] | _Defaults"]


def match_rules(rules: Rules, paths: Iterable[str]) -> dict[str, Any]:
    """`{path: value of the first rule whose regex is found in the path}`.

    Args:
      rules: `(regex, value)` pairs, in order. Those after the marker `DEFAULTS` are allowed to
        match nothing: they also speak of adapters and heads that a given model may not have.
      paths: the leaves' paths.

    Raises:
      RuleError: a path matches no rule; a rule before `DEFAULTS` decides no path; a regex is not
        one.
    """
    paths = list(paths)
    compiled, strict = [], True
    for rule in rules:
        if isinstance(rule, _Defaults):
            strict = False
            continue
        pattern, value = rule
        with naming(f"rule {pattern!r} is not a regular expression", re.error, RuleError):
            compiled.append((re.compile(pattern, re.MULTILINE), value, strict))
    matched, used = {}, set()
    for path in paths:
        for i, (regex, value, _) in enumerate(compiled):
            if regex.search(path):
                matched[path] = value
                used.add(i)
                break
        else:
            raise RuleError(
                f"no rule covers the leaf {_shown(path)!r}; rules, in order: "
                f"{[regex.pattern for regex, _, _ in compiled]}. Add a rule for it"
            )
    for i, (regex, _, must_match) in enumerate(compiled):
        if must_match and i not in used:
            shadow = next((p for p in paths if regex.search(p)), None)
            why = (
                f"every leaf it matches (first: {_shown(shadow)!r}) is taken by an earlier rule"
                if shadow
                else f"it matches none of the {len(paths)} leaves, e.g. {[*map(_shown, paths[:3])]}"
            )
            raise RuleError(f"rule {regex.pattern!r} decides nothing: {why}. Remove or correct it")
    return matched


def match_layers(rules: Rules, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """`match_rules` where a stacked leaf's layers have names of their own.

    Args:
      names: path -> the leaf's names, one a layer (`models.stack.layer_names`); a rule matches a
        layer if it is found in the path or in its name.

    Returns:
      {path: value; or, where layers differ, a tuple of one value a layer}.
    """
    keys = {path: [f"{path}\n{name}" for name in own] for path, own in names.items()}
    matched = match_rules(rules, [key for own in keys.values() for key in own])
    values = {}
    for path, own in keys.items():
        layers = tuple(matched[key] for key in own)
        values[path] = layers[0] if len(set(layers)) == 1 else layers
    return values


def _shown(path: str) -> str:
    """A leaf's name: of a layer's, the layer's."""
    return path.split("\n")[-1]


def _named(names: Iterable[str]) -> str:
    return rf"(^|/)({'|'.join(names)})$"


# Leaves that are data, not weights, never train, whatever the user's patterns say: removal masks,
# quantisation codes, scales.
NEVER_TRAIN = (_named(data_leaves()), False)
DEFAULT_TRAINABLE_RULES = (DEFAULTS, NEVER_TRAIN, (r"", True))

# No decay on vectors: biases, norms, magnitudes, factors of neurons, lambda (P-32). The embedding
# decays, as it does in the usual Hugging Face recipes (they spare biases and norms).
DEFAULT_DECAY_RULES = (
    DEFAULTS,
    (_named(name for name, axes in leaf_axes().items() if len(axes) < 2), False),
    (r"norm/(scale|bias)$", False),
    (r"(^|/)lambda$", False),
    (r"", True),
)

# Modules of a layer -> where the axes of their leaves lie: "fsdp" always on the model width,
# "tensor" on heads, inner neurons, vocabulary. The leading None is the stack's layer axis, which is
# never sharded: the scan slices it. NF4's codes hold two inputs a byte ("half"): a mesh that cuts a
# kernel's inputs has to divide half of them.
SIDES = {
    "q|k|v|gate|up": {"in": "fsdp", "half": "fsdp", "out": "tensor"},
    "out|down": {"in": "tensor", "half": "tensor", "out": "fsdp"},
    "ffn": {"neurons": "tensor"},
}
DEFAULT_SHARDING_RULES = (
    DEFAULTS,
    (r"^embed/embedding$", PartitionSpec("tensor", "fsdp")),
    (r"^(head|pooler)/kernel$", PartitionSpec("fsdp", "tensor")),
    # Learned positions, token types and their norm: hundreds of rows, not tens of thousands.
    (r"^embed/(position|token_type|norm/\w+)$", PartitionSpec()),
    (r"^(head|task_head|pooler)/", PartitionSpec()),
    (r"^final_norm/", PartitionSpec()),
    (r"^stack/.*norm/(scale|bias)$", PartitionSpec()),
    *(
        (rf"^stack/.*/({modules})/{name}$", PartitionSpec(None, *map(sides.get, axes)))
        for name, axes in leaf_axes().items()
        for modules, sides in SIDES.items()
    ),
)


def trainable_mask(
    paths: Iterable[str],
    freeze: Sequence[str] = (),
    train_only: Sequence[str] = (),
    names: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """`{path: trains}` from user patterns laid before the defaults.

    Where a pattern splits the layers of a stacked leaf, a tuple of one bool a layer (which is true
    as a whole: some of it trains).

    Args:
      paths: the leaves' paths.
      freeze: regexes of leaves that do not train.
      train_only: regexes of the only leaves that train (after `freeze`); empty: all of them.
      names: of the leaves' layers, as in `match_layers`.

    Raises:
      RuleError: a pattern matches nothing, or nothing is left to train.
    """
    names = {path: (names or {}).get(path, (path,)) for path in paths}
    fixed = re.compile(NEVER_TRAIN[0])
    data = {path: False for path in names if is_auxiliary(path) or fixed.search(path)}
    names = {path: own for path, own in names.items() if path not in data}
    rules: list[Any] = [(pattern, False) for pattern in freeze]
    rules += [(pattern, True) for pattern in train_only]
    rules += [DEFAULTS, (r"", False)] if train_only else list(DEFAULT_TRAINABLE_RULES)
    mask = match_layers(rules, names)
    if not any(mask.values()):
        raise RuleError(
            f"no leaf is left to train: freeze={list(freeze)}, train_only={list(train_only)}"
        )
    return {**mask, **data}


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over the three axes; (1, 1, 1) is the one-device mesh.

    Args:
      data, fsdp, tensor: sizes; at most one of them -1, which takes the devices that are left.
      devices: None: all of JAX's.

    Raises:
      ValueError: sizes that do not fit the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(data, fsdp, tensor, len(devices))
    return jax.make_mesh(
        sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[: math.prod(sizes)]
    )


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


def shardings(mesh: Mesh, tree: Any, rules: Rules = DEFAULT_SHARDING_RULES) -> Any:
    """The tree of `NamedSharding`s that `rules` give to `tree` (arrays or ShapeDtypeStructs).

    Raises:
      RuleError: as in `match_rules`; a spec names more axes than its leaf has, or an axis that the
        mesh has not.
    """
    leaves = flatten(tree)
    inner = {path: _in_its_model(path) for path in leaves}
    by_inner = match_rules(rules, inner.values())
    specs = {path: by_inner[inner[path]] for path in leaves}
    for path, spec in specs.items():
        if len(spec) > len(leaves[path].shape):
            raise RuleError(
                f"leaf {path!r} of shape {leaves[path].shape} cannot take the spec {spec}: "
                "it names more axes than the leaf has"
            )
        axes = [_mesh_axes(entry) for entry in spec]
        names = {name for axis in axes for name in axis}
        if names - set(mesh.axis_names):
            raise RuleError(f"spec {spec} of {path!r} names axes that are not in {mesh.axis_names}")
        for size, axis in zip(leaves[path].shape, axes, strict=False):
            parts = math.prod(mesh.shape[name] for name in axis)
            if size % parts:
                raise RuleError(
                    f"leaf {path!r} of shape {leaves[path].shape}: its axis of {size} cannot be "
                    f"cut into {parts} equal parts over {'x'.join(axis)}; choose mesh sizes that "
                    f"divide it, or give the leaf a sharding rule of its own"
                )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, specs[path_str(path)]), tree
    )


def _in_its_model(path: str) -> str:
    """A model beside the model is cut as it would be alone."""
    return path.partition("/")[2] if is_auxiliary(path) else path


def _mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of the mesh over which a spec cuts one axis of a leaf."""
    if isinstance(entry, tuple):
        return entry
    return () if entry is None else (entry,)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, accumulated: bool = True) -> NamedSharding:
    """Examples over `data` and `fsdp`; `accumulated` batches are [A, B, T], others [B, T]."""
    spec = (None, ("data", "fsdp")) if accumulated else (("data", "fsdp"),)
    return NamedSharding(mesh, PartitionSpec(*spec))


def run_shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """The fields of `RunOptions` that speak of a mesh.

    `activations`: the residual stream [B, T, D], examples over `data` and `fsdp`, whole otherwise.
    `table`: the embedding [V, D] while tokens are looked up: its rows over `tensor`, whole ones, so
    that each device answers for the tokens it has.
    """
    return {
        "activations": NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, None)),
        "table": NamedSharding(mesh, PartitionSpec("tensor", None)),
    }


def describe_shardings(
    mesh: Mesh | AbstractMesh, tree: Any, placed: Any = None
) -> dict[str, dict[str, Any]]:
    """`{path: {"shape", "dtype", "spec", "bytes_per_device"}}` of every leaf, JSON-ready.

    Args:
      mesh: its shape is all that is read: no device need exist.
      tree: arrays or ShapeDtypeStructs.
      placed: the tree's shardings, e.g. `state_shardings(mesh, state)`; None: the default rules'.

    Raises:
      RuleError: as in `shardings`.
      ValueError: `placed` is of another structure, or cuts an axis into unequal parts.
    """
    placed = shardings(mesh, tree) if placed is None else placed
    if jax.tree.structure(placed) != jax.tree.structure(tree):
        raise ValueError("the shardings are those of another tree")
    described = {}
    for (path, leaf), sharding in zip(flatten(tree).items(), jax.tree.leaves(placed), strict=True):
        spec, shape = sharding.spec, tuple(leaf.shape)
        with naming(f"leaf {path!r} of shape {shape}"):
            part = NamedSharding(mesh, spec).shard_shape(shape)
        described[path] = {
            "shape": list(shape),
            "dtype": str(leaf.dtype),
            "spec": str(tuple(spec)),
            "bytes_per_device": math.prod(part) * leaf.dtype.itemsize,
        }
    return described
