"""Pieces of all five papers in one training step: any subset of them, on labelled rows.

Command:   python scripts/train.py --config=configs/five.py:<model>,<task> \
             --config.data.path=<train.jsonl> --config.data.validation_path=<validation.jsonl> \
             --workdir=runs/five
           The argument is <model>,<task>[,<piece> ...]; no piece named: all but the
           last two.
           fuse       MLP Fusion: every layer's neurons fused but the massive layer's
           dora       DoRA on all kernels (lora: LoRA), which train with the head alone
           macdrop    massive weights: their columns are dropped in training
           p32        P-32: a learnt sum over the layers is classified; else the last layer
           nucl       NUCL on the outgoing weights as they act, adapters and lengths in them
           jreg       JREG: no jump of the last layer's hidden state
           layerwise  MLP Fusion: the fused layers' states towards those with dense blocks
           load_balance  equal use of the experts (Switch's loss), for a model with experts
           Tasks as in configs/p32_glue.py.
           In a model with experts fuse merges neurons inside each of them, and macdrop drops
           columns of the massive expert alone.
Hardware:  SmolLM2-135M trains on a CPU.
Hours:     SmolLM2-135M, 60 steps of 32 rows: 230 seconds of a shared H100, half to compile.
Paper:     none has them together. Each piece's settings are its own config's; the weights of the
           losses are ours.

The other keys are those of configs/parts/train.py and configs/parts/adapters.py, explained there.
"""

from ml_collections import ConfigDict

from configs import p32_glue
from ffn_heterogeneity.launch.sweep import product

# In the order in which they apply: shapes change, teachers are added, then adapters' leaves.
SURGERIES = ("fuse", "teacher", "lora", "dora", "macdrop")
LOSSES = ("nucl", "jreg", "layerwise", "load_balance")
DEFAULT = ("fuse", "dora", "macdrop", "p32", "nucl", "jreg")
PIECES = (*DEFAULT, "lora", "layerwise", "load_balance")


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M-Instruct,mrpc") -> ConfigDict:
    model, _, rest = argument.partition(",")
    task, *pieces = rest.split(",")
    pieces = pieces or DEFAULT
    if not (model and task) or set(pieces) - {*PIECES, "head"}:
        raise ValueError(
            f"config argument {argument!r}: write <model>,<task>[,<piece> ...], pieces of "
            f"{', '.join(PIECES)}, or head for none of them"
        )
    if "layerwise" in pieces and "fuse" not in pieces:
        raise ValueError(
            f"config argument {argument!r}: layerwise needs fuse: it teaches fused layers"
        )
    wanted = {*pieces, *(["teacher"] if "layerwise" in pieces else [])}
    chosen = [name for name in (*SURGERIES, *LOSSES) if name in wanted]
    config = p32_glue.get_config(",".join((model, task, *chosen)))
    config.pooling = "p32" if "p32" in pieces else "last"
    if "fuse" in pieces:
        config.fuse.seed = config.get_ref("seed")
    if "layerwise" in pieces:
        config.teacher.model = model
    return config


KIND = "train"
SWEEPS = {"seeds": product({"seed": (0, 1)})}
