"""Pre-training from random weights, without and with the jump-suppressing regulariser (JREG).

Command:   python scripts/train.py --config=configs/jreg_pretrain.py:170m \
             --config.data.path=runs/corpus/tokens --config.tokenizer=runs/corpus/tokenizer \
             --workdir=runs/pretrain
           on what scripts/prepare_data.py made of a corpus (configs/prepare_data.py, its second
           command). The argument is the size, 170m (134m is the same) | 1b | 3_4b | local. Sweeps:
           python scripts/sweep.py --config=... --sweep=alpha | lambda | steps | seeds | nucl ...
Hardware:  paper: not stated. Weights, gradients and two moments in float32 need 16 bytes a
           parameter over all devices (134M: 2.2 GB, 928M: 15 GB, 3.59B: 58 GB). local: 2 CPU cores.
Hours:     paper: not stated. 105 billion tokens (512 x 1,024 a step, 200,000 steps): at 40% of an
           H200's peak about 3.5 days for 134M on one, 21 for 928M, 79 for 3.59B (estimates).
Paper:     AdamW .9/.95, eps 1e-8, decay 0.1, clip 1.0, cosine to 10%, 1,000 steps of warm-up, a
           rate of 9e-4 (170M), 7e-4 (1B), 5e-4 (3.4B); lambda 1; alpha 1 is the best of 0, 0.1,
           0.3, 0.5, 1, 3: the jump falls to about 0 and the losses are no worse. FineWeb-Edu, BPE
           of 32,000.
           The paper's names are not the sizes: untied heads give 134.1M, 928M, 3.59B parameters
           (tied: 109.5M, 862M, 3.50B); which of the two is not stated; untied here.

The keys are those of configs/nucl_finetune.py, explained there (NUCL in pre-training:
--config.nucl.variant=mstd --config.nucl.alpha=...), and those below.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from ffn_heterogeneity.launch.sweep import chain, point, product

# size: layers, width, FFN width, heads, learning rate
SIZES = {
    "170m": (12, 768, 2048, 12, 9e-4),
    "1b": (16, 2048, 5376, 16, 7e-4),
    "3_4b": (30, 3072, 8192, 24, 5e-4),
    "local": (6, 128, 344, 4, 2e-3),
}
SIZES["134m"] = SIZES["170m"]
KIND = "train"
# Keys of the base that pre-training leaves at their defaults (AdamW's first moment: 0.9).
UNUSED = {
    "data": ("prompt_field", "response_field", "bos", "split", "packing"),
    "optimizer": ("momentum", "multiply_by_parameter_scale", "b1", "eps"),
}


def get_config(size: str = "170m") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"config argument {size!r}: choose one of {', '.join(SIZES)}")
    layers, d_model, ffn_width, heads, rate = SIZES[size]
    base = runpy.run_path(str(Path(__file__).parent / "nucl_finetune.py"))["get_config"]
    config = base(f"{size},text")
    for group, keys in UNUSED.items():
        for key in keys:
            del config[group][key]
    del config["diversity"]
    config.model = ""  # a model to go on with; "": a new one of the shape below

    config.shape = ConfigDict()  # of a Llama with SwiGLU and as many key heads as heads
    config.shape.layers = layers
    config.shape.d_model = d_model
    config.shape.ffn_width = ffn_width
    config.shape.n_heads = heads
    config.shape.vocab_size = 32_000
    config.shape.tied = False
    # Of a new model: a directory, a .gguf file or a hub id.
    config.tokenizer = ""

    config.jreg = ConfigDict()
    # lambda; 0: the baseline, whose jump rates are still measured in validation. The paper: 1.
    config.jreg.weight = 1.0
    config.jreg.alpha = 1.0  # sharpness of softmax(alpha * (1..L)); not the weight
    config.jreg.final_norm = False  # h_L before (False) or after the final norm
    config.jreg.positions = "all"  # tokens that count: all, or the last of each document

    config.nucl.variant = "none"
    config.nucl.alpha = 0.0
    config.data.task = "tokens"  # shards of scripts/prepare_data.py; or text, jsonl
    config.data.validation_fraction = 0.001

    config.steps = 200_000
    config.batch_size = 512
    config.accumulation = 8
    config.seq_len = 1024
    config.dropout = 0.0
    config.optimizer.learning_rate = rate
    config.optimizer.schedule = "cosine"
    config.optimizer.final_fraction = 0.1
    config.optimizer.warmup_steps = 1000
    config.optimizer.weight_decay = 0.1
    config.optimizer.b2 = 0.95
    config.optimizer.clip_norm = 1.0
    config.eval.every = 2000
    config.eval.max_batches = 8
    config.checkpoint.every = 1000
    if size == "local":
        config.shape.vocab_size = 4096
        config.steps, config.batch_size, config.accumulation, config.seq_len = 300, 16, 1, 256
        config.optimizer.warmup_steps = 30
        config.data.validation_fraction = 0.05
        config.eval.every, config.checkpoint.every = 50, 0
    return config


BASELINE = point("baseline", {"jreg.weight": 0.0})
SWEEPS = {
    # Table 3: the sharpness (part of the program: one compilation each).
    "alpha": chain(BASELINE, {"jreg.alpha": (0.0, 0.1, 0.3, 0.5, 1.0, 3.0)}),
    # The weight (one compilation for all).
    "lambda": chain(BASELINE, {"jreg.weight": (0.1, 0.3, 1.0, 3.0)}),
    # Appendix D: a tenth of the steps, each with its own schedule.
    "steps": product({"jreg.weight": (0.0, 1.0), "steps": (20_000, 200_000)}),
    # NUCL in pre-training, what its paper names as a limitation (one compilation for all).
    "nucl": product(
        point("nucl", {"jreg.weight": 0.0, "nucl.variant": "mstd"}),
        {"nucl.alpha": (0.0, 1.0, 10.0, 100.0)},
    ),
    # Baseline and three sharpnesses over two seeds, for a small machine.
    "seeds": product(chain(BASELINE, {"jreg.alpha": (0.0, 1.0, 3.0)}), {"seed": (0, 1)}),
}
