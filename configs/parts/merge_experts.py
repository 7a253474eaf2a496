"""Keys of the surgery `merge_experts`: M-SMoE, REAM and ResMoE (surgery/merge_experts.py)."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import perplexity
from ffn_heterogeneity.surgery.merge_experts import Merging


def merge_config() -> ConfigDict:
    # Keys of perplexity.py: model, revision; with a text (or token_ids) the perplexity is measured
    # before and after, and written to results.json and the model card.
    config = perplexity.get_config()
    config.update(
        {
            "surgery": "merge_experts",
            # m_smoe: groups by router logits around the most used experts, mean weighted by usage |
            # ream: few groups around the experts of highest REAP score, layer after layer | resmoe:
            # a barycenter and compressed residuals; removes no expert, and needs no text.
            "method": Merging.method,
            "ratio": Merging.ratio,  # share of every layer's experts that is removed; not of resmoe
            # Where: all | top | bottom | even | odd | pair:5 | 0,3,7 | 4-9; all with experts.
            "layers": Merging.layers,
            # Router columns: all: `expert_of` maps them to merged experts | dominant: those of the
            # dominant experts alone, as REAM's public code; transformers loads such a model.
            "columns": Merging.columns,
            "group": Merging.group,  # of ream: how many experts join a centroid, at most
            "weighting": Merging.weighting,  # of ream's mean: usage | score (REAP's)
            # Of resmoe: pruned: the residuals' largest entries | svd: two factors; and the share of
            # the residuals' parameters that is stored (exact: 1 if pruned, 2 with svd).
            "residual": Merging.residual,
            "share": Merging.share,
            # A text file, own for self-generated text, or the own_text.jsonl of an earlier run.
            "calibration": Merging.calibration,
            "calibration_tokens": placeholder(int),  # 2,048 of a text, 8,192 of self-generated text
            "seed": Merging.seed,  # of self-generated text
            # Dtype of the written weights: as read, or float32 | bfloat16 | float16.
            "dtype": "as_read",
            # auto | padded | native. With columns=all, auto writes a form that this library alone
            # reads; padded writes a merged expert once per column, as large as before.
            "export": "auto",
            "push": "",  # <owner>/<name>: the model goes to the Hugging Face hub, too
        }
    )
    return config
