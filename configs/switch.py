"""A Switch Transformer with compressed experts, fine-tuned on labelled rows (MLP Fusion, V-C).

Command:   python scripts/train.py --config=configs/switch.py:<model>,<task>,<method> \
             --config.data.path=<train.jsonl> --config.data.validation_path=<validation.jsonl> \
             --workdir=runs/switch
           The argument is <model>,<task>,<method>[,tuned]. Tasks: sst2 mrpc cola mnli, or those of
           configs/p32_glue.py. Methods: those of configs/fuse.py, each expert on its own; m_smoe
           (with --config.calibration=<text>) and resmoe; lora (on all MLPs, whose own weights
           stay); or whole. tuned: layer-wise tuning for an epoch before the fine-tuning, towards
           the model before compression. --sweep=rates | seeds | frozen (Table VI).
Hardware:  paper: not stated. Base-16 has 1,073M parameters: 24 GB in training (Table VII).
Hours:     paper: 1.9 for 5 epochs on SST-2 (6,697 seconds). Ours: none on published weights.
Paper:     Switch-base-16, the last 4 sparse layers of each stack from 3,072 to 768 neurons, rows of
           100 tokens, batch 32, routers frozen; AdamW with betas .9 and .98, epsilon 1e-8, decay
           .01, warm-up 8 steps (Table IX; the authors' code: 8 epochs). Rates of 1e-4 to 1e-3,
           batches of 16 to 64 and 3 to 20 epochs were searched. Ours: 3e-4 or, by held-out
           training rows, one of theirs (rates); 32; 3.

A stage is a group, as in configs/prune_recover.py.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import mlp_fusion
from configs.parts.adapters import LORA as LORA_KEYS
from ffn_heterogeneity.launch.sweep import product
from ffn_heterogeneity.surgery.adapt import LORA_ON_MLPS, MLPS
from ffn_heterogeneity.surgery.merge_experts import Merging

MERGED, LORA = ("m_smoe", "resmoe"), "lora"
CHOICES = tuple(x for x in mlp_fusion.CHOICES if x != mlp_fusion.LTH) + (*MERGED, LORA)
ROUTERS = "/ffn/router/"
RATE = 3e-4


def get_config(argument: str = "switch_base_16,sst2,fusion") -> ConfigDict:
    model, task, method, *more = (*argument.split(","), "", "")
    tuned = mlp_fusion.TUNED in more
    if not (model and task) or method not in CHOICES or set(more) - {mlp_fusion.TUNED, ""}:
        raise ValueError(
            f"config argument {argument!r}: write <model>,<task>,<method>[,{mlp_fusion.TUNED}], a "
            f"method of {', '.join(CHOICES)}"
        )
    if tuned and method in (mlp_fusion.WHOLE, LORA):
        raise ValueError(f"config argument {argument!r}: {method} compresses nothing to tune")
    if tuned and method == "resmoe":  # whose layers stay stacked with those that keep their experts
        raise ValueError(f"config argument {argument!r}: all experts would be tuned: leave it out")
    config = mlp_fusion.get_config(f"{model},{task},{mlp_fusion.WHOLE}")
    config.stages = ()
    config.lengths = (100,)
    config.layers = "encoder:sparse:last4+decoder:sparse:last4"  # compressed
    config.freeze = (ROUTERS,)  # regexes of leaves that do not train
    config.calibration = ""  # of m_smoe: a text file, which both stacks read
    if method in MERGED:
        mlp_fusion.stage(config, "compress", _merging(config, method))
    elif method not in (mlp_fusion.WHOLE, LORA):
        mlp_fusion.stage(config, "compress", mlp_fusion.compression(config, method))
    if tuned:
        group = _both(config, mlp_fusion.tuning(config, task))
        group["optimizer"] |= {"learning_rate": RATE}
        mlp_fusion.stage(config, "tune", group)
    mlp_fusion.stage(config, "finetune", _finetuning(config, task, method))
    return config


def _merging(config: ConfigDict, method: str) -> dict:
    group = {"kind": "surgery", "base": "experts:merge_experts", "method": method}
    group |= {key: config.get_ref(key) for key in ("layers", "seed")}
    if method == "resmoe":
        return group | {"share": Merging.share}  # of the residuals' parameters that is stored
    return group | {key: config.get_ref(key) for key in ("ratio", "calibration")}


def _both(config: ConfigDict, group: dict) -> dict:
    """Settings of every training: a text a row, as both stacks read it."""
    return group | {"together": 1, "freeze": config.get_ref("freeze")}


def _finetuning(config: ConfigDict, task: str, method: str) -> dict:
    group = _both(config, mlp_fusion.training(config, task))
    optimizer = {"learning_rate": RATE, "warmup_steps": 8.0, "weight_decay": 0.01}
    # The authors' code does not clip.
    group["optimizer"] |= optimizer | {"eps": 1e-8, "clip_norm": placeholder(float)}
    group["export"] = {"weights": "last"}
    if method != LORA:
        return group
    group["base"] += f",{LORA}"
    group["freeze"] = config.get_ref("freeze") + (f"{MLPS}/kernel$",)
    return group | {LORA: LORA_KEYS | LORA_ON_MLPS, "train_only": ()}  # all else trains


KIND = "train"
SWEEPS = {
    # One for each method; data.validation_path: held-out training rows.
    "rates": product(
        {
            "finetune.epochs": (1.0,),
            "finetune.optimizer.learning_rate": (1e-4, 2e-4, 3e-4, 5e-4, 1e-3),
        }
    ),
    "seeds": product({"seed": (0, 1, 2)}),
    "frozen": product({"freeze": ((ROUTERS,), ()), "seed": (0, 1, 2)}),
}
