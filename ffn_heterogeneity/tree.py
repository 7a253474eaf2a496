"""The parameter tree: declarations of leaves (with named axes), and paths of leaves.

Each leaf is declared once. The axes of the model's leaves are named by dimension: "d_model",
"neurons" (of a feed-forward block), "queries" and "keys" (heads times their width), "head" (one
head's width), "vocab", "expert", "route" (columns of a router), "positions", "types", "pooled". The
axes of an adapter's leaves are named by role in their `Linear`: "in" and "out" are the dimensions
of its kernel, "half" and "block" groups of inputs, "picked" some of the outputs; any other name
("rank", "one") is an axis of the adapter alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


class LeafError(ValueError):
    """An undeclared leaf, or one with axes that an operation does not support; names the leaf."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The declaration of one leaf.

    Attributes:
      axes: the names of its axes, in order; a stacked leaf has "layer" first.
      init: initial values: None is random (`models.leaves.init`), a number is a constant.
      trains: False: it is data, which never trains and is never cast.
      decays: whether weight decay applies (to kernels and tables; not to biases and norms).
      cut: False: replicated on every device of a mesh.
      sums: dimensions that its VALUES sum over, so that removing part of one changes the values.
      numbers: the dimension of which its values are indices. In a leaf of experts, `no_indices`
        mark one that has none.
      dtype: dtype of data that are not real numbers.
      optional: added by a surgery; absent in files of other libraries and new models.
      broadcasts: it may lack leading axes; its axes are then the last ones.
      holds: number of parameters in one element.
      reads: share of its parameters that a token is multiplied by (for experts: top_k / E).
    """

    axes: tuple[str, ...]
    init: float | None = None
    trains: bool = True
    decays: bool = False
    cut: bool = True
    sums: tuple[str, ...] = ()
    numbers: str = ""
    dtype: Any = None
    optional: bool = False
    broadcasts: bool = False
    holds: int = 1
    reads: float = 0.0

    def of(self, **changes: Any) -> Leaf:
        """Return the leaf with these fields changed."""
        return dataclasses.replace(self, **changes)

    def beside(self, kernel: Leaf) -> Leaf:
        """Return this adapter's leaf with the dimensions of a kernel instead of roles.

        It also gets the kernel's leading axes (of experts).
        """
        *lead, fan_in, fan_out = kernel.axes
        roles = {"in": fan_in, "out": fan_out, "half": f"{fan_in}/half"}
        roles |= {"block": f"{fan_in}/block", "picked": f"{fan_out}/picked"}

        def dimensions(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(roles.get(name, name) for name in names)

        return self.of(
            axes=(*lead, *dimensions(self.axes)),
            sums=dimensions(self.sums),
            numbers=roles.get(self.numbers, self.numbers),
            reads=self.reads * kernel.reads,
        )

    def axis(self, dimension: str) -> int | None:
        """The axis of the dimension, counted from the right; None if there is none."""
        return self.axes.index(dimension) - len(self.axes) if dimension in self.axes else None

    def depends_on(self, dimension: str) -> bool:
        """True if removing part of the dimension would change the meaning of the leaf's values.

        That is: sums over it, indices of it, or axes over groups of it.
        """
        apart = any(axis.startswith(f"{dimension}/") for axis in self.axes)
        return apart or dimension in self.sums or self.numbers == dimension


def weights(*axes: str, **more: Any) -> Leaf:
    """Declaration of a kernel or a factor: it decays, and every token is multiplied by it."""
    return Leaf(axes, **{"decays": True, "reads": 1.0} | more)


def no_indices(end: int, count: int) -> np.ndarray:
    """Values of `Leaf.numbers` that index nothing: `count` indices from `end` upward.

    They differ, because scatters rely on unique indices.
    """
    return end + np.arange(count, dtype=np.int32)


def data(*axes: str, **more: Any) -> Leaf:
    """Declaration of data, which files of other libraries do not have."""
    return Leaf(axes, **{"trains": False, "optional": True, "holds": 0} | more)


# ---- paths

# Further roots of a tree that a surgery adds and a loss reads (a teacher): frozen, saved in
# checkpoints with the frozen leaves, never exported. Iterations over layers and config patterns
# ignore them.
TEACHER = "teacher"
AUXILIARY = (TEACHER,)


def is_auxiliary(path: str) -> bool:
    """True if a leaf belongs to one of those roots."""
    return path.split("/")[0] in AUXILIARY


def is_abstract(tree: Any) -> bool:
    """True for a tree of shapes, as in a surgery under `jax.eval_shape`."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def path_str(key_path: tuple) -> str:
    """A jax key path as "stack/segment_0/slot_1/ffn/down/kernel"; list indices become numbers."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
    """`{path: leaf}` in tree order."""
    return {path_str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(leaves: dict[str, Any]) -> dict:
    """Inverse of `flatten`; a dict whose keys are exactly 0..n-1 becomes a list again."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ValueError(f"path {path!r} passes through the leaf at {name!r}")
        if last in node:
            raise ValueError(f"path {path!r} is given twice, or is both a leaf and a node")
        node[last] = leaf
    return _lists(tree)


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(key.isdigit() for key in node) and len(node) == 1 + max(map(int, node)):
        return [_lists(node[str(i)]) for i in range(len(node))]
    return {key: _lists(value) for key, value in node.items()}


def subtree(tree: Any, path: str) -> Any:
    """The node at "a/b/c" of nested dicts; the tree itself at ""; None if there is none."""
    for name in path.split("/") if path else ():
        if name not in tree:
            return None
        tree = tree[name]
    return tree


def replaced(tree: dict, path: str, value: Any) -> dict:
    """Return the tree with `value` at that path; the input is unchanged (dicts are copied)."""
    name, _, rest = path.partition("/")
    return {**tree, name: replaced(tree[name], rest, value) if rest else value}


def nodes(tree: dict, wanted: Callable[[dict], bool], path: str = "") -> Iterator[tuple[str, dict]]:
    """Iterate over (path, node) of the outermost dicts for which `wanted` is true."""
    if wanted(tree):
        yield path, tree
        return
    for name, child in tree.items():
        if isinstance(child, dict):
            yield from nodes(child, wanted, f"{path}/{name}" if path else name)
