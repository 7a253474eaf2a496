"""Surgeries before a training (`config.prepare`), one group each, and what then trains."""

from collections.abc import Sequence

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ffn_heterogeneity.adapters import REFRESHES
from ffn_heterogeneity.adapters.macdrop import Macdrop
from ffn_heterogeneity.surgery.adapt import Lora, Quantised
from ffn_heterogeneity.surgery.fuse import Fusion
from ffn_heterogeneity.surgery.sparsity import Gates, ScoreMask, Scores
from ffn_heterogeneity.surgery.truncate import Truncation


def lora() -> ConfigDict:
    return ConfigDict(
        {
            "rank": Lora.rank,  # columns of A, rows of B
            "alpha": Lora.alpha,  # K + (alpha / rank) A B
            # Found in the paths of kernels, layers/<i>/attention/(q|k|v|out), .../ffn/(gate|...).
            "targets": Lora.targets,
        }
    )


def nf4() -> ConfigDict:
    # Found in the paths of kernels, as lora's.
    return ConfigDict({"targets": Quantised.targets})


def macdrop() -> ConfigDict:
    return ConfigDict(
        {
            "k": Macdrop.k,  # massive neurons
            "p0": Macdrop.p0,  # probability that a weight is dropped, at first
            # step: p0 (1 - t/T) | epoch_before | epoch_after | exp: p0 exp(-a t) | constant.
            "curriculum": Macdrop.curriculum,
            "a": Macdrop.a,  # of exp, for 579 steps; scaled to others
            "epochs": Macdrop.epochs,  # of the two curricula by epoch
            # massive: those k | layer: all neurons of their layer | others: all but the k.
            "scope": Macdrop.scope,
            "layer": placeholder(int),  # from 0; default: the layer with the largest |h| early on
        }
    )


def fuse() -> ConfigDict:
    return ConfigDict(
        {
            "method": Fusion.method,  # as in configs/fuse.py, but svd and unstructured
            "ratio": Fusion.ratio,  # the share of every layer's neurons that goes
            "layers": Fusion.layers,  # all | top | bottom | 0,3,7 | 4-9
            "skip": "massive",  # that layer stays as it is; "": no layer does
            "n_init": Fusion.n_init,  # starts of k-means
            "seed": Fusion.seed,
        }
    )


def truncate() -> ConfigDict:
    return ConfigDict(
        {
            "blocks": Truncation.blocks,  # only the first blocks are kept; 0: all
        }
    )


def teacher() -> ConfigDict:
    return ConfigDict(
        {
            "model": "",  # what the model was before it was compressed, for losses.layerwise
        }
    )


def scores() -> ConfigDict:
    # Found in the paths of kernels, as lora's. With losses.score_norm.
    return ConfigDict({"targets": Scores.targets})


def score_mask() -> ConfigDict:
    return ConfigDict(
        {
            "ratio": ScoreMask.ratio,  # of the scored weights goes, those of earlier masks included
            "keep_scores": ScoreMask.keep_scores,  # they train on, under the masks
        }
    )


def gates() -> ConfigDict:
    # With losses.size, and separate learning rates: the multipliers need a high one, e.g.
    # optimizer.rates=(('gates_multipliers$', 10.0), ('gates_log_alpha$', 3.0)).
    return ConfigDict(
        {
            "targets": Gates.targets,  # found in the paths of kernels, as lora's
            "rank": Gates.rank,  # of the factors; 0: as many parameters as the kernel has
            "start": Gates.start,  # mean of log_alpha; 5: the gates are open at first
        }
    )


# Surgery before a training -> its settings, and what trains with it alone.
PARTS = {
    "lora": (lora, r"/lora_[ab]$"),
    "dora": (lora, r"/(lora_[ab]|dora_m)$"),
    "nf4": (nf4, ""),
    "macdrop": (macdrop, ""),
    "truncate": (truncate, ""),
    "fuse": (fuse, ""),
    "scores": (scores, r"/score$"),
    "score_mask": (score_mask, ""),
    "gates": (gates, ""),
    "teacher": (teacher, "@taught"),  # the blocks that it teaches
}


def add(config: ConfigDict, names: Sequence[str]) -> list[str]:
    """Adds the groups of the adapters among `names`, which alone train then; returns the others."""
    # Whatever the order of the names: what drops or replaces kernels comes first.
    chosen = [name for name in ("truncate", "fuse", "nf4") if name in names]
    chosen += [name for name in names if name in PARTS and name not in chosen]
    for name in chosen:
        settings, trains = PARTS[name]
        # Surgeries before training, each with its group of settings.
        config.prepare = (*config.get("prepare", ()), name)
        config[name] = settings()
        if trains:
            config.train_only = (trains,)
        if settings is lora:
            config[name].dropout = Lora.dropout  # of what A reads, in training
        if name in REFRESHES:
            # What redraws leaves in every step.
            config.refresh = (*config.get("refresh", ()), name)
    return [name for name in names if name not in PARTS]
