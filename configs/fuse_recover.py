"""Compression of a language model's FFNs, recovery by fine-tuning, perplexity: one job of stages
(MLP Fusion's methods where its paper does not try them).

Command:   python scripts/sweep.py --config=configs/fuse_recover.py:<model>,text --sweep=methods \
             --config.recover.data.path=<train.txt> --config.score.text=<held-out.txt> \
             --config.recover.steps=100 --config.recover.batch_size=2 --workdir=runs/fuse_recover
           The argument is <model>,<data> as of configs/nucl_finetune.py. One method alone:
           scripts/train.py with --config.fuse.method=<method>.
Hardware:  that of the fine-tuning (configs/nucl_finetune.py).
Hours:     not measured.
Paper:     no such table. Removal by a criterion with the same recovery: configs/prune_recover.py.

The other keys are those of configs/prune_recover.py, explained there.
"""

from ml_collections import ConfigDict

from configs import prune_recover
from ffn_heterogeneity.launch.sweep import chain, point, product


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M,text") -> ConfigDict:
    config = prune_recover.get_config(argument)
    del config.prune
    config.stages = ("fuse", "recover", "score")
    config.fuse = {
        "kind": "surgery",
        "base": "fuse",  # explains the keys
        "method": "fusion",
        "ratio": 0.25,
        "layers": "all",
        "n_init": 1,
        "canonical": False,
        "spare": 0,
        "seed": 0,  # of k-means and sketches
    }
    return config


KIND = "train"
WHOLE = point("whole", {"stages": ("recover", "score")})
OURS = chain(point("canonical", {"fuse.canonical": True}), point("spare", {"fuse.spare": 5}))
SWEEPS = {
    "methods": chain(WHOLE, product({"fuse.method": ("fusion", "merged", "svd")}), OURS),
    "seeds": product({"fuse.seed": (0, 1, 2)}),
}
