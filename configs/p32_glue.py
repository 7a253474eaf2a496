"""Classification with depth-wise pooling, on GLUE or rows of one's own (P-32, sections 3 to 6).

Command:   python scripts/train.py --config=configs/p32_glue.py:<model>,<task> \
             --config.pooling=p32|average|last --config.data.path=<train.jsonl> \
             --config.data.validation_path=<validation.jsonl> --workdir=runs/p32
           The argument is <model>,<task>[,<surgery or loss> ...]. Tasks: rte mrpc stsb cola sst2
           qnli qqp mnli, from the hub where no path is given; labels | regression: a .jsonl, .csv
           or .tsv file with --config.fields=<a>[,<b>] and the field "label". Surgeries before it
           trains: nf4,lora (QLoRA, the paper's for decoders; an encoder trains whole). Losses
           in addition to the task's: nucl, jreg, diversity.
           Then scripts/evaluate.py --config=configs/classify.py predicts. Sweeps: --sweep=rates
           (with --config.data.validation_fraction=0.1, and no validation_path: chosen on held-out
           training rows) | poolings | few | rivals | depths | fractions.
Hardware:  paper: not stated. MiniLM-L6 and SmolLM2-135M train on a CPU.
Hours:     paper: not stated. MiniLM-L6 on MRPC, 345 steps of 32 rows, 2 CPU cores: minutes.
Paper:     hardly any setting is printed ("low learning rate, aggressive clipping"). Ours, of
           encoders: AdamW, 2e-5, 3 epochs, batch 32, 6% warm-up, linear decay, clipping at 1,
           dropout 0.1; of QLoRA: rank = alpha = 16, 1e-4, clipping at 0.3. A run whose loss is not
           finite begins again with another seed (`retries`), as the paper says. Rows of one's own:
           1e-4 and 100 steps at least, by held-out training rows of two files of 300.

The other keys are those of configs/parts/train.py and configs/parts/adapters.py, explained there.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs.parts import adapters, losses, train
from ffn_heterogeneity.data.glue import OWN
from ffn_heterogeneity.launch.sweep import chain, point, product

REGRESSIONS = ("stsb", "regression")


def get_config(argument: str = "sentence-transformers/all-MiniLM-L6-v2,mrpc") -> ConfigDict:
    parts = argument.split(",")
    if len(parts) < 2 or not all(parts):
        raise ValueError(
            f"config argument {argument!r}: write <model>,<task>[,<surgery or loss> ...]"
        )
    model, task, *more = parts
    config = train.get_config()
    config.objective = "labels"  # a label, or a number, a row
    config.model = model
    config.data = ConfigDict(
        {
            "task": task,
            "path": "",  # .jsonl, .csv, .tsv, .parquet, saved folder, hub name; "": the task's own
            "validation_path": "",  # or several sets: "matched=<path>,mismatched=<path>"
            "test_path": "",  # labelled rows that are measured once, at the end
            "validation_fraction": 0.0,  # of the rows of a path, where no such path is given
            "fraction": 1.0,  # of the training rows, drawn by the seed
        }
    )
    config.fields = ""  # <a>[,<b>]: of the texts, where the task's names are not the file's
    # <a>,<b>: of task "labels", in order; "": those in the file. A number in a file is the label
    # with that text, else a place in this order.
    config.labels = ""
    config.pooling = "p32"  # last | p32 | average | scalar_mix (ELMo's)
    # A decoder's final norm: of the sum (pooled), of the last state alone (hidden_states), or none.
    config.final_norm = "pooled"
    config.lambda_rate = placeholder(float)  # of what weighs the layers; None: the model's rate
    config.lambda_rate = 1e-2
    config.lengths = ()  # tokens a row, at most three; (): 32, 64, 128; decoders 64, 128, 256
    # Rows that are packed together, so that there is less padding and shorter lengths suffice;
    # no row sees another. 1: no packing.
    config.together = 4
    config.epochs = 3.0
    config.steps = 0  # 0: what the epochs make
    config.least_steps = 100 if task in OWN else 0  # a minimum, whatever the epochs make
    config.retries = 0  # runs with other seeds after one whose loss is not finite
    config.batch_size = 32
    config.dropout = 0.1
    del config.seq_len

    optimizer = config.optimizer
    optimizer.learning_rate = 1e-4 if task in OWN else 2e-5
    optimizer.schedule = "linear"
    optimizer.clip_norm = 1.0
    optimizer.eps = 1e-8  # added to the root of the second moment
    del optimizer.warmup_steps
    optimizer.warmup_steps = 0.06  # below 1: a share of all steps
    names = adapters.add(config, ("truncate", *more))
    losses.add(config, ("regression" if task in REGRESSIONS else "classification", *names))
    if "train_only" in config and config.train_only:
        config.train_only = (*config.train_only, "^task_head/")
        optimizer.learning_rate = 1e-4
        optimizer.clip_norm = 0.3
        config.dropout = 0.0
    config.eval.every = 100
    config.export.weights = "best"
    return config


KIND = "train"
POOLINGS = {"pooling": ("last", "average", "p32")}
SEEDS = {"seed": (0, 1, 2, 3, 4)}
FEW_SEEDS = {"seed": (0, 1)}
SHARED = point("p32-shared", {"pooling": "p32", "lambda_rate": None})
DEPTHS = {"truncate.blocks": (1, 2, 3, 4, 5, 6), "pooling": ("last",)}
FRACTIONS = {"data.fraction": (0.2, 0.4, 0.6, 0.8)}
RATES = {"optimizer.learning_rate": (2e-5, 1e-4)}
SWEEPS = {
    "rates": product(RATES, POOLINGS),
    # Table 2 over seeds, the poolings of one seed side by side; and lambda at the model's own rate.
    "poolings": chain(product(SEEDS, POOLINGS), product(FEW_SEEDS, SHARED)),
    "few": product(FEW_SEEDS, POOLINGS),
    "rivals": product(FEW_SEEDS, point("scalar_mix", {"pooling": "scalar_mix"})),
    # Tables 3, 4 and 7, Figure 3.
    "depths": product(FEW_SEEDS, DEPTHS),
    "fractions": product(FEW_SEEDS, FRACTIONS, {"pooling": ("last", "p32")}),
}
