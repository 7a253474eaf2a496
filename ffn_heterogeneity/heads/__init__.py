"""Task heads on top of a model, by name.

`HEADS[name](config, settings) -> Head`. The leaves are in `params["task_head"]`. The model's config
(`ModelConfig.head`) and config.json describe the head, so that every command can rebuild it. The
language-model head is `models.causal_lm.logits`: its matrix may be the tied embedding, and training
never materializes its output.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ffn_heterogeneity.heads.base import ROOT, Head
from ffn_heterogeneity.heads.classification import classification_head
from ffn_heterogeneity.models.config import HeadConfig, ModelConfig
from ffn_heterogeneity.models.leaves import ROOTS, drawn, shape_of, sizes
from ffn_heterogeneity.tree import unflatten
from ffn_heterogeneity.wording import unknown

# name -> (the model's config, the head's settings) -> Head
HEADS: dict[str, Callable[[ModelConfig, Mapping[str, Any]], Head]] = {
    "classification": classification_head,
}


def make_head(config: ModelConfig, head: HeadConfig) -> Head:
    """Make the head that `head` describes, for a model of `config`.

    Raises:
      ValueError: unknown name, or a setting that does not fit the model.
    """
    if head.name not in HEADS:
        way = "import the module that adds it (HEADS in heads/__init__.py)"
        raise ValueError(f"{unknown('head', head.name, tuple(HEADS))}; {way}")
    return HEADS[head.name](config, head.settings)


def with_head(
    config: ModelConfig, params: dict, head: HeadConfig | None, key: jax.Array
) -> tuple[ModelConfig, dict]:
    """Add `head` to a model without one, initialized with `key`; None changes nothing.

    (`abstract_params` omits the head's leaves.)

    Raises:
      ValueError: unknown head, or the model has another one.
    """
    if head is None:
        return config, params
    current = config.head  # from an older version, it has fewer settings
    same = (
        current and current.name == head.name and head.settings | current.settings == head.settings
    )
    if same and ROOT in params:
        return dataclasses.replace(config, head=head), params
    if current and not same:
        raise ValueError(
            f"the model has a head {current.name!r} with {current.text}, the objective needs "
            f"{head.name!r} with {head.text}: begin with a model that has none"
        )
    made = make_head(config, head)
    leaves = unflatten(drawn(config, made.leaves, {**sizes(config), **made.sizes}, key))
    return dataclasses.replace(config, head=head), {**params, ROOT: leaves}


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{leaf's path in the tree: shape} of the head that the config describes."""
    assert config.head is not None
    head = make_head(config, config.head)
    sized = {**sizes(config), **head.sizes}
    return {f"{ROOT}/{path}": shape_of(leaf, sized) for path, leaf in head.leaves.items()}


ROOTS[ROOT] = lambda config: make_head(config, config.head).leaves if config.head else {}
