"""Damage by removing each neuron alone; the forward pass starts at the state before its layer."""

import dataclasses
import functools
import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ffn_heterogeneity.evaluate.inputs import OVERFLOW, TextSettings, checked_rows
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.io.metrics import MetricsWriter, read_metrics
from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.models.causal_lm import forward, require_decoder
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.stack import restack, slots, unstack
from ffn_heterogeneity.models.walk import ffn_blocks
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.report.figures import Line, Panel, draw, save
from ffn_heterogeneity.surgery.adapt import fold_all
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.criteria import layer_scores
from ffn_heterogeneity.tree import replaced
from ffn_heterogeneity.wording import check_numbers

BLOCK_INPUT = Probe("block_input", lambda seen, batch, per_layer: seen.block_input, kind="example")
SHOWN, LEAST = 10, 1e-6  # printed neurons; minimum of the figure's log axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class LesionSettings(TextSettings):
    """Settings of `lesions`.

    Attributes:
      layer, token: as in `massive_weights`.
      others, seed: number of random neurons of other layers, and their seed.
    """

    layer: int | None
    token: int | None
    others: int
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, others="[0, inf)")


def lesions(settings: LesionSettings, model: Model, workdir: epath.Path) -> dict:
    """The analysis "lesions": remove single neurons and measure the damage.

    It covers every neuron of one layer and `settings.others` neurons of the other layers. Every
    damage is appended to `<workdir>/metrics.jsonl`; the same command resumes.

    Returns:
      {"layer_index" (from 0), "nll" (of the unpruned model, nats per token), "neurons": one row
      each, {"layer", "neuron", "damage" (nats per token), "entropy_rank" (the share of the layer's
      neurons with a lower entropy: removal by entropy starts at 1), "bos" (|h| on bos)}}.

    Raises:
      ValueError: as `massive_weights` and `TextSettings.rows`; a layer with experts.
    """
    model, _ = fold_all(model)
    require_decoder(model.config, "the NLL of lesions")
    sparse = [i for i, layer in enumerate(model.config.layers) if layer.experts is not None]
    if sparse:
        raise ValueError(f"layer {sparse[0]} has experts: lesions support dense models")
    massive = massive_weights(model.config, model.params, settings.layer, settings.token)
    blocks = {place.layer: block for place, block in ffn_blocks(model.config, model.params)}
    chosen = draw_neurons(model.config, massive.layer, settings.others, settings.seed)
    # Neuron -1 (no removal) appears once for each drawn layer.
    ranks = {layer: entropy_ranks(blocks[layer], layer) for layer, i in chosen if i < 0}
    damages = _damages(settings, model, chosen, workdir)
    neurons = [
        {
            "layer": layer,
            "neuron": i,
            "damage": damages[layer, i] - damages[layer, -1],
            "entropy_rank": float(ranks[layer][i]),
            "bos": float(massive.states[layer][i]),
        }
        for layer, i in chosen
        if i >= 0
    ]
    result = {"layer_index": massive.layer, "nll": damages[massive.layer, -1], "neurons": neurons}
    _say(result)
    _draw(result, workdir)
    return result


def draw_neurons(config: ModelConfig, layer: int, others: int, seed: int) -> list[tuple[int, int]]:
    """(layer, neuron) pairs: all of one layer, some of the rest; by layer, with -1 (none) first."""
    rest = [(i, j) for i, width in enumerate(config.ffn_widths) if i != layer for j in range(width)]
    picks = np.random.default_rng(seed).permutation(len(rest))[:others]
    some = sorted(rest[i] for i in picks)
    chosen = [(layer, i) for i in range(config.ffn_widths[layer])] + some
    result = []
    for drawn_layer in dict.fromkeys(i for i, _ in chosen):
        result += [(drawn_layer, -1), *((i, j) for i, j in chosen if i == drawn_layer)]
    return result


def entropy_ranks(ffn: dict, layer: int) -> np.ndarray:
    """Share of the layer's neurons with a lower outgoing entropy, for each neuron, [m]."""
    scores = layer_scores("entropy", ffn, layer=layer)
    return np.searchsorted(np.sort(scores), scores) / max(len(scores) - 1, 1)


