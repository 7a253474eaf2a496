"""Rules that map leaves to tensors of a file, with permutations of their elements."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ffn_heterogeneity.models.config import ConfigError, ModelConfig
from ffn_heterogeneity.models.leaves import required

Arrays = list[np.ndarray]
# Prefixes of an expert's leaves in tables of names, and of our own names for experts.
EXPERT, OWN = "layers/{i}/experts/{e}/", "ffn_heterogeneity."


@dataclasses.dataclass(frozen=True)
class Rule:
    """Mapping between leaves at `paths` of the unstacked tree and tensors `names` of a file.

    `load` and `save` are exact inverses: views or permutations of the same bits, never arithmetic.
    `shapes`: shapes of the leaves -> those of the tensors, for rules whose `save` copies (None:
    `save` is called instead).
    """

    paths: tuple[str, ...]
    names: tuple[str, ...]
    load: Callable[[Arrays], Arrays]
    save: Callable[[Arrays], Arrays]
    shapes: Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]] | None = None

    def stored_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Shapes that the file's tensors must have if the leaves have `shapes`."""
        leaf_shapes = [shapes[path] for path in self.paths]
        if self.shapes is not None:
            return self.shapes(leaf_shapes)
        empty = np.zeros((), np.int8)
        return [
            a.shape for a in self.save([np.broadcast_to(empty, shape) for shape in leaf_shapes])
        ]


def one_tensor(path: str, name: str) -> Rule:
    """Rule of one tensor per leaf; kernels [in, out] are [out, in] in PyTorch and GGUF."""
    is_kernel = path.endswith("/kernel")

    def turn(arrays: Arrays) -> Arrays:  # (adapters' vectors, too)
        return [a.swapaxes(-1, -2) if is_kernel and a.ndim > 1 else a for a in arrays]

    return Rule((path,), (name,), turn, turn)


def by_expert(path: str, names: Sequence[str]) -> Rule:
    """Rule of a leaf whose first axis is "expert": one tensor per expert, as in `one_tensor`."""
    one = one_tensor(path, "")
    return Rule(
        (path,),
        tuple(names),
        load=lambda arrays: [np.stack(one.load(arrays))],
        save=lambda leaves: one.save(list(leaves[0])),
    )


def one_to_one(config: ModelConfig, names: Mapping[str, str], but: str = "(?!)") -> list[Rule]:
    """Return one rule per leaf from a table {path with "{i}" for the layer: name with "{i}"}.

    Leaves of experts are "layers/{i}/experts/{e}/..." in the table; their names have "{e}" where a
    file has one tensor per expert. Leaves whose path matches the regex `but` need other rules. If
    the table has no experts, their layers' FFN leaves have our own names (`OWN`), one tensor each.

    Raises:
      ConfigError: the config has a leaf that the table does not name.
    """
    rules, dense = [], not any(key.startswith(EXPERT) for key in names)
    for path, leaf, layer in required(config):
        if dense and layer and layer.experts is not None and "/ffn/" in path:
            rules.append(one_tensor(path, OWN + path.replace("/", ".")))
            continue
        if re.search(but, path):
            continue
        key = re.sub(r"layers/\d+/", EXPERT if "expert" in leaf.axes else "layers/{i}/", path)
        if key not in names:
            raise ConfigError(f"family {config.family!r} has no tensor name for the leaf {path!r}")
        name = names[key].replace("{i}", path.split("/")[1])
        each = [name.replace("{e}", str(e)) for e in range(layer and layer.experts or 0)]
        rules.append(by_expert(path, each) if "{e}" in name else one_tensor(path, name))
    return rules


def fused(paths: Sequence[str], name: str, groups: int) -> Rule:
    """Rule of projections of one input that are one tensor in a file, head by head.

    The leaves are kernels [in, groups * h] or biases [groups * h], all of one shape; the tensor is
    [groups * P * h, in] or [groups * P * h]: for every group (head), h rows of each of the P paths.
    With one group the projections are concatenated.
    """

    def load(arrays: Arrays) -> Arrays:
        rows = arrays[0].reshape(groups, len(paths), -1, *arrays[0].shape[1:])
        return [rows[:, i].reshape(-1, *arrays[0].shape[1:]).T for i in range(len(paths))]

    def save(leaves: Arrays) -> Arrays:
        fan_in = leaves[0].shape[:-1]
        rows = [leaf.T.reshape(groups, 1, -1, *fan_in) for leaf in leaves]
        return [np.concatenate(rows, axis=1).reshape(-1, *fan_in)]

    def shapes(leaf_shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [(sum(shape[-1] for shape in leaf_shapes), *leaf_shapes[0][:-1])]

    return Rule(tuple(paths), (name,), load, save, shapes)


def stacked(paths: Sequence[str], name: str, rows: Sequence[int]) -> Rule:
    """Rule of kernels [in, rows_i] that a file concatenates to one tensor [sum of rows, in]."""
    ends = np.cumsum(rows)[:-1]

    def load(arrays: Arrays) -> Arrays:
        return [kernel.T for kernel in np.split(arrays[0], ends)]

    def save(leaves: Arrays) -> Arrays:
        return [np.concatenate([leaf.T for leaf in leaves])]

    def shapes(leaf_shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [(sum(rows), leaf_shapes[0][0])]

    return Rule(tuple(paths), (name,), load, save, shapes)


def fused_qkv(
    config: ModelConfig, names: Mapping[str, str], module: str, groups: int
) -> list[Rule]:
    """Rules of a file with queries, keys and values as one `module` ("{i}" for the layer).

    `names` is the table of all other leaves; `groups` as in `fused`.

    Raises:
      ConfigError: fewer key-value heads than heads.
    """
    if config.n_kv_heads != config.n_heads:
        raise ConfigError(
            f"family {config.family!r} has as many key-value heads as heads: "
            f"n_kv_heads={config.n_kv_heads}, n_heads={config.n_heads}"
        )
    rules = one_to_one(config, names, but=r"/attention/[qkv]/")
    parts = [("kernel", "weight")] + ([("bias", "bias")] if config.attention_bias else [])
    for i in range(config.n_layers):
        for leaf, name in parts:
            paths = [f"layers/{i}/attention/{kind}/{leaf}" for kind in "qkv"]
            rules.append(fused(paths, f"{module.replace('{i}', str(i))}.{name}", groups))
    return rules
