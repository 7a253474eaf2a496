"""Errors of one compressed feed-forward block: its outputs and its tangent kernel (MLP Fusion,
section V-B, Table I and Figure 1).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data import labelled
from ffn_heterogeneity.data.glue import LabelTask, get_task
from ffn_heterogeneity.data.labelled import Encoded, LabelSettings
from ffn_heterogeneity.evaluate.inputs import ModelSettings, row_form, tokenizer_of
from ffn_heterogeneity.evaluate.ntk import tangent_kernels, token_states
from ffn_heterogeneity.heads import ROOT, with_head
from ffn_heterogeneity.heads.classification import Classification
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.models.config import HeadConfig, ModelConfig
from ffn_heterogeneity.models.stack import layer_leaves, restack
from ffn_heterogeneity.models.walk import ffn_blocks, of_expert, write
from ffn_heterogeneity.probes.observe import token_batches
from ffn_heterogeneity.report.figures import bar_figure
from ffn_heterogeneity.report.tables import number
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.fuse import Fusion, fuse
from ffn_heterogeneity.tree import replaced
from ffn_heterogeneity.wording import check_numbers, markdown_table, settings_from, settings_of

# Baselines: the block that returns its bias alone; as many neurons as the methods keep, drawn at
# random; and these with zero outgoing weights, a block of the same size that computes nothing.
BIAS, RANDOM, RANDOM_BIAS = "bias_only", "random", "random_bias_only"
# Of the block itself, and of the residual stream behind it.
OUTPUTS = {"output_error": "y", "block_error": "block"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NtkSettings(ModelSettings):
    """Settings of `configs/analyze.py:ntk`.

    Attributes:
      fusions: settings of the layer's compression, per method.
      expert: whose outputs and kernels are compared, in a layer with experts; all are compressed.
    """

    layer: int
    expert: int | None
    fusions: tuple[Fusion, ...]
    against: tuple[str, ...]
    data: LabelSettings
    fields: str
    max_rows: int
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, max_rows="[0, inf)", layer="[0, inf)")
        if not self.fusions and not self.against:
            raise ValueError("nothing is compared: give --config.methods or --config.against")

    @classmethod
    def of(cls, config: ConfigDict) -> NtkSettings:
        """Return the settings of a config, which includes keys of `Fusion`."""
        shared = functools.partial(settings_from, Fusion, config, layers=str(config.layer))
        fusions = tuple(shared(method=method) for method in config.methods)
        data = settings_of(LabelSettings, config.data)
        return settings_from(cls, config, fusions=fusions, data=data)

    @property
    def task(self) -> LabelTask:
        """The task whose rows are read; a user's task gets two labels with arbitrary names."""
        fields = tuple(field for field in self.fields.split(",") if field)
        return get_task(self.data.task, fields, ("a", "b") if self.data.task == "labels" else ())

    def read(self) -> None:
        if self.data.path:
            labelled.open_rows(self.data.path)


def ntk(settings: NtkSettings, model: Model, workdir: epath.Path) -> dict:
    """The analysis "ntk": errors of a compressed layer's outputs and tangent kernels.

    It compares every compression method, and other models, with the uncompressed model. A model
    without a head gets a random one, drawn with the seed. Of a layer with experts it measures one,
    on the tokens that are sent to it.

    Returns:
      {"layer", of experts "expert" (both from 1), "rows", "tokens", "kernel_norm" and
      "sgd_kernel_norm" (Frobenius, of the dense model's), "errors": {method: {"ntk_error",
      "sgd_ntk_error": |K - K'|_F; "ntk_cosine": <K, K'> / (|K| |K'|); "ntk_norm_ratio": |K'| / |K|;
      "output_error", "block_error": |y - y'|, averaged over tokens, and "..._words": over those
      that are no special tokens; "kept_share" of the block's weights; "largest_cluster": neurons in
      the largest cluster, where P is kept apart}}}.

    Raises:
      ValueError: as `fuse` and `token_states`; unreadable rows; an expert that is not there, or
        that no token is sent to.
    """
    check_place(model.config, settings.layer, settings.expert)
    data = _rows(settings, model)
    model = with_random_head(model, settings.task.outputs, settings.seed)
    (batch,) = token_batches(data.ids, len(data))
    real = np.asarray(batch["segment_ids"]) > 0
    words = real & ~np.isin(batch["tokens"], tokenizer_of(model).all_special_ids)
    dense = _measured(settings, model, data, "the dense model")
    results: dict[str, Any] = {"layer": settings.layer + 1}
    if settings.expert is not None:
        results["expert"] = settings.expert + 1
        real &= dense["gate"][..., 0] > 0
        words &= real
        if not real.any():
            raise ValueError(
                f"expert={settings.expert}: layer {settings.layer} (from 0) sends it none of the "
                f"tokens of these {len(data)} rows: name another expert, or give other rows"
            )
    results |= {
        "rows": len(data),
        "tokens": int(real.sum()),
        "kernel_norm": float(np.linalg.norm(dense["adam"])),
        "sgd_kernel_norm": float(np.linalg.norm(dense["sgd"])),
    }
    errors = results["errors"] = {}
    for name, other, facts in _others(settings, model):
        measured = _measured(settings, other, data, name)
        errors[name] = errors_of(dense, measured, {"": real, "_words": words}) | facts
        print(f"{name}: NTK error {number(errors[name]['ntk_error'])}", file=sys.stderr)
    _say(results, workdir)
    return results


