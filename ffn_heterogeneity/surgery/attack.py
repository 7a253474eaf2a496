"""Attacks on massive weights: set columns of G and U of one layer to 0 (MW, section 2.3)."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.adapters import adapters_of
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import require_one_stack
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.walk import ffn_blocks, write
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe
from ffn_heterogeneity.surgery.expert_text import ExpertText
from ffn_heterogeneity.wording import check_choice, check_numbers, settings_of

ATTACKS = ("zero", "retain")
OTHERS, APART = 3, 4.0  # other first tokens; how many times larger their |h| may be than bos's
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Attack:
    """Settings of `attack`.

    Attributes:
      attack, k: which neurons become silent, as in `attack`.
      layer, token: as in `massive_weights`.
      expert: of a layer with experts, counted from 0; None: the one with the largest |h|.
      neurons: of `layer`, instead of its massive weights, first the most important: of a model
        that was trained those of the model before.
    """

    attack: str = "zero"
    k: int = 5
    layer: int | None = None
    token: int | None = None
    expert: int | None = None
    neurons: tuple[int, ...] = ()

    def __post_init__(self):
        check_choice("attack", self.attack, ATTACKS)
        check_numbers(self, k="[0, inf)")
        if self.neurons and self.layer is None:
            raise ValueError(f"neurons={self.neurons}: say of which layer")


def attack(
    model: Model, settings: Mapping[str, Any] | Attack, data=None, key=None
) -> tuple[Model, dict]:
    """Set the top-k massive weights ("zero") or all others of their layer ("retain") to 0.

    The weights are columns of G and U; a bias is zeroed with its column (the paper's models have
    none). k = 0 changes nothing under "zero" and zeroes the layer's whole FFN under "retain". In a
    layer with experts only the massive expert changes (the paper's Figure 4, Mixtral), or the one
    that `expert` names. Its neurons are those with the largest |h| when it is applied to bos, also
    if the router does not send bos to it [ours].

    Args:
      settings: those of `Attack`.

    Returns:
      (the model, {"attack", "k", "layer" (from 1), "layer_index" (from 0), "indices",
      "magnitudes"}), in a layer with experts also "expert" (from 1) and "expert_index" (from 0).

    Raises:
      ValueError: settings out of range for the model, or adapters on that layer's kernels (the
        attack would not remove their contribution: fold them first); a layer without that expert.
    """
    settings = settings_of(Attack, settings)
    massive = massive_weights(model.config, model.params, settings.layer, settings.token)
    if settings.expert is not None:
        massive = _of_expert(model, massive, settings.expert, settings.token)
    if settings.neurons:
        massive = massive.of(settings.neurons)
    k, count = settings.k, len(massive.indices)
    if k > count:
        known = f"layer {massive.layer} (from 0) has {count} neurons"
        if settings.neurons:
            known = f"neurons names {count}"
        raise ValueError(f"k={k}: {known}")
    place, chosen = Place(massive.layer, massive.expert, "ffn"), massive.indices[:k]
    blocks = dict(ffn_blocks(model.config, model.params))
    new = {one: block for one, block in blocks.items() if one.layer == place.layer}
    new[place] = silenced(new[place], chosen, settings.attack)
    params = restack(model.config, write(model.config, model.params, new))
    report = {
        "attack": settings.attack,
        "k": k,
        **massive.where(),
        "indices": chosen.tolist(),
        "magnitudes": massive.magnitudes[:k].tolist(),
    }
    return dataclasses.replace(model, params=params), report


@dataclasses.dataclass(frozen=True)
class Massive:
    """The massive layer and its neurons.

    Attributes:
      layer: counted from 0 (the paper counts from 1).
      indices: all neurons of that layer, or of that expert, in descending order of |h|, int [M].
      magnitudes: their |h|, float32 [M].
      states: |h| of every layer's neurons, float32 [M]; with experts [E, M], 0 in those to which
        bos is not sent.
      expert: the one with the largest |h|, counted from 0; None in a layer without experts.
    """

    layer: int
    indices: np.ndarray
    magnitudes: np.ndarray
    states: list[np.ndarray]
    expert: int | None = None

    def where(self) -> dict[str, int]:
        """The place for reports, from 1 ("layer") and from 0 ("layer_index"), also of the expert.

        (The paper does not say how it counts experts.)
        """
        place = {"layer": self.layer + 1, "layer_index": self.layer}
        if self.expert is not None:
            place |= {"expert": self.expert + 1, "expert_index": self.expert}
        return place

    def of(self, neurons: Sequence[int]) -> "Massive":
        """The same place, with these neurons in this order.

        Raises:
          ValueError: one that the layer does not have, or one named twice.
        """
        rank = {neuron: at for at, neuron in enumerate(self.indices.tolist())}
        for at, neuron in enumerate(neurons):
            if neuron not in rank or neuron in neurons[:at]:
                has = f"layer {self.layer} (from 0) has 0 to {len(rank) - 1}, each once"
                raise ValueError(f"neurons={tuple(neurons)}: {neuron!r}; {has}")
        magnitudes = self.magnitudes[[rank[neuron] for neuron in neurons]]
        indices = np.array(neurons, self.indices.dtype)
        return dataclasses.replace(self, indices=indices, magnitudes=magnitudes)


def check_layer(config: ModelConfig, layer: int) -> int:
    """The layer, or ValueError if the model has none with that index."""
    if not 0 <= layer < config.n_layers:
        raise ValueError(f"layer={layer}: the model has layers 0 to {config.n_layers - 1}")
    return layer


@products()
def massive_weights(
    config: ModelConfig, params: dict, layer: int | None = None, token: int | None = None
) -> Massive:
    """Find the neurons with the largest |h| = |act(x G) * (x U)| on a lone bos token, in float32.

    The paper gives no rule for the layer. Here it is the layer with the largest |h| in the first
    half of the stack. In a layer with experts the neurons are those of the expert with the largest
    |h|, before its gate [ours]; the paper takes the one of the highest probability.

    Args:
      layer: counted from 0; None: chosen by that rule.
      token: used instead of bos.

    Raises:
      ValueError: layer or token out of range, an encoder-decoder, a model without bos, or
        non-finite |h|.
    """
    require_one_stack(config, "finding massive neurons")
    given, token = token, config.bos_id if token is None else token
    if token is None or not 0 <= token < config.vocab_size:
        raise ValueError(
            f"token={token} of {config.vocab_size}: this {config.family} model needs "
            "one that stands first, such as its eos"
        )
    if layer is not None:
        check_layer(config, layer)
    experts = [one.experts for one in config.layers]
    probe = _every_state(max(config.ffn_widths), max(count or 1 for count in experts))
    others = [config.vocab_size * i // (OTHERS + 1) for i in range(1, OTHERS + 1)]
    tokens = [token, *(others if given is None else ())]
    alone = [{"tokens": np.array([[one]], np.int32)} for one in tokens]
    every = observe(config, params, alone, probe)[probe.name]
    padded, half = every[:, 0], -(-config.n_layers // 2)
    if not np.isfinite(padded).all():
        bad = int(np.flatnonzero(~np.isfinite(padded).all((1, 2)))[0])
        raise ValueError(f"|h| of layer {bad} (from 0) is not finite: check the checkpoint")
    widths = zip(padded, experts, config.ffn_widths, strict=True)
    states = [one[: count or 1, :width] for one, count, width in widths]
    states = [one if count else one[0] for one, count in zip(states, experts, strict=True)]
    if layer is None:
        layer = int(np.argmax([one.max() for one in states[:half]]))
        _warn_of_others(tokens, every[:half].max((0, 2, 3)))
    magnitudes, expert = states[layer], None
    if experts[layer] is not None:
        expert = int(np.argmax(magnitudes.max(1)))
        magnitudes = magnitudes[expert]
    order = np.argsort(-magnitudes, kind="stable")
    return Massive(layer, order, magnitudes[order], states, expert)


def _warn_of_others(tokens: Sequence[int], largest: np.ndarray) -> None:
    """Warn if other first tokens have far larger states than bos, as in Qwen2.5."""
    if len(tokens) > 1 and (typical := float(np.median(largest[1:]))) > APART * largest[0]:
        _log.warning(
            "the largest |h| on bos (token %d) is %.4g, and on other tokens that stand first %.4g: "
            "the model's massive neurons are not those of bos. Give token=<the first one of your "
            "texts>, and no bos=segment in evaluations",
            tokens[0],
            largest[0],
            typical,
        )


def _of_expert(model: Model, massive: Massive, expert: int, token: int | None) -> Massive:
    """The neurons of one routed expert by |h| when it is applied to a lone bos."""
    config = model.config
    layer = config.layers[massive.layer]
    if layer.experts is None or not layer.shared <= expert < layer.experts:
        has = "no experts"
        if layer.experts is not None:
            has = f"routed experts {layer.shared} to {layer.experts - 1}"
        raise ValueError(f"expert={expert}: layer {massive.layer} (from 0) has {has}")
    ids = np.array([config.bos_id if token is None else token], np.int32)
    text, leaves = ExpertText(model, [ids]), unstack(model.params)["layers"]
    for one, of_one in zip(config.layers[: massive.layer], leaves, strict=False):
        text.move(one, of_one)
    states = text.seen(massive.layer, leaves[massive.layer]).states
    assert states is not None
    magnitudes = np.abs(states[expert - layer.shared, 0])
    order = np.argsort(-magnitudes, kind="stable")
    return Massive(massive.layer, order, magnitudes[order], massive.states, expert)


@functools.cache
def _every_state(width: int, experts: int) -> Probe:
    """|h| of one lone token a row, float32 [B, experts, width]; of a dense layer in the first."""

    def function(seen, batch, per_layer):
        rows = len(seen.ffn_input)
        if seen.routing is None:
            places = jnp.arange(rows), jnp.zeros(rows, jnp.int32)
            states = seen.require_state()[:, 0]
        else:
            places = seen.routing.rows.tokens, seen.routing.rows.experts
            states = seen.routing.rows.states
        magnitudes = jnp.abs(states.astype(jnp.float32))
        magnitudes = jnp.pad(magnitudes, ((0, 0), (0, width - magnitudes.shape[-1])))
        # Rows of no expert (-1) are left out.
        kept = jnp.where((places[1] >= 0)[:, None], magnitudes, 0)
        return jnp.zeros((rows, experts, width)).at[places].max(kept)

    return Probe("ffn_state", function, kind="example")


def silenced(block: dict, chosen: Sequence[int], attack: str) -> dict:
    """Return an FFN's leaves with the chosen (or all other) columns of gate and up set to 0.

    Raises:
      ValueError: those kernels have adapters.
    """
    width = block["up"]["kernel"].shape[-1]
    lost = np.isin(np.arange(width), chosen) == (attack == "zero")
    result = dict(block)
    for name in ("gate", "up"):
        if name not in block:
            continue
        if adapters_of(block[name]):
            raise ValueError(
                f"ffn/{name} carries adapters, which an attack would leave: fold them "
                "first (surgery fold)"
            )
        result[name] = jax.tree.map(
            lambda leaf: np.where(lost, np.zeros((), leaf.dtype), leaf), block[name]
        )
    return result
