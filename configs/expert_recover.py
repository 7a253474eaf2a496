"""Ways to shrink the experts of a mixture of experts, each before and after recovery by training.

Command:   python scripts/sweep.py --config=configs/expert_recover.py:<model>,tokens --sweep=half \
             --config.recover.data.path=<tokens> --config.remove.calibration=<text> \
             --config.merge.calibration=<text> --config.after.text=<held-out text or directory> \
             --config.before.text=<the same> --workdir=runs/half
           The argument is <model>,<data> as of configs/nucl_finetune.py. Sweeps: half | quarter:
           so much of the experts' parameters stays; own: half, on self-generated text; active:
           half of the experts, and top_k 1; whole: the recovery alone. half_removed, half_merged,
           half_narrowed: a part of half, for a separate rate (quarter, own too). One method
           alone: scripts/train.py with --config.remove.rule=<rule>.
Hardware:  any CPU for a small model; else that of configs/nucl_finetune.py.
Hours:     a model of 4 layers x 192 on one CPU core: half a minute a point.
Paper:     MLP Fusion has M-SMoE as a baseline; the other rows are of REAP, REAM, AIMER, MoNE and
           ResMoE (docs/howto/experts.md). The recovery's settings are ours.

One of the stages remove, merge, fuse and prune makes the model smaller: removal of experts, merged
experts, or fewer neurons in each. The router is frozen while the model recovers.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import prune_recover
from ffn_heterogeneity.launch.sweep import chain, point, product
from ffn_heterogeneity.surgery.merge_experts import Merging


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M,tokens") -> ConfigDict:
    config = prune_recover.get_config(argument)
    config.stages = ("remove", "before", "recover", "after")
    text = {"calibration": "own", "calibration_tokens": 8192}
    # configs/experts.py and configs/fuse.py explain the keys of these four.
    config.remove = {"kind": "surgery", "base": "experts:experts", "rule": "reap", "ratio": 0.5}
    config.remove.update({"top_k": placeholder(int), "constant": False, "seed": 0} | text)
    config.merge = {"kind": "surgery", "base": "experts:merge_experts", "method": "m_smoe"}
    config.merge.update({"ratio": 0.5} | text)
    config.merge.share = Merging.share  # of ResMoE: share of the residuals that is stored
    config.fuse = {"kind": "surgery", "base": "fuse", "method": "fusion", "ratio": 0.5, "seed": 0}
    config.prune = {"kind": "surgery", "base": "prune", "criterion": "entropy", "ratio": 0.5}
    del config.recover.train_only
    config.recover.update({"freeze": (".*/router/.*",), "steps": 100, "batch_size": 4})
    # text: of before and after, a file or a directory of texts (configs/perplexity.py).
    for name in ("before", "after"):
        config[name] = {"kind": "evaluate", "base": "perplexity", "text": "", "window": 256}
        config[name].max_windows = 40
    del config.score
    return config


KIND = "train"
TEXT_RULES = ("frequency", "reap", "msan")
EXPERTS = 8  # of the model: ResMoE stores a barycenter, as large as one of them, and residuals


def made_by(stage: str):
    """Another stage than removal makes the model smaller."""
    return point(stage, {"stages": (stage, "before", "recover", "after")})


def removed_without_text(kept: float):
    """Removal of experts by their weights, and at random three times; `kept`: their share."""
    lost = (1 - kept,)
    drawn = {"remove.rule": ("random",), "remove.ratio": lost, "remove.seed": (0, 1, 2)}
    return chain(
        product({"remove.rule": ("aimer", "entropy"), "remove.ratio": lost}), product(drawn)
    )


def removed_on_text(kept: float):
    """Removal of experts that reads calibration text."""
    lost = (1 - kept,)
    constants = {"remove.rule": ("mone",), "remove.ratio": lost, "remove.constant": (True,)}
    return chain(product({"remove.rule": TEXT_RULES, "remove.ratio": lost}), product(constants))


def removed(kept: float):
    return chain(removed_without_text(kept), removed_on_text(kept))


def merged_on_text(kept: float):
    """Averages of experts that read calibration text."""
    merging = {"merge.method": ("m_smoe", "ream"), "merge.ratio": (1 - kept,)}
    return product(made_by("merge"), merging)


def merged(kept: float):
    residuals = {"merge.method": ("resmoe",), "merge.share": (kept - 1 / EXPERTS,)}
    return chain(merged_on_text(kept), product(made_by("merge"), residuals))


def narrowed(kept: float):
    """Fewer neurons in each expert."""
    lost = (1 - kept,)
    return chain(
        product(made_by("fuse"), {"fuse.method": ("fusion", "merged"), "fuse.ratio": lost}),
        product(made_by("prune"), {"prune.criterion": ("entropy",), "prune.ratio": lost}),
    )


OWN = point("own", {"remove.calibration": "own", "merge.calibration": "own"})
ONE = point("top_1", {"remove.top_k": 1})
SIZES = {"half": 0.5, "quarter": 0.25}
WAYS = {"removed": removed, "merged": merged, "narrowed": narrowed}
SWEEPS = {
    "whole": point("whole", {"stages": ("before", "recover", "after")}),
    "own_removed": product(OWN, removed_on_text(0.5)),
    "own_merged": product(OWN, merged_on_text(0.5)),
    # As many active parameters as half of the neurons of two experts have.
    "active": product(ONE, removed(0.5)),
}
SWEEPS |= {f"{size}_{way}": WAYS[way](kept) for size, kept in SIZES.items() for way in WAYS}
SWEEPS |= {
    size: chain(*(SWEEPS[f"{size}_{way}"] for way in ways))
    for size, ways in {**dict.fromkeys(SIZES, WAYS), "own": ("removed", "merged")}.items()
}
