"""Every leaf's shape, dtype, place on a mesh, decay, training and removal, as in leaves.json.

One small model of each family, plain and with each kind of leaf that a surgery or a task puts
there. A change of a declaration shows in that file's diff. If it is meant:

    python tests/models/test_leaves.py --write
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from tiny_models import tiny_of

from ffn_heterogeneity.adapters import macdrop
from ffn_heterogeneity.heads import with_head
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.config import HeadConfig, ModelConfig
from ffn_heterogeneity.models.leaves import declared, neuron_axis
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.stack import layer_names, restack, unstack
from ffn_heterogeneity.models.walk import linears, write
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery import adapt, sparsity
from ffn_heterogeneity.tree import Leaf, LeafError, flatten

FILE = Path(__file__).with_name("leaves.json")
MESH = partition.abstract_mesh(2, 2, 2)
LORA = {"rank": 4, "targets": "attention/|ffn/"}
HEADS = {
    "last": {"pooling": "last"},
    "p32": {"pooling": "p32"},
    "scalar_mix": {"pooling": "scalar_mix", "outputs": 4},
}


def config_of(family: str) -> ModelConfig:
    """Three layers with sizes for a mesh of 2 x 2 x 2 and for NF4."""
    config = tiny_of(family, 3)
    kv_heads = config.n_kv_heads if config.n_kv_heads < config.n_heads else 4
    sizes = {"vocab_size": 48, "d_model": 64, "n_heads": 4, "n_kv_heads": kv_heads, "head_dim": 16}
    layers = tuple(dataclasses.replace(layer, ffn_width=128) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, **sizes)


def beside(model: Model, put) -> Model:
    """The model with `put(kernel's leaves)` instead of the leaves of every `Linear`."""
    tree = unstack(model.params)
    every = linears(model.config, tree)
    new = {place: put(place.path, leaves) for place, leaves in every}
    return dataclasses.replace(model, params=restack(model.config, write(model.config, tree, new)))


def masked(path: str, leaves: dict) -> dict:
    return leaves | {"mask": jnp.ones(leaves["kernel"].shape)}


def low_rank(path: str, leaves: dict) -> dict:
    n, m = leaves["kernel"].shape
    bias = {name: leaf for name, leaf in leaves.items() if name == "bias"}
    return bias | {"low_rank_a": jnp.ones((n, 3)), "low_rank_b": jnp.ones((3, m))}


def dropped(path: str, leaves: dict) -> dict:
    if not path.endswith(("gate", "up")):
        return leaves
    return leaves | macdrop.init(effective_kernel(leaves).shape[0], range(5))


def scaled(model: Model) -> Model:
    tree = unstack(model.params)
    layers = [
        {**layer, "ffn": {**ffn, "neuron_scale": jnp.ones(ffn["down"]["kernel"].shape[:-1])}}
        for layer in tree["layers"]
        for ffn in [layer["ffn"]]
    ]
    params = restack(model.config, {**tree, "layers": layers})
    return dataclasses.replace(model, params=params)


def headed(model: Model, settings: dict) -> Model:
    head = HeadConfig.of("classification", settings)
    config, params = with_head(model.config, model.params, head, jax.random.key(0))
    return dataclasses.replace(model, config=config, params=params)


VARIANTS = {
    "plain": lambda model: model,
    "lora": lambda model: adapt.insert_lora(model, LORA)[0],
    "dora": lambda model: adapt.insert_dora(model, LORA)[0],
    "nf4": lambda model: adapt.quantise(model, {})[0],
    "mask": lambda model: beside(model, masked),
    "neuron_scale": scaled,
    "low_rank": lambda model: beside(model, low_rank),
    "gates": lambda model: sparsity.insert_gates(model, {"rank": 4, "targets": "ffn/"})[0],
    "scores": lambda model: sparsity.insert_scores(model, {"targets": "ffn/"})[0],
    "macdrop": lambda model: beside(model, dropped),
} | {f"head {name}": lambda model, s=s: headed(model, s) for name, s in HEADS.items()}


def removal_axis(path: str, leaf: Leaf) -> str:
    """The axis of a layer's leaf that runs over its neurons, from the right, or "refused"."""
    if "/ffn/" not in path:
        return "-"
    try:
        return str(neuron_axis(path, leaf))
    except LeafError:
        return "refused"


def described(config: ModelConfig, params: dict) -> dict[str, str]:
    """{path, with "*" (or "sparse") for its segment and slot: description of the leaf}."""
    leaves, names = declared(config, params), layer_names(params)
    trains = partition.trainable_mask(leaves)
    specs = flatten(partition.shardings(MESH, params, leaves))
    entries: dict[str, str] = {}
    sparse = config.groups["sparse"]
    apart = sparse if 0 < len(sparse) < config.n_layers else ()  # with dense layers in between
    for path, leaf in flatten(params).items():
        first, axis = names[path][0], removal_axis(path, leaves[path])
        shape = leaf.shape[1:] if path.startswith("stack/") else leaf.shape
        entry = f"{leaf.dtype} {tuple(shape)} {tuple(specs[path].spec)}"
        learns = bool(trains[path])
        entry += f" decays={learns and leaves[path].decays} trains={learns} neurons={axis}"
        pattern = first
        if first.startswith("layers/"):
            _, layer, inside = first.split("/", 2)
            pattern = f"{'sparse' if int(layer) in apart else '*'}/{inside}"
        assert entries.setdefault(pattern, entry) == entry, f"{path}: layers differ"
    return entries


def dump() -> dict:
    """{variant: [{"families", "leaves": new or changed leaves compared with the plain model}]}."""
    plain, groups = {}, {name: [] for name in VARIANTS}
    for family in sorted(families.FAMILIES):
        config = config_of(family)
        for name, make in VARIANTS.items():
            if name.startswith("head ") and config.kind == "encoder_decoder":
                continue  # has none
            given = []

            def build(params, make=make, given=given, config=config):
                model = make(Model(config, params, None, ""))
                given.append(model.config)
                return model.params

            shapes = jax.eval_shape(build, causal_lm.abstract_params(config))
            leaves = described(given[-1], shapes)
            plain.setdefault(family, leaves)
            if name != "plain":
                gone = plain[family].keys() - leaves.keys()
                leaves = {k: v for k, v in leaves.items() if plain[family].get(k) != v}
                leaves |= dict.fromkeys(sorted(gone), "gone")
            group = next((one for one in groups[name] if one["leaves"] == leaves), None)
            if group is None:
                groups[name].append(group := {"families": [], "leaves": leaves})
            group["families"].append(family)
    return groups


def test_what_is_declared_of_every_leaf():
    assert dump() == json.loads(FILE.read_text())


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(json.dumps(dump(), indent=0, sort_keys=True) + "\n")
