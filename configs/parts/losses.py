"""One group a loss: `config.losses.<name> = {weight, settings of the term}`.

`term` says which term a group is (default: the group's name), so that two instances of one can
stand side by side. A weight of None builds nothing; 0 is built and adds nothing, so that a sweep
over the weight is one program. The terms are listed in ffn_heterogeneity/losses/__init__.py.
"""

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

LOSSES = {
    "nll": {
        "weight": 1.0,  # of the text loss
        "reduction": "mean",  # over target tokens, or the "sum" over each document's
    },
    "classification": {"weight": 1.0},  # of the labels' cross-entropy
    "regression": {"weight": 1.0},  # of the squared error
    "nucl": {
        "weight": 1.0,  # the paper's alpha; try powers of ten between 1e-2 and 1e4
        "variant": "mstd",  # ent | gini | mstd
        # Table 3: ffn_out, ffn_in_linear, ffn_in_gated, attention_out.
        "targets": ("ffn_out",),
        "axis": "neurons",  # of the incoming kernels: neurons | outputs
        "control": False,  # gradients with the signs of other weights of their row: a control
    },
    "diversity": {"weight": 1.0},  # neurons of a layer less alike
    "jreg": {
        "weight": 1.0,  # lambda; the paper trains with 1. 0: a baseline whose jumps are seen
        "alpha": 1.0,  # sharpness of softmax(alpha * (1..L)); not the weight
        "final_norm": False,  # h_L before (False) or after the final norm
        "positions": "all",  # tokens that count: all, or the last of each document
    },
    "layerwise": {
        "weight": 1.0,  # of the distance to the teacher's states (config.teacher)
        # block: the residual stream behind it | ffn: what its FFN returns | gradient: of the
        # task's loss, with respect to that.
        "states": "block",
        "sum_hidden": False,  # over the hidden dimension; else its mean
    },
    "load_balance": {
        "weight": 0.01,  # of equal use of the experts; Switch's value
        "pooled": False,  # all layers in one mean, as in transformers' Mixtral
        "per_row": False,  # a mean for each row, as in transformers' Switch
    },
    "router_z": {"weight": 0.001},  # of small router logits; ST-MoE's value
    "size": {
        "weight": 1.0,  # of the Lagrangian, whose multipliers are learnt
        "target": 0.25,  # share of the factors' parameters that gates keep (config.gates)
    },
    # Lambda of ||scores||^2 (config.scores); the default is ours.
    "score_norm": {"weight": 1e-6},
}


def add(config: ConfigDict, names: Sequence[str]) -> None:
    """The groups of `names` added to `config.losses`.

    Raises:
      ValueError: no such loss, or it is there already.
    """
    for name in names:
        if name not in LOSSES or name in config.losses:
            raise ValueError(
                f"loss {name!r}: add one of {', '.join(set(LOSSES) - set(config.losses))}"
            )
        config.losses[name] = LOSSES[name]
        config.losses[name].get_ref("weight")  # a separate reference: the command line may set None


def entropy(config: ConfigDict) -> dict[str, Any]:
    """A monitor: the entropy of the connections that `config.losses.nucl` acts on."""
    nucl = config.losses.get("nucl")
    targets = nucl.get_ref("targets") if nucl else ("ffn_out",)
    return {
        "term": "nucl",  # which term it is, where the group's name does not say it
        "variant": "ent",  # ent | gini | mstd
        "targets": targets,  # those of losses.nucl
        "axis": nucl.get_ref("axis") if nucl else "neurons",  # that of losses.nucl
    }
