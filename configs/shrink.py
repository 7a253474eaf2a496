"""Make a model smaller without any data, and train it on what it wrote itself: one job.

Command:   python scripts/train.py --config=configs/shrink.py:<model> --workdir=runs/small
           with --config.text=<file.txt> the perplexity before and after. The argument is
           <model>[,depth][,full|none]. depth: whole blocks go instead of neurons, as many as the
           key `depth` says. full: all weights train afterwards, none: nothing does; else LoRA.
Hardware:  any CPU or accelerator that can train the model with LoRA.
Hours:     SmolLM2-135M on 2 CPU cores: about 0.4 (removal 9 minutes, training 13).
Paper:     none. Ours are the rules: whole neurons by OptiPFair's hybrid (configs/prune.py), the
           others regressed on those that stay. Self-generated text was used to calibrate before
           (Self-calibration, arXiv 2410.17170; Beware of Calibration Data, 2410.17711) and to
           recover by fine-tuning (Self-Data Distillation, 2410.09982).

The model first writes 8,192 tokens, saved in own_text.jsonl. They choose what goes, and then train
what stays: the next-token loss on a model's own samples distils it without a teacher in memory. A
tenth of them is held out and chooses the best checkpoint. A completed stage is never run again; the
same command resumes. The smaller model is in the last stage's directory.
"""

from ml_collections import ConfigDict


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M") -> ConfigDict:
    model, *words = argument.split(",")
    chosen = set(words) - {"depth"}
    if not model or not chosen <= {"full", "none"} or len(chosen) > 1:
        raise ValueError(f"config argument {argument!r}: write <model>[,depth][,full|none]")
    config = ConfigDict(
        {
            "model": model,  # a directory, a .gguf file or a hub id
            # In this order; each is a group below.
            "stages": ("shrink",) if "none" in words else ("shrink", "recover", "fold"),
            "seeds": (),  # (0, 1, 2): all stages once per seed, and the mean of every number
            "dry_run": "",  # here | v5e:8x8 | h100:8 ...: what the training needs there
            "seed": 0,  # of the text and of the training
            "text": "",  # a UTF-8 text file: perplexity before and after
            "window": 512,  # predictions in a window of it
            "window_every": 1,  # 25: every 25th window, spread over the text
        }
    )
    shared = {name: config.get_ref(name) for name in ("text", "window", "window_every")}
    own = {"calibration": "own", "calibration_tokens": 8192, "seed": config.get_ref("seed")}
    if "depth" in words:
        config.depth = 1  # blocks that go
        group = {"base": "drop_layers", "blocks": config.get_ref("depth")}
    else:
        config.ratio = 0.25  # of every layer's neurons goes
        config.multiple = 1  # 64: what stays is rounded to a multiple of 64
        group = {"base": "prune", "criterion": "optipfair", "compensation": "state_ridge"}
        group |= {name: config.get_ref(name) for name in ("ratio", "multiple")}
    config.shrink = {"kind": "surgery"} | group | own | shared
    lora = "" if "full" in words else ",lora"
    config.recover = {
        "kind": "train",  # train | surgery | evaluate
        "base": f"nucl_finetune:{model},rows{lora}",  # the config that it starts from
        "data": {"path": "{shrink}/own_text.jsonl", "validation_fraction": 0.1},
        "steps": 100,
        "batch_size": 4,
        "accumulation": 1,
        "seq_len": 256,
        "dropout": 0.0,
        "losses": {"nucl": {"weight": 0.0}},
        # LoRA's is the best of 1e-4 and 3e-4 on the held-out tenth (SmolLM2).
        "optimizer": {"learning_rate": 1e-5 if "full" in words else 1e-4, "warmup_steps": 10},
        "eval": {"every": 20, "max_batches": 0},
        "export": {"weights": "best"},
        "tensorboard": False,
        "seed": config.get_ref("seed"),
    }
    if lora:
        config.recover["lora"] = {"rank": 16, "alpha": 16.0}
    # Adapters are added to the weights; then any tool loads the model.
    config.fold = {"kind": "surgery", "base": "adapt:fold"} | shared
    return config


KIND = "train"
