"""Removal of neurons: without data (NUCL, section 4.2, Table 4), or by rules on text.

Command:   python scripts/compress.py --config=configs/prune.py --config.model=<any> \
             --config.criterion=entropy --config.ratio=0.25 --config.layers=all
Hardware:  any CPU with the model's size in memory three times; with --config.streaming=true less
           than 0.7 GB for Gemma-2 2B (0.8 with least squares). Rules on text and the perplexity use
           an accelerator where there is one, rules on weights none.
Hours:     seconds for SmolLM2-135M, minutes for Gemma-2 2B.
Paper:     Gemma-2 2B at 25%: 9,216 -> 6,912 neurons a layer, 414.06M parameters (16%) removed.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import perplexity
from ffn_heterogeneity.surgery.reduce import Removal


def get_config() -> ConfigDict:
    # Keys of perplexity.py: model, revision; with a text (or token_ids) the perplexity is measured
    # before and after, and written to results.json and the model card.
    config = perplexity.get_config()
    config.update(
        {
            # As in their authors' code: wanda_sp_published | flap_published (needs budget=global;
            # its authors add compensation=bias).
            # What goes: entropy | gini | mstd | magnitude | random | similarity (Srinivas & Babu
            # 2015: neurons that resemble another) | largest_outgoing | maw | vow | pon (these
            # three are OptiPFair's, of the incoming weights) | bos (|h| on bos) | mean_state (of
            # |h|, over calibration text) | optipfair (its hybrid) | wanda_sp | flap (||h|| and its
            # variance, times outgoing norms); reverse turns the order round.
            "criterion": Removal.criterion,
            # own: what the model itself writes, no data at all; own_chat: the same in its chat
            # template (it asks and answers); a UTF-8 text, from its beginning; or the
            # own_text.jsonl that such a run leaves in its work directory
            "calibration": Removal.calibration,
            "calibration_tokens": placeholder(int),  # default: 2,048; own: 8,192
            # Who goes last: bos:5 (of each layer the 5 with the largest |h| on bos) | massive:5 (of
            # the massive layer alone) | entropy:0.01 (of each layer the lowest-entropy hundredth).
            "protect": Removal.protect,
            # Who goes whatever the criterion says, as many in all: named as those spared, or
            # random:5, random:0.01 (a number or a share of each layer's neurons that would stay).
            "lose": Removal.lose,
            "reverse": Removal.reverse,  # what would be kept goes
            # What the survivors take over: none | sum (of the nearest, or merged into them) |
            # least_squares | ridge (Stahlberg & Byrne 2017) | scaled (multiples of the nearest);
            # of their states over the calibration text: state_ridge (ours) | gram (GRAIL) | bias
            # (FLAP's: where the FFN's output has one).
            # Table 4: Srinivas & Babu is similarity with sum, Stahlberg & Byrne similarity (or
            # magnitude) with least_squares or ridge.
            "compensation": Removal.compensation,
            # state_ridge, gram, bias: on the states of the model compensated so far (ours), not on
            # the dense model's.
            "sequential": Removal.sequential,
            # How much: a ratio of each layer's neurons, or a count instead.
            "ratio": Removal.ratio,
            "count": placeholder(int),  # neurons of each layer, instead of the ratio
            "multiple": Removal.multiple,  # 64: what stays is rounded to a multiple of 64
            # Where: all | top | bottom | even | odd | last4 | pair:5 | 0,3,7 | 4-9.
            "layers": Removal.layers,
            # "layer": every layer loses its share; "global": one budget over the chosen layers.
            "budget": Removal.budget,
            # Of the random criterion, those lost at random, and the text that the model writes.
            "seed": Removal.seed,
            # auto: a plain directory where all layers end equally wide, else native (per-layer
            # widths in config.json); padded: zero neurons fill up, so that transformers loads it;
            # deci: a Llama's widths as NVIDIA's block_configs, all multiples of 256.
            "export": "auto",
            # From checkpoint to checkpoint, one layer in memory at a time: for models larger than
            # memory. Directories of safetensors and hub ids; the same weights come out.
            "streaming": False,
            # Dtype of the written weights: as read, or float32 | bfloat16 | float16.
            "dtype": "as_read",
            # <owner>/<name>: the model goes to the Hugging Face hub, too.
            "push": "",
        }
    )
    return config
