"""Heads of labels and numbers on a vector pooled over depth (P-32, section 3).

    pooled = sum_l w_l h_l,  l = 1 .. L,  w = softmax(lambda)

h_l is the pooled token's state after block l. Choices that the paper leaves open: lambda starts at
0, which is average pooling. A model's final norm is applied to the sum ("pooled"), or to h_L before
the sum ("hidden_states", as returned by transformers), or not at all ("none"). For the last layer
alone the first two are equal. The next layers are those of the family's transformers class,
regardless of the model's file: BERT's pooler (a dense layer of the head if the model has none),
RoBERTa's dense and tanh (never a pooler), a decoder's projection without a bias. An encoder-decoder
reads the text with both stacks (`context.with_both_sides`); its head is RoBERTa's, on the decoder's
state at the text's eos, before the output multiplier (transformers' T5; MLP Fusion's Switch).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.heads.base import ROOT, Head
from ffn_heterogeneity.models.causal_lm import finish
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import family_by_name
from ffn_heterogeneity.models.linear import Linear
from ffn_heterogeneity.probes.pooled import pooled, pooled_probe
from ffn_heterogeneity.tree import Leaf, weights
from ffn_heterogeneity.wording import check_choice, check_numbers, settings_of

# Only the last layer; the paper's; the average of all layers; ELMo's (Peters et al. 2018).
POOLINGS = ("last", "p32", "average", "scalar_mix")
LEARNING = ("p32", "scalar_mix")  # poolings with learned layer weights
NORMS = ("pooled", "hidden_states", "none")
# config.json's `problem_type`; "": one of several labels, or without labels one number.
PROBLEMS = ("", "regression", "multi_label_classification")
LEARNT = r"^task_head/(lambda|gamma)$"
_EPSILON = 1e-12  # of the norm in a scalar mix


@dataclasses.dataclass(frozen=True)
class Classification:
    """Settings of the head, saved in config.json and used by `classify` to read rows.

    Attributes:
      pooling, final_norm: see this module.
      outputs: number of outputs: one per label, one for a regression.
      task, fields, labels: as in `data.glue.LabelTask`.
      max_length: length of the longest training row in tokens; 0: the model's maximum.
      problem: a name of `PROBLEMS`; "regression": `labels` are the names of its numbers.
    """

    pooling: str = "last"
    final_norm: str = "pooled"
    outputs: int = 2
    task: str = ""
    fields: Any = ()
    labels: Any = ()
    max_length: int = 0
    problem: str = ""

    def __post_init__(self):
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("final_norm", self.final_norm, NORMS)
        check_choice("problem", self.problem, PROBLEMS)
        if self.pooling == "last" and self.final_norm == "none":
            raise ValueError("final_norm='none' needs a sum over layers; pooling='last' has none")
        check_numbers(self, outputs="[1, inf)", max_length="[0, inf)")
        if not _texts(self.labels) or len(self.labels) not in (0, self.outputs):
            raise ValueError(f"labels={self.labels!r:.80}: {self.outputs} texts, or none")
        if isinstance(self.fields, str) or not all(_texts(x, 2) for x in self.fields):
            raise ValueError(f"fields={self.fields!r:.80}: lists of one text or two")


def _texts(values: Any, most: float = math.inf) -> bool:
    fits = isinstance(values, (list, tuple)) and len(values) <= most
    return fits and all(isinstance(x, str) for x in values)


def depth_weights(leaves: Mapping[str, Any], layers: int) -> jax.Array:
    """w, at least float32 [L]: softmax(lambda), or 1 / L if nothing is learned."""
    if "lambda" in leaves:
        wide = jnp.promote_types(leaves["lambda"].dtype, jnp.float32)
        return jax.nn.softmax(leaves["lambda"].astype(wide))
    return jnp.full(layers, 1 / layers, jnp.float32)


def classification_head(model: ModelConfig, settings: Mapping[str, Any]) -> Head:
    """Make the head that `settings` describe; predictions (logits or numbers): [B, outputs].

    Predictions are float32.

    Raises:
      ValueError: an invalid setting.
    """
    options, both = settings_of(Classification, settings), model.kind == "encoder_decoder"
    if both and options.pooling != "last":
        name = f"a {model.family} model is an encoder-decoder"
        raise ValueError(f"{name}: pooling={options.pooling!r} needs one stack; set pooling=last")
    roberta = both or (model.is_encoder and family_by_name(model.family).dense)
    deep = both or model.is_encoder  # a dense layer and tanh before the outputs
    dense = roberta or (model.is_encoder and not model.pooler)
    leaves = {"out/kernel": weights("d_model", "outputs", cut=False)}
    if deep:
        leaves["out/bias"] = Leaf(("outputs",), 0.0, cut=False)
    if dense:
        leaves["dense/kernel"] = weights("d_model", "pooled", cut=False)
        leaves["dense/bias"] = Leaf(("pooled",), 0.0, cut=False)
    if options.pooling in LEARNING:
        leaves["lambda"] = Leaf(("layers",), 0.0, cut=False)
    if options.pooling == "scalar_mix":
        leaves["gamma"] = Leaf((), 1.0, decays=True, cut=False)

    def apply(params: dict, outputs: dict, batch: Mapping[str, jax.Array], drop) -> jax.Array:
        head = params[ROOT]
        if options.pooling == "last":
            x_bd = pooled(outputs["hidden"], batch, model.is_encoder)
            x_bd = x_bd / model.output_multiplier if both else x_bd
        else:
            x_bd = _summed(model, options, params, outputs["probes"]["pooled"])
        if deep:
            x_bd = drop(x_bd) if roberta else x_bd
            # (Heads on a RoBERTa with a pooler were once trained without a dense layer.)
            tanh_of = head["dense"] if "dense" in head else params["pooler"]
            x_bd = drop(jnp.tanh(_linear(x_bd, tanh_of)))
        # In half precision a regression could have only a few hundred values.
        return _linear(x_bd.astype(jnp.promote_types(x_bd.dtype, jnp.float32)), head["out"])

    def says(head: Mapping[str, Any]) -> dict[str, Any]:
        if options.pooling == "last":
            return {}
        weights = depth_weights(head, model.n_layers)
        learnt = {
            "lambda": head.get("lambda"),
            "gamma": head.get("gamma"),
            "depth_weights": weights,
        }
        return {name: jax.device_get(value) for name, value in learnt.items() if value is not None}

    probe = pooled_probe(model.is_encoder, options.final_norm == "hidden_states")
    probes = () if options.pooling == "last" else (probe,)
    return Head(leaves, apply, says, probes, {"outputs": options.outputs})


def _summed(model: ModelConfig, options: Classification, params: dict, state_lbd: jax.Array):
    """The weighted sum [B, D], in the states' dtype."""
    head = params[ROOT]
    wide_lbd = state_lbd.astype(jnp.promote_types(state_lbd.dtype, jnp.float32))
    if options.pooling == "scalar_mix":
        centred = wide_lbd - jnp.mean(wide_lbd, -1, keepdims=True)
        variance = jnp.mean(centred * centred, -1, keepdims=True)
        wide_lbd = centred * jax.lax.rsqrt(variance + _EPSILON)
    weights_l = depth_weights(head, model.n_layers).astype(wide_lbd.dtype)
    x_bd = jnp.einsum("l,lbd->bd", weights_l, wide_lbd).astype(state_lbd.dtype)
    x_bd = finish(model, params, x_bd) if options.final_norm == "pooled" else x_bd
    # Behind the final norm, which would cancel it.
    return (head["gamma"] * x_bd).astype(x_bd.dtype) if "gamma" in head else x_bd


def _linear(x: jax.Array, leaves: Mapping[str, jax.Array]) -> Any:
    layer = Linear(leaves["kernel"].shape[1], "bias" in leaves)
    return layer.apply({"params": leaves}, x)
