"""Names of leaves: nested dicts (and lists of layers) to "a/b/c" strings and back; "a.b.c"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

# Roots of a tree beside the model, which a surgery puts there and a loss reads (a teacher): frozen,
# sealed in checkpoints with the frozen leaves, never exported. No walk over layers and no pattern
# of a config sees them.
TEACHER = "teacher"
AUXILIARY = (TEACHER,)


def is_auxiliary(path: str) -> bool:
    """True if a leaf belongs to one of those roots."""
    return path.split("/")[0] in AUXILIARY


def is_abstract(tree: Any) -> bool:
    """True of a tree of shapes alone, as a surgery sees it under `jax.eval_shape`."""
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
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"path {path!r} passes through the leaf at {part!r}")
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
    """The node at "a/b/c" of nested dicts; the tree itself at ""; None: nothing is there."""
    for name in path.split("/") if path else ():
        if name not in tree:
            return None
        tree = tree[name]
    return tree


def replaced(tree: dict, path: str, value: Any) -> dict:
    """The tree with `value` at that path; dicts on the way are new, the tree given is untouched."""
    name, _, rest = path.partition("/")
    return {**tree, name: replaced(tree[name], rest, value) if rest else value}


def nodes(tree: dict, wanted: Callable[[dict], bool], path: str = "") -> Iterator[tuple[str, dict]]:
    """(path, node) of the outermost dicts of nested dicts that are wanted; they are the tree's."""
    if wanted(tree):
        yield path, tree
        return
    for name, child in tree.items():
        if isinstance(child, dict):
            yield from nodes(child, wanted, f"{path}/{name}" if path else name)


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optimizer.name": "adamw"}` of a nested config; an empty group is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten_config(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat
