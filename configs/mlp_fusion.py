"""A compressed model fine-tuned on labelled rows (MLP Fusion, section V): one job of stages.

Command:   python scripts/train.py --config=configs/mlp_fusion.py:<model>,<task>,<method> \
             --config.data.path=<train.jsonl> --config.data.validation_path=<validation.jsonl> \
             --workdir=runs/fused
           The argument is <model>,<task>,<method>[,tuned]. Tasks as in configs/p32_glue.py; methods
           as in configs/fuse.py, or whole (nothing is compressed) and lth (rounds of training,
           masks and rewinding). tuned: layer-wise tuning for an epoch before the fine-tuning.
           --sweep=rates | seeds | layers | widths.
Hardware:  paper: one A100 or V100. MiniLM-L6 trains on a CPU.
Hours:     paper: not stated. MiniLM-L6 on SST-2's 6,920 sentences: three minutes an epoch.
Paper:     RoBERTa base, the last 8 of 12 layers from 3,072 to 768 neurons, 30 starts; AdamW with
           betas .9, .98 and decay .1, batch 32, 6% warm-up, linear decay, 10 epochs. Ours: 3
           epochs; of MiniLM's 6 layers the last 4. LTH's rounds are not printed: three of a third
           of an epoch here.

A stage is a group, as in configs/prune_recover.py.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import p32_glue
from ffn_heterogeneity.launch.sweep import product
from ffn_heterogeneity.surgery.entries import ENTRIES
from ffn_heterogeneity.surgery.fuse import METHODS

WHOLE, LTH, TUNED = "whole", "lth", "tuned"
CHOICES = (*METHODS, *ENTRIES, WHOLE, LTH)
ROUNDS = 3


def get_config(argument: str = "sentence-transformers/all-MiniLM-L6-v2,sst2,fusion") -> ConfigDict:
    model, task, method, *more = (*argument.split(","), "", "")
    tuned = TUNED in more
    if not (model and task) or method not in CHOICES or set(more) - {TUNED, ""}:
        raise ValueError(
            f"config argument {argument!r}: write <model>,<task>,<method>[,{TUNED}], a method of "
            f"{', '.join(CHOICES)}"
        )
    config = ConfigDict(
        {
            # Model: a directory, a .gguf file, a hub id or the name of a preset.
            "model": model,
            "stages": (),  # in this order; each is a group below
            "seeds": (),  # (0, 1, 2): all stages once per seed, and the mean of every number
            "dry_run": "",  # here | v5e:8x8 | h100:8 ...: what the training stages need there
            "seed": 0,  # of every stage
            "data": {
                "path": "",  # as in configs/p32_glue.py
                "validation_path": "",
            },
            "lengths": (),  # tokens a row, at most three; (): as in configs/p32_glue.py
            "layers": "2-5",  # compressed: all | top | bottom | 0,3,7 | 4-9
            "ratio": 0.75,  # of their neurons, or weights, that goes
        }
    )
    if method == LTH:
        for i in range(1, ROUNDS + 1):
            overrides = {"epochs": 1 / ROUNDS, "export": {"weights": "last"}}
            stage(config, f"round_{i}", training(config, task) | overrides)
            masked = compression(config, "unstructured") | {"rewind": model}
            # As many of those that are left go in each round.
            masked["ratio"] = 1 - (1 - config.get_ref("ratio")) ** (i / ROUNDS)
            stage(config, f"mask_{i}", masked)
    elif method != WHOLE:
        stage(config, "compress", compression(config, method))
    if tuned:
        stage(config, "tune", tuning(config, task))
    stage(config, "finetune", training(config, task))
    return config


def stage(config: ConfigDict, name: str, group: dict) -> None:
    config.stages = (*config.stages, name)
    config[name] = group


def compression(config: ConfigDict, method: str) -> dict:
    group = {
        "kind": "surgery",  # train | surgery | evaluate
        "base": "fuse",  # the config that it starts from
        "method": method,
        "n_init": 30,  # starts of k-means
    }
    return group | {key: config.get_ref(key) for key in ("layers", "ratio", "seed")}


def training(config: ConfigDict, task: str) -> dict:
    data = {key: config.data.get_ref(key) for key in ("path", "validation_path")}
    group = {
        "kind": "train",
        "base": f"p32_glue:{config.model},{task}",
        "pooling": "last",  # the model's own head
        "epochs": 3.0,
        "batch_size": 32,
        "dropout": 0.1,
        "data": data,
        "optimizer": {
            "learning_rate": 2e-5,
            "schedule": "linear",
            "warmup_steps": 0.06,  # of all steps
            "weight_decay": 0.1,
            "b2": 0.98,
            "eps": 1e-6,  # as the clipping, of the authors' code
            "clip_norm": 1.0,
        },
        "tensorboard": True,
    }
    return group | {key: config.get_ref(key) for key in ("seed", "lengths")}


def tuning(config: ConfigDict, task: str) -> dict:
    """Tune the compressed blocks towards the dense model's states, at a constant learning rate."""
    group = training(config, task)
    loss = "regression" if task in p32_glue.REGRESSIONS else "classification"
    off = {"weight": placeholder(float)}  # None: it is not built
    group["optimizer"] |= {"schedule": "constant", "warmup_steps": 0.0, "weight_decay": 0.0}
    # As in the authors' code: Adam with PyTorch's defaults.
    group["optimizer"] |= {"b2": 0.999, "eps": 1e-8, "clip_norm": placeholder(float)}
    return group | {
        "base": f"{group['base']},teacher,layerwise",
        "teacher": {"model": config.model},
        "train_only": ("@taught",),  # the blocks that have a teacher
        "losses": {"layerwise": {"weight": 1.0, "states": "block"}, loss: off},
        "epochs": 1.0,
        "dropout": 0.0,
        "export": {"weights": "last"},
    }


KIND = "train"
SWEEPS = {
    # To choose one for each method: an epoch each. data.validation_path: held-out training rows.
    "rates": product(
        {"finetune.epochs": (1.0,), "finetune.optimizer.learning_rate": (2e-5, 5e-5, 8e-5)}
    ),
    "seeds": product({"seed": (0, 1, 2, 3, 4)}),
    # Figure 4: which layers; Table V and Figure 5: how many neurons are left of 1,536.
    "layers": product({"layers": ("0-5", "1-5", "2-5", "3-5", "4-5", "5")}),
    "widths": product({"ratio": (11 / 12, 0.75, 0.5)}),
}
