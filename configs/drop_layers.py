"""Remove whole blocks of a model, those that move the residual stream least, without training.

Command:   python scripts/compress.py --config=configs/drop_layers.py \
             --config.model=HuggingFaceTB/SmolLM2-135M --config.blocks=5
           No data is needed: the model writes the text itself.
Hardware:  any CPU with the model's size in memory three times.
Hours:     SmolLM2-135M: 2 minutes on 2 CPU cores, most of it for the text.
Paper:     none of this repository's; JREG's displacement (section 3), once, on the full model.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import perplexity
from ffn_heterogeneity.surgery.drop_layers import Dropping


def get_config() -> ConfigDict:
    # Keys of perplexity.py: model, revision; with a text (or token_ids) the perplexity is measured
    # before and after, and written to results.json and the model card.
    config = perplexity.get_config()
    config.update(
        {
            "surgery": "drop_layers",  # what compress.py does with the model
            "blocks": Dropping.blocks,  # how many go
            "layers": Dropping.layers,  # which ones instead: 3,5 | 4-9 | last4; "": by displacement
            # own: what the model itself writes; a UTF-8 text, from its beginning; or the
            # own_text.jsonl that such a run leaves in its work directory
            "calibration": Dropping.calibration,
            "calibration_tokens": placeholder(int),  # default: 2,048; own: 8,192
            "seed": Dropping.seed,  # of self-generated text
            # Dtype of the written weights: as read, or float32 | bfloat16 | float16.
            "dtype": "as_read",
            "export": "auto",  # auto | native
            "push": "",  # <owner>/<name>: the model goes to the Hugging Face hub, too
        }
    )
    return config
