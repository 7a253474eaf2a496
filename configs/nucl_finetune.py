"""Fine-tuning with NUCL: the text loss plus alpha times the heterogeneity penalty (section 3).

Command:   python scripts/train.py --config=configs/nucl_finetune.py:gemma2_2b,gsm8k \
             --config.nucl.alpha=1 --workdir=runs/nucl
           The argument is <model>,<data>: a preset, directory, hub id or .gguf file, and
           gsm8k | text | jsonl | mbpp | superglue (text and jsonl with --config.data.path=<file>,
           superglue with --config.data.path=<root>, a folder with train.jsonl for every task).
           Sweeps: python scripts/sweep.py --config=... --sweep=alpha | targets --workdir=...
Hardware:  paper: TPU v5e 8x8 (Gemma-2 2B), 16x16 (9B, 27B). Weights, gradients and two moments in
           float32 need 16 bytes a parameter over all devices (2B: 42 GB), activations come on top;
           SmolLM2-135M trains on a CPU.
Hours:     paper: not stated. SmolLM2-135M, 40 steps of 4 x 256 tokens, 2 CPU cores: minutes.
Paper:     batch 16, learning rate 1e-6, 100 steps of linear warm-up, dropout 0.1. Optimiser, number
           of steps, sequence length and the reduction of the text loss are not stated, so neither
           is a value of alpha that could be compared (it was tuned between 1e-2 and 1e4).
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ffn_heterogeneity.launch.sweep import chain, point, product

DATA = ("gsm8k", "text", "jsonl", "mbpp", "superglue")
TARGETS = ("ffn_out", "ffn_in_linear", "ffn_in_gated", "attention_out")


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M,gsm8k") -> ConfigDict:
    model, _, data = argument.rpartition(",")
    if not model or data not in DATA:
        raise ValueError(f"config argument {argument!r}: write <model>,<{'|'.join(DATA)}>")
    config = ConfigDict()
    # Model: a directory, a .gguf file, a hub id or the name of a preset.
    config.model = model
    config.revision = placeholder(str)
    config.seed = 0  # of dropout and of the order of the data
    config.data = _data(data)

    # Length of the run and of a step. batch_size is rows a step, over all micro-batches.
    config.steps = 1000
    config.batch_size = 16
    config.accumulation = 1  # micro-batches a step
    config.seq_len = 512

    config.nucl = ConfigDict()
    config.nucl.variant = "mstd"  # ent | gini | mstd | none
    config.nucl.alpha = 1.0  # weight; try powers of ten between 1e-2 and 1e4
    # Table 3: ffn_out, ffn_in_linear, ffn_in_gated, attention_out.
    config.nucl.targets = ("ffn_out",)
    config.nucl.axis = "neurons"  # of the incoming kernels: neurons | outputs

    config.diversity = ConfigDict()
    # Weight of losses/diversity.py (neurons of a layer less alike); 0: not built.
    config.diversity.weight = 0.0

    config.nll_reduction = "mean"  # over target tokens, or "sum" over each document's
    config.dropout = 0.1  # on the outputs of the residual branches; 0 compiles none

    config.optimizer = _optimizer()

    # Regexes of parameter paths that stay as they are, and of the only ones that train (none: all).
    config.freeze = ()
    config.train_only = ()

    # Devices along each axis; one may be -1: all that are left. Batches are cut over data x fsdp,
    # weights and their optimiser state over fsdp x tensor.
    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "tensor": 1})
    config.compute_dtype = "auto"  # float32 | bfloat16; auto: float32 on CPU, else bfloat16
    config.remat = "auto"  # none | full | dots | attention_output; auto: dots on CPU, else full
    config.unroll = 1  # layers a scan step; 0: all (best on one GPU)

    config.eval = ConfigDict()
    config.eval.every = 100  # steps; besides before the first and after the last
    config.eval.max_batches = 0  # 0: the whole held-out part
    config.eval.best_metric = "validation/nll"  # the smallest is the best

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 500  # steps; 0: only when best, at the end and at a stop
    config.checkpoint.keep = 1  # latest ones
    config.checkpoint.keep_best = True
    config.checkpoint.at_end = True

    config.export = ConfigDict()
    config.export.weights = "last"  # last | best
    config.export.form = "auto"  # auto | padded | native
    # bfloat16 would round away updates as small as these.
    config.export.dtype = "float32"  # float32 | bfloat16 | float16
    config.tensorboard = True
    config.profile = ""  # <start>:<stop>, steps to trace into <workdir>/profile
    config.dry_run = ""  # here | v5e:8x8 | h100:8 ...: what the run needs there; nothing is trained
    config.seeds = ()  # (0, 1, 2): one run each, and their mean with an interval
    return config


def _optimizer() -> ConfigDict:
    optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw | adafactor | sgd
    optimizer.learning_rate = 1e-6
    optimizer.schedule = "constant"  # after the warm-up: constant | linear | cosine
    optimizer.warmup_steps = 100
    optimizer.final_fraction = 0.0  # of the rate, at the end of linear and cosine
    optimizer.weight_decay = 0.0
    optimizer.b1 = 0.9
    optimizer.b2 = 0.999
    optimizer.eps = 1e-8
    optimizer.clip_norm = placeholder(float)  # global gradient norm; None: no clipping
    optimizer.momentum = 0.0  # sgd
    # adafactor: with parameter scaling a rate of 1e-6 moves weights by 5e-8, i.e. nothing learns.
    optimizer.multiply_by_parameter_scale = False
    return optimizer


def _data(name: str) -> ConfigDict:
    data = ConfigDict()
    data.task = name
    data.path = ""  # file, directory or hub name; "" takes the task's own (gsm8k, mbpp, superglue)
    data.split = ""
    data.validation_fraction = 0.05  # held out, the same part whatever the seed
    data.validation_path = ""  # or data of its own (then set the fraction to 0)
    data.prompt_field = ""  # jsonl; "" takes the task's own names
    data.response_field = ""
    data.passage_chars = 16_384  # text: a long file is shuffled in passages of at most so many
    data.packing = True
    data.bos = "auto"  # auto | segment | document | none
    if name == "text":
        data.text_field = ""
    else:
        # Ends every example: $'\n[eod]' for PaLM 2 in the paper (then configs/harness.py's stop).
        data.append = ""
        data.loss_on_prompt = False
    if name == "superglue":
        data.with_dpr = True  # the published mixture has DPR beside the eight tasks
    return data


KIND = "train"
SWEEPS = {
    # Figures 2 and 3: one compilation a variant, alpha = 0 included.
    "alpha": product(
        {"nucl.variant": ("mstd", "gini"), "nucl.alpha": (0.0, 1.0, 10.0, 100.0, 1000.0)}
    ),
    # Table 3, each target alone beside plain fine-tuning.
    "targets": chain(
        point("alpha=0", {"nucl.alpha": 0.0}),
        {"nucl.targets": tuple((name,) for name in TARGETS)},
    ),
}
