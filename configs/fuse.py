"""Compression of feed-forward blocks to fewer neurons (MLP Fusion, section IV).

Command:   python scripts/compress.py --config=configs/fuse.py --config.model=<any> \
             --config.method=fusion --config.ratio=0.25
Hardware:  any CPU with the model's size in memory three times, and 4 m^2 bytes of a layer's m
           neurons (340 MB for Gemma-2 2B).
Hours:     seconds for SmolLM2-135M.
Paper:     RoBERTa base, the last 8 of 12 layers, 3,072 -> 768 neurons: --config.layers=4-11
           --config.ratio=0.75 --config.n_init=30. What is trained afterwards is a stage or a
           training with --config.model=<workdir>/model; P never trains.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import perplexity
from ffn_heterogeneity.surgery.fuse import Fusion


def get_config() -> ConfigDict:
    # Keys of perplexity.py: model, revision; with a text (or token_ids) the perplexity is measured
    # before and after, and written to results.json and the model card.
    config = perplexity.get_config()
    config.update(
        {
            "surgery": "fuse",  # what compress.py does with the model
            # fusion: k-means of neurons, cluster sizes P kept apart | merged: P in the outgoing
            # weights | sqrt: its root on both sides of the activation | sketch: random mixtures |
            # hybrid_sketch: the largest third kept, the others mixed | structured: the largest kept
            # | mmd: points that move to where neurons are dense, in `steps` of AdamW, and m / c
            # after the activation | svd: each kernel as two thin ones, which train | unstructured:
            # a mask, under which the largest weights stay | ntk_sap: a mask by gradients at random
            # inputs (arXiv 2304.02840).
            "method": Fusion.method,
            # The share of every layer's neurons that goes; of weights (svd, unstructured, ntk_sap).
            "ratio": Fusion.ratio,
            # Where: all | top | bottom | even | odd | last4 | pair:5 | 0,3,7 | 4-9.
            "layers": Fusion.layers,
            "n_init": Fusion.n_init,  # starts of k-means; the paper's tables: 30
            # Gated neurons are scaled to equal norms and one sign before they are clustered (ours).
            "canonical": Fusion.canonical,
            "steps": Fusion.steps,  # of mmd's AdamW
            "spare": Fusion.spare,  # massive neurons of the massive layer that stay as they are
            "skip": Fusion.skip,  # massive: that layer stays as it is
            "seed": Fusion.seed,  # of the draws
            # Of unstructured: the model whose weights are used under the masks (LTH).
            "rewind": Fusion.rewind,
            # Then: none | state_ridge (ours) | gram | bias, with the keys of configs/prune.py.
            "compensation": Fusion.compensation,
            # of the compensation: own | own_chat | a UTF-8 text | an own_text.jsonl
            "calibration": Fusion.calibration,
            "calibration_tokens": placeholder(int),  # default: 2,048; own: 8,192
            # on the states of the model compensated so far (ours), not on the dense model's
            "sequential": Fusion.sequential,
            # Dtype of the written weights: as read, or float32 | bfloat16 | float16.
            "dtype": "as_read",
            # auto | padded | native | deci (configs/prune.py). The weights that other tools read
            # have P multiplied in; this library reads it apart, but from padded.
            "export": "auto",
            "push": "",  # <owner>/<name>: the model goes to the Hugging Face hub, too
        }
    )
    return config