def _damages(
    settings: LesionSettings, model: Model, chosen: Sequence[tuple[int, int]], workdir: epath.Path
) -> dict[tuple[int, int], float]:
    """{(layer, neuron): NLL without the neuron}; neuron -1: no removal.

    `observe` computes the states before each layer; the loop is over changed weights, not data.
    """
    logged = read_metrics(workdir / "metrics.jsonl")
    done = {(row["layer"], row["neuron"]): float(row["nll"]) for row in logged}
    tree, states, at = unstack(model.params), None, None
    options, size = settings.options, settings.batch_size
    rows = checked_rows(np.asarray(settings.rows(model)), model.config.vocab_size)
    starts = range(0, len(rows), size)
    places = np.arange(rows[:, 1:].size, dtype=np.int32).reshape(rows[:, 1:].shape)
    with MetricsWriter(workdir, resume_step=len(chosen), tensorboard=False) as writer:
        for step, (layer, neuron) in enumerate(bar("lesions", chosen)):
            if (layer, neuron) in done:
                continue
            if states is None:
                tokens = [{"tokens": rows[i : i + size, :-1]} for i in starts]
                seen = observe(model.config, model.params, tokens, BLOCK_INPUT, options=options)
                states = seen[BLOCK_INPUT.name]
            if at != layer:
                at, (config, params) = layer, resumed(model.config, tree, states[layer], layer)
                params = jax.device_put(params)
            batches = ((places[i : i + size], rows[i : i + size, 1:]) for i in starts)
            total = sum(float(_nll(config, options, params, *one, neuron)) for one in batches)
            nll = total / places.size
            if neuron < 0 and not np.isfinite(nll):
                raise ValueError(OVERFLOW)
            done[layer, neuron] = nll
            writer.write(step, {"layer": layer, "neuron": neuron, "nll": nll})
    return done


def resumed(
    config: ModelConfig, tree: dict, states_btd: jax.Array, layer: int
) -> tuple[ModelConfig, dict]:
    """The layers from `layer` on, as a model whose embedding of token i is the i-th state."""
    layers, kernel = tree["layers"][layer:], tree["embed"]["embedding"].T
    tail_config = dataclasses.replace(
        config, layers=config.layers[layer:], tied=False, embedding_multiplier=1.0
    )
    if config.positions == "learned":  # the states have them; layers without rotary tables
        tail_config = dataclasses.replace(tail_config, positions="rotary")
    params = {**tree, "layers": layers, "head": tree.get("head", {"kernel": kernel})}
    params["embed"] = {"embedding": np.asarray(states_btd).reshape(-1, config.d_model)}
    return tail_config, restack(tail_config, params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _nll(config, options, params, places, targets, neuron):
    """Sum of the NLL at some places without one neuron of the first layer; -1: no removal."""
    first_slot = slots(params)[0]
    kernel = first_slot.tree["ffn"]["down"]["kernel"]
    lost = (jnp.arange(kernel.shape[1]) == neuron)[None, :, None]
    first = (jnp.arange(kernel.shape[0]) == 0)[:, None, None]
    path = f"{first_slot.path}/ffn/down/kernel"
    params = replaced(params, path, jnp.where(lost & first, 0, kernel))
    batch = {"tokens": places}
    hidden = forward(config, params, batch, options=options)["hidden"]
    counted, head = jnp.ones(targets.shape, bool), params["head"]["kernel"]
    softcap = config.final_softcap
    return chunked_nll(hidden, head, targets, counted, layout="dv", softcap=softcap).total


def _say(result: dict) -> None:
    rows = sorted(result["neurons"], key=lambda row: -row["damage"])
    for row in rows[:SHOWN]:
        print(
            f"layer {row['layer']} (from 0), neuron {row['neuron']}: {row['damage']:+.5f} nats, "
            f"entropy rank {row['entropy_rank']:.4f}, |h(bos)| {row['bos']:.3g}"
        )


def _draw(result: dict, workdir: epath.Path) -> None:
    """Plot the damage against |h(bos)| and against the entropy rank."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    groups = {f"layer {result['layer_index'] + 1}, all": True, "other layers": False}
    panels = []
    for key, xlabel in (("bos", "|h| on bos"), ("entropy_rank", "entropy rank (1: removed first)")):
        lines = []
        for label, inside in groups.items():
            some = [x for x in result["neurons"] if (x["layer"] == result["layer_index"]) == inside]
            damage = np.array([[max(row["damage"], LEAST) for row in some]])
            lines.append(Line(label, [row[key] for row in some], damage))
        panels.append(Panel("", lines, xlabel, "nats lost (at least 1e-6)", True, dots=True))
    figure = draw(panels)
    figure.axes[0].set_xscale("log")
    save(figure, workdir / "lesions.png")
