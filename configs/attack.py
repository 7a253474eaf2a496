"""Attacks on the massive weights of one early layer (House of Cards: massive weights, section 2.3).

Command:   python scripts/compress.py --config=configs/attack.py --config.model=<any> \
             --config.attack=zero --config.k=3
Hardware:  any CPU with the model's size in memory three times.
Hours:     seconds for SmolLM2-135M.
Paper:     Table 1: top-5 zeroing takes Llama-3-8B's perplexity on WikiText from 5.75 to 104.57,
           top-5 retaining to 10.15. Figure 4: k = 0, 1, 3, 5, 10, 30 ... of each.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import perplexity
from ffn_heterogeneity.surgery.attack import Attack


def get_config() -> ConfigDict:
    # Keys of perplexity.py: model, revision; with a text (or token_ids) the perplexity is measured
    # before and after, and written to results.json and the model card.
    config = perplexity.get_config()
    config.update(
        {
            "surgery": "attack",  # what compress.py does with the model
            # zero: the k massive weights go; retain: all others of their layer.
            "attack": Attack.attack,
            "k": Attack.k,  # neurons, those with the largest |h| when bos stands alone
            "layer": placeholder(int),  # from 0; default: the layer with the largest |h| early on
            "token": placeholder(int),  # instead of bos; models like Qwen2.5 need another
            # Of a layer with experts, from 0; default: the one with the largest |h|.
            "expert": placeholder(int),
            # (7, 3): these neurons of `layer` instead of its massive weights.
            "neurons": Attack.neurons,
            # Dtype of the written weights: as read, or float32 | bfloat16 | float16.
            "dtype": "as_read",
            "export": "auto",  # auto | padded | native | deci (configs/prune.py)
            "push": "",  # <owner>/<name>: the model goes to the Hugging Face hub, too
        }
    )
    return config
