"""Fine-tuning with NUCL: the text loss plus alpha times the heterogeneity penalty (section 3).

Command:   python scripts/train.py --config=configs/nucl_finetune.py:gemma2_2b,gsm8k \
             --config.losses.nucl.weight=1 --workdir=runs/nucl
           The argument is <model>,<data>[,<loss> ...]: a preset, directory, hub id or .gguf file;
           gsm8k | text | jsonl | mbpp | superglue | webnlg | mixture (text, jsonl and webnlg
           with --config.data.path=<file>, mixture by its key data.mixture,
           superglue with --config.data.path=<root>, a folder with train.jsonl for every task); and
           losses to train with as well: diversity, jreg; lora: adapters alone train.
           Sweeps: python scripts/sweep.py --config=... --sweep=alpha | targets | control
             --workdir=...
Hardware:  paper: TPU v5e 8x8 (Gemma-2 2B), 16x16 (9B, 27B). Weights, gradients and two moments in
           float32 need 16 bytes a parameter over all devices (2B: 42 GB), activations come on top;
           SmolLM2-135M trains on a CPU.
Hours:     paper: not stated. SmolLM2-135M, 40 steps of 4 x 256 tokens, 2 CPU cores: minutes.
Paper:     batch 16, learning rate 1e-6, 100 steps of linear warm-up, dropout 0.1. Optimiser, number
           of steps, sequence length and the reduction of the text loss are not stated, so neither
           is a value of alpha that could be compared (it was tuned between 1e-2 and 1e4).
"""

from ml_collections import ConfigDict

from configs.parts import adapters, losses, train
from ffn_heterogeneity.data.tasks import tasks
from ffn_heterogeneity.launch.sweep import chain, point, product

TARGETS = ("ffn_out", "ffn_in_linear", "ffn_in_gated", "attention_out")


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M,gsm8k") -> ConfigDict:
    parts = argument.split(",")
    known = (*tasks(), "mixture")
    place = next((i for i, word in enumerate(parts) if i and word in known), 0)
    if not place or not parts[0]:
        raise ValueError(
            f"config argument {argument!r}: write <model>,<data>[,<loss>], data of "
            f"{', '.join(known)}"
        )
    config = train.get_config()
    config.model = ",".join(parts[:place])

    data = config.data
    data.task = parts[place]
    data.split = ""  # of a hub data set; "": the task's own
    if data.task == "mixture":
        data.mixture = ()  # (('text', 'a.txt', 0.7), ('gsm8k', 'b.jsonl', 0.3)): rows by weight
    if data.task == "jsonl":
        data.prompt_field = ""  # "" takes the known pairs of names
        data.response_field = ""  # as prompt_field
    if data.task in ("text", "jsonl"):
        data.text_field = ""  # of JSONL and parquet; "": "text"
    if data.task in ("text", "jsonl", "mixture"):
        data.passage_chars = 16_384  # characters of a shuffled passage of a long file, at most
    data.packing = True  # several documents in a row; False: one, padded
    data.bos = "auto"  # auto | segment | document | none; a chat template has its own
    if data.task != "text":
        # Ends every example: $'\n[eod]' for PaLM 2 in the paper (then configs/harness.py's stop).
        data.append = ""
        data.loss_on_prompt = False  # True: prompts are learnt as well
    if data.task == "superglue":
        data.with_dpr = True  # the published mixture has DPR in addition to the eight tasks

    losses.add(config, ("nll", "nucl", *adapters.add(config, parts[place + 1 :])))
    config.monitors.entropy = losses.entropy(config)
    config.dropout = 0.1

    optimizer = config.optimizer
    optimizer.learning_rate = 1e-6
    optimizer.b1 = 0.9  # decay of the first moment
    optimizer.eps = 1e-8  # of adamw
    # adafactor: with parameter scaling a rate of 1e-6 moves weights by 5e-8, i.e. nothing learns.
    optimizer.multiply_by_parameter_scale = False
    return config


KIND = "train"
WEIGHT = "losses.nucl.weight"
SWEEPS = {
    # Figures 2 and 3: one compilation a variant, weight 0 included.
    "alpha": product(
        {"losses.nucl.variant": ("mstd", "gini"), WEIGHT: (0.0, 1.0, 10.0, 100.0, 1000.0)}
    ),
    # Table 3, each target alone, and plain fine-tuning.
    "targets": chain(
        point("weight=0", {WEIGHT: 0.0}),
        {"losses.nucl.targets": tuple((name,) for name in TARGETS)},
    ),
    # Is it the heterogeneity, or that weights move? The control moves them as far.
    "control": product(
        chain(point("weight=0", {WEIGHT: 0.0}), {"losses.nucl.control": (False, True)}),
        {"seed": (0, 1, 2)},
    ),
}
