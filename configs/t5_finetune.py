"""Fine-tuning of an encoder-decoder on prompts and responses (text to text, as in T5).

Command:   python scripts/train.py --config=configs/t5_finetune.py:<model>,glue_sst2 \
             --config.data.path=<train.jsonl> --workdir=runs/t5_sst2
           The argument is <model>,<data>[,<loss> ...]: a directory or hub id of a T5;
           glue_sst2 | glue_mnli | glue_cola | glue_mrpc (prompts of MLP Fusion's published code),
           jsonl | gsm8k | mbpp | webnlg, or superglue with --config.data.path=<root>; and losses
           to train with as well: nucl, jreg, diversity; lora: adapters alone train.
Hardware:  weights, gradients and two moments in float32 need 16 bytes a parameter (Flan-T5 small,
           77M: 1.2 GB); activations come on top.
Hours:     4 + 4 layers of width 128 (t5_pretrain.py:local), 32 x (64 + 12) tokens: 0.34 s a step on
           two CPU cores, with other work running.
Paper:     T5 (arXiv 1910.10683) trains on all tasks with Adafactor at a constant 1e-3 and dropout
           0.1. The default here is AdamW at 1e-4.

The encoder reads seq_len tokens of a prompt, the decoder learns target_len of a response; both end
with an eos, and longer ones are cut and counted. One example a row.
"""

from ml_collections import ConfigDict

from configs.parts import adapters, losses, train
from ffn_heterogeneity.data.tasks import tasks
from ffn_heterogeneity.train.text_to_text import TARGET_LEN


def get_config(argument: str = "google/flan-t5-small,glue_sst2") -> ConfigDict:
    model, *parts = argument.split(",")
    known = [name for name, task in tasks().items() if not (task.encode or task.split_long)]
    if not model or not parts or parts[0] not in known:
        raise ValueError(
            f"config argument {argument!r}: write <model>,<data>[,<loss>], data of "
            f"{', '.join(known)}"
        )
    config = train.get_config()
    config.model = model
    config.objective = "text_to_text"  # a prompt for the encoder, a response to write
    config.target_len = TARGET_LEN  # tokens of a response

    data = config.data
    data.task = parts[0]
    data.split = ""  # of a hub data set; "": the task's own
    data.bos = "none"  # T5 has no bos: its decoder begins with padding
    if data.task == "jsonl":
        data.prompt_field = ""  # "" takes the known pairs of names
        data.response_field = ""  # as prompt_field

    losses.add(config, ("nll", *adapters.add(config, parts[1:])))
    config.dropout = 0.1
    return config


KIND = "train"
