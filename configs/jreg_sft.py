"""Supervised fine-tuning on conversations: the Tulu-v1 mixture, as JREG's paper tunes its models.

Command:   python scripts/train.py --config=configs/jreg_sft.py:<model> --workdir=runs/sft
           --config.data.path=<file.jsonl> takes conversations of one's own; "" fetches the mixture,
           which is for research only (some of its parts are not for commercial use).
Hardware:  paper: not stated. 512 rows of 1,024 tokens a step in micro-batches of 16; weights,
           gradients and two moments in float32 need 16 bytes a parameter over all devices (its
           largest, 3.5 billion: 56 GB).
Hours:     paper: not stated. 957 steps are 502M positions: SmolLM2-135M at 40% of an H200's peak
           about half an hour (an estimate); 4 steps of 8 x 256 on 2 CPU cores: minutes.
Paper:     Tulu-v1 mixture (490,445 conversations), learning rate 2e-5 with linear decay, batch 512,
           957 steps = one epoch, AdamW. Its results are judged by MT-bench, Vicuna and WizardLM
           questions (configs/chat.py, configs/judge.py). Ours, because nothing is stated: 3%
           warm-up (29 steps) and no weight decay as in the Tulu recipe; moments .9 and .95 and rows
           of 1,024 tokens as in the paper's pretraining; no clipping; no dropout.

The keys are those of configs/nucl_finetune.py, explained there, chat_template and skip_bad of the
data, and jreg's (configs/jreg_pretrain.py): its weight is 0 here, the paper's fine-tuning is plain.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M") -> ConfigDict:
    base = runpy.run_path(str(Path(__file__).parent / "nucl_finetune.py"))["get_config"]
    config = base(f"{argument},jsonl")
    config.jreg = ConfigDict({"weight": 0.0, "alpha": 1.0, "final_norm": False, "positions": "all"})
    config.nucl.variant = "none"
    config.nucl.alpha = 0.0
    del config.diversity
    del config.optimizer.momentum  # of SGD

    # Of other tasks:
    for key in ("prompt_field", "response_field", "passage_chars", "append", "loss_on_prompt"):
        del config.data[key]
    config.data.task = "messages"
    config.data.text_field = ""  # of the conversations; "": messages
    config.data.validation_fraction = 0.0  # the paper holds nothing out
    # One conversation a row, so that 957 batches of 512 are an epoch; True is faster, and then an
    # epoch has fewer steps.
    config.data.packing = False
    # auto: the tokenizer's template, else Tulu's form | tokenizer | tulu.
    config.data.chat_template = "auto"
    config.data.skip_bad = False  # drop conversations that cannot be read, and count them

    config.steps = 957
    config.batch_size = 512
    config.accumulation = 32
    config.seq_len = 1024
    config.dropout = 0.0
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 29
    config.optimizer.b2 = 0.95
    return config
