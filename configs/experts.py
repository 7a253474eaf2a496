"""Experts: made from a dense model, removed, or merged.

Command:   python scripts/compress.py --config=configs/experts.py:partition --config.model=<any> \
             --config.experts=8 --config.top_k=8 --config.router=zeros
           python scripts/compress.py --config=configs/experts.py:upcycle --config.model=<any> \
             --config.experts=8
           python scripts/compress.py --config=configs/experts.py:experts --config.model=<any>
           (keys rule, ratio, calibration ...), or :merge_experts (method, ratio ...)
Hardware:  any CPU with the model's size in memory three times (upcycle: and all copies), and
           8 m^2 bytes of a layer's m neurons (19 MB for SmolLM2).
Hours:     two minutes for SmolLM2-135M on one core.
Paper:     Moefication's row of MLP Fusion's tables: --config.experts=4 --config.top_k=1
           --config.router=trained --config.calibration=<text>.

partition: E experts of m / E neurons (balanced k-means); with router zeros and top_k = E the same
model. upcycle: E copies of each block; the same model for any top_k, to be trained further.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import perplexity
from ffn_heterogeneity.surgery.experts import ExpertRemoval
from ffn_heterogeneity.surgery.merge_experts import Merging
from ffn_heterogeneity.surgery.partition import Partition
from ffn_heterogeneity.surgery.upcycle import Upcycling
from ffn_heterogeneity.wording import check_choice


def _partition() -> dict:
    return {
        "experts": Partition.experts,  # E; with shared ones
        "top_k": placeholder(int),  # routed experts per token; default: all
        # zeros: equal gates | means: the mean of an expert's columns of gate (plain FFNs: of up) |
        # trained: Moefication's two layers, from calibration text.
        "router": Partition.router,
        "shared": Partition.shared,  # experts of the most active neurons, which see every token
        # Where: all | top | bottom | even | odd | last4 | pair:5 | 0,3,7 | 4-9.
        "layers": Partition.layers,
        "seed": Partition.seed,  # of k-means, of trained routers, of self-generated text
        # Of shared and trained: a text file, or own for self-generated text.
        "calibration": Partition.calibration,
        "calibration_tokens": placeholder(int),  # default: 2,048 of a file, 8,192 of own
    }


def _upcycle() -> dict:
    return {
        "experts": Upcycling.experts,  # E, the number of copies
        "top_k": Upcycling.top_k,  # experts per token
        # Where: all | top | bottom | even | odd | last4 | pair:5 | 0,3,7 | 4-9.
        "layers": Upcycling.layers,
        "noise": Upcycling.noise,  # standard deviation of the router's values; 0: zeros
        "seed": Upcycling.seed,  # of the noise
    }


def _experts() -> dict:
    return {
        # On text: reap: gate times output norm | frequency | output_norm | man | msan: of the inner
        # states | mone: frequency times variance. On weights: aimer | entropy | gini. Or random.
        "rule": ExpertRemoval.rule,
        "ratio": ExpertRemoval.ratio,  # share of every layer's experts that goes, or:
        "count": placeholder(int),
        "top_k": placeholder(int),  # router columns per token afterwards; default: as before
        # Where: all | top | bottom | even | odd | last4 | pair:5 | 0,3,7 | 4-9; only sparse layers.
        "layers": ExpertRemoval.layers,
        "protect": ExpertRemoval.protect,  # massive: experts with a massive weight stay
        "constant": ExpertRemoval.constant,  # a removed expert leaves its mean output (MoNE)
        # Of rules on text and constant: a text file, or own for self-generated text.
        "calibration": ExpertRemoval.calibration,
        "calibration_tokens": placeholder(int),  # default: 2,048 of a file, 8,192 of own
        "seed": ExpertRemoval.seed,  # of random, of self-generated text
        # Without text and protect: one layer at a time in memory.
        "streaming": False,
    }


def _merge_experts() -> dict:
    return {
        # m_smoe: groups by router logits around the most used experts, mean weighted by usage |
        # ream: few groups around the experts of highest REAP score, layer after layer | resmoe:
        # a barycenter and compressed residuals; removes no expert, and needs no text.
        "method": Merging.method,
        "ratio": Merging.ratio,  # share of every layer's experts that is removed; not of resmoe
        # Where: all | top | bottom | even | odd | last4 | pair:5 | 0,3,7 | 4-9; all with experts.
        "layers": Merging.layers,
        # Router columns: all: `expert_of` maps them to merged experts | dominant: those of the
        # dominant experts alone, as REAM's public code; transformers loads such a model.
        "columns": Merging.columns,
        "group": Merging.group,  # of ream: how many experts join a centroid, at most
        "weighting": Merging.weighting,  # of ream's mean: usage | score (REAP's)
        "residual": Merging.residual,  # of resmoe: pruned: the largest entries | svd: two factors
        # Of resmoe: of the residuals' parameters that is stored (exact: 1 if pruned, 2 with svd).
        "share": Merging.share,
        # A text file, own or own_chat (self-generated), or the own_text.jsonl of an earlier run.
        "calibration": Merging.calibration,
        "calibration_tokens": placeholder(int),  # 2,048 of a text, 8,192 of self-generated text
        "seed": Merging.seed,  # of self-generated text
    }


# {argument, a name of a surgery: its keys}
KEYS = {
    "partition": _partition,
    "upcycle": _upcycle,
    "experts": _experts,
    "merge_experts": _merge_experts,
}


def get_config(surgery: str = "partition") -> ConfigDict:
    check_choice("config argument", surgery, tuple(KEYS))
    # Keys of perplexity.py: model, revision; with a text (or token_ids) the perplexity is measured
    # before and after, and written to results.json and the model card.
    config = perplexity.get_config()
    config.surgery = surgery  # what compress.py does with the model
    config.update(KEYS[surgery]())
    # Dtype of the written weights: as read, or float32 | bfloat16 | float16.
    config.dtype = "as_read"
    # auto | padded | native. Padded writes a merged expert once per router column. Llamas and
    # Mistrals of experts are Mixtrals for other tools, Qwen3s Qwen3-MoEs, if all of their layers
    # have equal experts and linear routers, and none is shared.
    config.export = "auto"
    config.push = ""  # <owner>/<name>: the model goes to the Hugging Face hub, too
    return config
