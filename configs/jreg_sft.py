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
           957 steps = one epoch, AdamW .9/.95. Its results are judged by MT-bench, Vicuna and
           WizardLM questions (configs/chat.py, configs/judge.py). Ours, because nothing is stated:
           3% warm-up (29 steps) and no weight decay as in the Tulu recipe; rows of 1,024 tokens as
           in the paper's pre-training; no clipping; no dropout.

The keys are those of configs/parts/train.py, explained there, and those below.
"""

from ml_collections import ConfigDict

from configs.parts import losses, train


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M") -> ConfigDict:
    model, *more = argument.split(",")
    config = train.get_config()
    config.model = model

    config.data.task = "messages"
    config.data.split = ""  # of a hub data set; "": the task's own
    # Of a data set of the hub, and of validation_path; "": of the latter validation.
    config.data.validation_split = ""
    config.data.text_field = ""  # of the conversations; "": messages
    config.data.validation_fraction = 0.0  # held out; the paper: nothing
    # One conversation a row, so that 957 batches of 512 are an epoch; True is faster, and then an
    # epoch has fewer steps.
    config.data.packing = False
    config.data.bos = "auto"  # auto | segment | document | none; a chat template has its own
    # auto: the tokenizer's template, else Tulu's form | tokenizer | tulu.
    config.data.chat_template = "auto"
    config.data.template_date = "2024-07-26"  # what a template writes that asks for today's date
    config.data.skip_bad = False  # drop conversations that cannot be read, and count them

    losses.add(config, ("nll", "jreg", *more))
    config.losses.jreg.weight = 0.0  # the paper's fine-tuning is plain; its jumps are seen
    config.monitors.jreg_after_norm = ConfigDict({"term": "jreg", "final_norm": True})

    config.steps = 957
    config.batch_size = 512
    config.accumulation = 32
    config.seq_len = 1024
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 29
    config.optimizer.b1 = 0.9  # decay of the first moment
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-8  # of adamw
    return config
