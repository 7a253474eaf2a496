"""Adapters trained past the massive weights: MacDrop with LoRA or DoRA (House of Cards, section 3).

Command:   python scripts/train.py --config=configs/macdrop_sft.py:<model>,dora,macdrop \
             --config.data.path=<alpaca_gpt4.jsonl> --workdir=runs/macdrop
           The argument is <model>,<adapters>: lora | dora, macdrop or not. Sweeps:
           python scripts/sweep.py --config=... --sweep=methods | curricula | scopes | controls \
             --workdir=...
           A run writes <workdir>/model, a sweep <workdir>/<point>/model, which
           configs/attack_table.py --sweep=trained evaluates and attacks (Tables 3, 4).
Hardware:  paper: 8 x A100-80GB; 32 rows a device a step. SmolLM2-135M trains on a CPU.
Hours:     paper: not stated. SmolLM2-135M, 4 x 512 tokens, 2 CPU cores: 5 to 14 seconds a step.
Paper:     Table 6: alpaca_gpt4_en, 5% held out, batch 256, learning rate 1e-4, 3 epochs (579
           steps), 5% warm-up, AdamW .9/.999, rank = alpha = 16 on all linear layers but embedding
           and head; k = 5, p0 = 0.8. The length (1,024 tokens) and clipping at 1 are defaults of
           the tool that it names; it states no schedule (the tool's default is linear: the cosine
           is ours) and no adapter dropout. A mask lasts an optimiser step here; in that tool's
           training_step, where the paper puts its code, it lasts one of 4 micro-batches.

The keys are those of configs/parts/train.py and configs/parts/adapters.py, explained there.
"""

from ml_collections import ConfigDict

from configs.parts import adapters, losses, train
from ffn_heterogeneity.launch.sweep import chain, point, product


def get_config(argument: str = "HuggingFaceTB/SmolLM2-135M-Instruct,lora,macdrop") -> ConfigDict:
    model, *names = argument.split(",")
    config = train.get_config()
    config.model = model
    config.data.task = "alpaca"
    config.data.validation_fraction = 0.05
    config.data.packing = False  # one conversation a row
    losses.add(config, ("nll", *adapters.add(config, names)))
    config.steps = 579
    config.batch_size = 256
    config.accumulation = 32
    config.seq_len = 1024
    optimizer = config.optimizer
    optimizer.learning_rate = 1e-4
    optimizer.schedule = "cosine"
    optimizer.warmup_steps = 29
    optimizer.b2 = 0.999
    optimizer.clip_norm = 1.0
    return config


KIND = "train"
P0, CURRICULUM, SCOPE = "macdrop.p0", "macdrop.curriculum", "macdrop.scope"
SWEEPS = {
    # p0 = 0 drops nothing: the adapter alone, by the same program.
    "methods": product({P0: (0.0, 0.8), "seed": (0, 1, 2)}),
    # Table 5, exp at its slowest; Figure 6.
    "curricula": product(
        {CURRICULUM: ("step", "epoch_before", "epoch_after", "exp"), P0: (0.2, 0.5, 0.8, 1.0)}
    ),
    # One of each at the paper's p0, and the positive control: what always drops the neurons that
    # the attack takes must do better under it.
    "controls": chain(
        point("control", {CURRICULUM: "constant", P0: 1.0}),
        product({CURRICULUM: ("epoch_before", "epoch_after", "exp", "constant")}),
        product({SCOPE: ("layer", "others"), CURRICULUM: ("constant",)}),
    ),
    "scopes": product(
        {SCOPE: ("massive", "layer", "others"), CURRICULUM: ("constant",), P0: (0.2, 0.5, 0.8, 1.0)}
    ),
}
