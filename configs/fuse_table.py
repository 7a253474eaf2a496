"""MLP Fusion's methods compared before any training, by perplexity (and tasks).

Command:   python scripts/sweep.py --config=configs/fuse_table.py --sweep=methods \
             --config.model=<any> --config.text=<wiki.test.raw> --config.max_windows=40 \
             --workdir=runs/fusion
           --sweep=seeds: fusion, also in canonical form, over three seeds; --sweep=ratios: fusion
           and SVD; --sweep=own: merged, plain and with state_ridge on self-generated text.
Hardware:  one CPU or accelerator with the model's size in host memory three times. The model is
           loaded once; nothing but numbers is written.
Hours:     SmolLM2-135M, 40 windows of 512: one to two minutes a point on 2 cores, mmd half an hour.
Paper:     no such table: it trains what it compresses. Here an untrained clustering of a language
           model is as bad as noise, which is what this shows.

The keys are those of configs/fuse.py, configs/perplexity.py and configs/parts/tasks.py.
"""

from ml_collections import ConfigDict

from configs import fuse
from configs.parts import in_memory
from ffn_heterogeneity.launch.sweep import chain, point, product

KIND = "in_memory"
CLUSTERED = ("fusion", "sqrt")  # merged has fusion's outputs before training
OTHERS = ("sketch", "hybrid_sketch", "mmd", "structured", "svd", "unstructured")


def get_config() -> ConfigDict:
    return in_memory.get_config(fuse.get_config())


NONE = point("none", {"method": "structured", "ratio": 0.0})
OURS = chain(
    point("canonical", {"method": "fusion", "canonical": True}),
    point("spare", {"method": "fusion", "spare": 5}),
)
SWEEPS = {
    "methods": chain(NONE, product({"method": CLUSTERED + OTHERS}), OURS),
    "seeds": product({"method": ("fusion",), "canonical": (False, True), "seed": (0, 1, 2)}),
    # merged (fusion's outputs), plain and with all neurons regressed on the centroids.
    "own": chain(
        NONE,
        point("merged", {"method": "merged"}),
        point(
            "merged_ridge",
            {"method": "merged", "compensation": "state_ridge", "calibration": "own"},
        ),
    ),
    "ratios": chain(
        NONE, product({"method": ("fusion", "svd"), "ratio": (0.01, 0.02, 0.05, 0.1, 0.25)})
    ),
}