def check_place(config: ModelConfig, layer: int, expert: int | None) -> None:
    """Check that a layer is there, and that `expert` names one of its experts, if it has any.

    Raises:
      ValueError: the layer or the expert is not there, or an expert must be named.
    """
    if layer >= config.n_layers:
        raise ValueError(f"layer={layer}: the model has {config.n_layers} layers")
    count = config.layers[layer].experts
    if count is None and expert is not None:
        raise ValueError(f"expert={expert}: layer {layer} (from 0) has no experts")
    if count is not None and (expert is None or not 0 <= expert < count):
        raise ValueError(f"expert={expert}: layer {layer} (from 0) has experts 0 to {count - 1}")


def with_random_head(model: Model, outputs: int = 2, seed: int = 0) -> Model:
    """Return the model with a head: its own, or a random one (in the embedding's dtype)."""
    if model.config.head is not None:
        return model
    head = HeadConfig.of("classification", vars(Classification(outputs=outputs)))
    made, params = with_head(model.config, model.params, head, jax.random.key(seed))
    return dataclasses.replace(model, config=made, params=params)


def errors_of(
    dense: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], counted: Mapping[str, Any]
) -> dict[str, float]:
    """The distances of `ntk`'s results; `counted`: suffix -> the tokens averaged over, [N, T]."""
    norms = [float(np.linalg.norm(one["adam"])) for one in (dense, other)]
    errors = {
        "ntk_error": np.linalg.norm(dense["adam"] - other["adam"]),
        "ntk_cosine": np.vdot(dense["adam"], other["adam"]) / max(norms[0] * norms[1], 1e-300),
        "ntk_norm_ratio": norms[1] / max(norms[0], 1e-300),
        "sgd_ntk_error": np.linalg.norm(dense["sgd"] - other["sgd"]),
    }
    for name, state in OUTPUTS.items():
        apart = np.linalg.norm(np.subtract(dense[state], other[state], dtype=np.float64), axis=-1)
        errors |= {name + suffix: apart[tokens].mean() for suffix, tokens in counted.items()}
    return {name: float(value) for name, value in errors.items()}


def _measured(settings: NtkSettings, model: Model, data: Encoded, name: str) -> dict[str, Any]:
    layer, expert = settings.layer, settings.expert
    seen = token_states(model, data, layer, expert, progress=name, **settings.how)
    ffn = dict(layer_leaves(model.params, "ffn"))[layer]
    ffn = ffn if expert is None else of_expert(model.config, layer, ffn, expert)
    kernels = tangent_kernels(model.config, ffn, seen["x"], seen["delta"])
    return kernels | {name: seen[name] for name in (*OUTPUTS.values(), "gate") if name in seen}


def _others(settings: NtkSettings, model: Model):
    """(name, model, further results) of all models to compare with the uncompressed one."""
    for fusion in settings.fusions:
        other, report = fuse(model, fusion)
        facts = {"kept_share": report["kept_share"]}
        if fusion.method == "fusion":  # P: the clusters' sizes
            ffn = dict(layer_leaves(other.params, "ffn"))[settings.layer]
            facts["largest_cluster"] = float(np.max(ffn["neuron_scale"]))
        yield fusion.method, other, facts
    for path in settings.against:
        other = load_model(path)
        for name in ("n_layers", "d_model", "vocab_size"):
            actual, expected = getattr(other.config, name), getattr(model.config, name)
            if actual != expected:
                raise ValueError(f"against={path}: its {name} is {actual}, the model's {expected}")
        check_place(other.config, settings.layer, settings.expert)
        headed = dataclasses.replace(other.config, head=model.config.head)
        params = {**other.params, ROOT: model.params[ROOT]}
        other = dataclasses.replace(other, config=headed, params=params)
        yield epath.Path(path).name, other, {}
    yield BIAS, without_kernel(model, settings.layer), {}
    for ratio in {fusion.ratio for fusion in settings.fusions}:  # one, or none without methods
        drawn = {"criterion": "random", "ratio": ratio, "layers": str(settings.layer)}
        other, _ = SURGERIES["prune"](model, drawn | {"seed": settings.seed})
        yield RANDOM, other, {"kept_share": 1 - ratio}
        yield RANDOM_BIAS, without_kernel(other, settings.layer), {"kept_share": 1 - ratio}


def without_kernel(model: Model, layer: int) -> Model:
    """Return the model with an FFN in that layer that always returns its bias."""
    silent = {
        place: replaced(ffn, "down/kernel", np.zeros_like(ffn["down"]["kernel"]))
        for place, ffn in ffn_blocks(model.config, model.params)
        if place.layer == layer
    }
    params = restack(model.config, write(model.config, model.params, silent))
    return dataclasses.replace(model, params=params)


def _rows(settings: NtkSettings, model: Model) -> Encoded:
    """The first `max_rows` rows of the data."""
    task = settings.task
    split = next(iter(task.validation.values()))
    source = labelled.open_rows(settings.data.path or task.hub, split)
    form = row_form(model.config, settings.data.task, model.config.max_position)
    data = labelled.encode_rows(task, source, tokenizer_of(model), form, labelled=False)
    return labelled.chosen_rows(data, range(min(settings.max_rows or len(data), len(data))))


def _say(results: Mapping[str, Any], workdir: epath.Path) -> None:
    """Print a table on stderr, and draw the kernels' errors as bars (Figure 1)."""
    errors = results["errors"]
    names = list(dict.fromkeys(name for row in errors.values() for name in row))
    rows = [[one, *(number(row.get(name)) for name in names)] for one, row in errors.items()]
    print(markdown_table(("", *names), rows))
    bars = {one: row["ntk_error"] for one, row in errors.items() if row["ntk_error"] > 0}
    bar_figure(bars, "NTK approximation error", workdir / "ntk.png")
