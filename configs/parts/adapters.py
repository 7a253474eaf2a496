"""Surgeries before a training (`config.prepare`), one group each, and what then trains."""

import copy
from collections.abc import Sequence

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ffn_heterogeneity.adapters import REFRESHES
from ffn_heterogeneity.adapters.macdrop import Macdrop
from ffn_heterogeneity.surgery.adapt import Lora, Quantised
from ffn_heterogeneity.surgery.fuse import Fusion
from ffn_heterogeneity.surgery.rescale import Rescaling
from ffn_heterogeneity.surgery.sparsity import Gates, ScoreMask, Scores
from ffn_heterogeneity.surgery.truncate import Truncation

LORA = {
    "rank": Lora.rank,  # columns of A, rows of B
    "alpha": Lora.alpha,  # K + (alpha / rank) A B
    # Found in the paths of kernels, layers/<i>/attention/(q|k|v|out), .../ffn/(gate|...).
    "targets": Lora.targets,
}
MACDROP = {
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
FUSE = {
    "method": Fusion.method,  # as in configs/fuse.py, but svd and unstructured
    "ratio": Fusion.ratio,  # the share of every layer's neurons that goes
    "layers": Fusion.layers,  # all | top | bottom | 0,3,7 | 4-9
    "skip": "massive",  # that layer stays as it is; "": no layer does
    "n_init": Fusion.n_init,  # starts of k-means
    "seed": Fusion.seed,
}
SCORE_MASK = {
    "ratio": ScoreMask.ratio,  # of the scored weights goes, those of earlier masks included
    "keep_scores": ScoreMask.keep_scores,  # they train on, under the masks
}
# With losses.size, and separate learning rates: the multipliers need a high one, e.g.
# optimizer.rates=(('gates_multipliers$', 10.0), ('gates_log_alpha$', 3.0)).
GATES = {
    "targets": Gates.targets,  # found in the paths of kernels, as lora's
    "rank": Gates.rank,  # of the factors; 0: as many parameters as the kernel has
    "start": Gates.start,  # mean of log_alpha; 5: the gates are open at first
}
# Surgery before a training -> its settings, and what trains with it alone.
PARTS = {
    "lora": (LORA, r"/lora_[ab]$"),
    "dora": (LORA, r"/(lora_[ab]|dora_m)$"),
    "nf4": ({"targets": Quantised.targets}, ""),
    "macdrop": (MACDROP, ""),
    "truncate": ({"blocks": Truncation.blocks}, ""),  # only the first blocks are kept; 0: all
    "fuse": (FUSE, ""),
    # (regex, factor) pairs of leaves that are multiplied, with optimizer.rates for what follows.
    "rescale": ({"factors": Rescaling.factors}, ""),
    # Found in the paths of kernels, as lora's. With losses.score_norm.
    "scores": ({"targets": Scores.targets}, r"/score$"),
    "score_mask": (SCORE_MASK, ""),
    "gates": (GATES, ""),
    # What the model was before it was compressed, for losses.layerwise.
    "teacher": ({"model": ""}, "@taught"),
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
        config[name] = copy.deepcopy(settings)  # with placeholders of its own
        if trains:
            config.train_only = (trains,)
        if settings is LORA:
            config[name].dropout = Lora.dropout  # of what A reads, in training
        if name in REFRESHES:
            # What redraws leaves in every step.
            config.refresh = (*config.get("refresh", ()), name)
    return [name for name in names if name not in PARTS]
