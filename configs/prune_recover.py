"""Data-free neuron removal, then recovery by fine-tuning, then perplexity: one job of three stages
(NUCL, section 4.2, "prune then fine-tune").

Command:   python scripts/train.py --config=configs/prune_recover.py:gemma2_2b,gsm8k \
             --config.prune.ratio=0.25 --config.score.text=<held-out.txt> --workdir=runs/recover
           The argument is <model>,<data> as of configs/nucl_finetune.py. scripts/sweep.py with
           --sweep=own: entropy, the hybrid on self-generated text, and with state_ridge.
Hardware:  that of the fine-tuning (configs/nucl_finetune.py); removal and scoring need less.
Hours:     SmolLM2-135M, 40 steps of 4 x 256 tokens on 2 CPU cores: minutes.
Paper:     Table 4 compares removal criteria without recovery; the recovery's settings are ours.

A stage is a group: its kind, the config file it starts from, and the settings that differ (any key
of that file may be added, here or on the command line by <stage>.<key>). Every stage
writes <workdir>/<nn>_<name>/; a completed one is never run again.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ffn_heterogeneity.data.tasks import tasks
from ffn_heterogeneity.launch.sweep import chain, point
from ffn_heterogeneity.surgery.reduce import Removal


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M,gsm8k") -> ConfigDict:
    model, _, data = argument.rpartition(",")
    if not model or data not in tasks():
        raise ValueError(
            f"config argument {argument!r}: write <model>,<data>, data of {', '.join(tasks())}"
        )
    passages = {"passage_chars": 16_384} if data == "text" else {}
    return ConfigDict(
        {
            # Model: a directory, a .gguf file, a hub id or the name of a preset.
            "model": model,
            # In this order; each is a group below.
            "stages": ("prune", "recover", "score"),
            # (0, 1, 2): all stages once per seed, and the mean of every number with an interval.
            "seeds": (),
            # here | v5e:8x8 | h100:8 ...: what the training stages need there; nothing is run.
            "dry_run": "",
            "prune": {
                "kind": "surgery",  # train | surgery | evaluate
                "base": "prune",  # the config that it starts from
                "criterion": "entropy",  # entropy | gini | mstd | magnitude | random
                "reverse": False,
                "calibration": Removal.calibration,
                "calibration_tokens": placeholder(int),
                "compensation": Removal.compensation,
                "ratio": 0.25,
                "layers": "all",  # or top | bottom | even | odd | pair:5 | 0,3,7 | 4-9
                "seed": 0,  # of the random criterion and of the text that the model writes
            },
            "recover": {
                "kind": "train",
                "base": f"nucl_finetune:{model},{data}",
                "seed": 0,
                "steps": 1000,  # of the training
                "batch_size": 16,  # rows a step
                "accumulation": 1,
                "seq_len": 512,
                "dropout": 0.0,
                "train_only": (),  # regexes of the leaves that train; of an adapted model needed
                "data": {"path": "", "validation_fraction": 0.05} | passages,
                "losses": {"nucl": {"weight": 0.0}},
                "optimizer": {"name": "adamw", "learning_rate": 1e-5, "warmup_steps": 100},
                "eval": {"every": 100, "max_batches": 0},
                "mesh": {"data": 1, "fsdp": -1, "tensor": 1},
                "tensorboard": True,
            },
            "score": {
                "kind": "evaluate",
                "base": "perplexity",
                "text": "",  # a UTF-8 text file, or:
                "token_ids": "",
                "window": 512,
                "max_windows": 40,
                "bos": "auto",
            },
        }
    )


KIND = "train"
OWN = {"prune.criterion": "optipfair", "prune.calibration": "own"}
SWEEPS = {
    # Removal without data (configs/prune_table.py, its sweep "own") with the same recovery.
    "own": chain(
        point("entropy", {"prune.criterion": "entropy"}),
        point("hybrid", OWN),
        point("hybrid_ridge", OWN | {"prune.compensation": "state_ridge"}),
    ),
}
