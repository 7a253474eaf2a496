"""Pre-training of a mixture of experts from random weights, with a balance loss on its routers.

Command:   python scripts/train.py --config=configs/moe_pretrain.py:local \
             --config.data.path=runs/corpus/tokens --config.tokenizer=runs/corpus/tokenizer \
             --workdir=runs/moe
           on what scripts/prepare_data.py made of a corpus (configs/prepare_data.py, its second
           command). The argument is <size>[,<loss>]: local | 7b, and losses to train with as well:
           router_z, nucl, jreg, diversity. Sweeps:
           python scripts/sweep.py --config=... --sweep=balance | seeds
Hardware:  local: 2 CPU cores. 7b: weights, gradients and two moments in float32 need 16 bytes a
           parameter over all devices (6.9B: 110 GB).
Hours:     local: 10M tokens, about 50 minutes on two CPU cores (0.55 s a step). 7b: as many
           tokens as you have.
Paper:     no paper of this repository: Mixtral's layer (arXiv 2401.04088), Switch's balance loss
           and its weight (2101.03961). 7b has the shape of OLMoE (2409.02060) with Mixtral's
           gates; local is ours.

The keys are those of configs/parts/train.py, explained there, and those below. The model is
written as a Mixtral, which transformers loads.
"""

from ml_collections import ConfigDict

from configs.parts import losses, train
from ffn_heterogeneity.launch.sweep import product

# size: layers, width, neurons of an expert, experts, experts of a token, heads, learning rate
SIZES = {
    "local": (4, 192, 192, 8, 2, 6, 2e-3),
    "7b": (16, 2048, 1024, 64, 8, 16, 4e-4),
}


def get_config(argument: str = "local") -> ConfigDict:
    size, *more = argument.split(",")
    if size not in SIZES:
        raise ValueError(f"config argument {argument!r}: choose one of {', '.join(SIZES)}")
    layers, d_model, ffn_width, experts, top_k, heads, rate = SIZES[size]
    config = train.get_config()
    # of a Mixtral with as many key heads as heads
    train.new_model(config, layers, d_model, ffn_width, heads)
    config.shape.experts = experts  # of each layer
    config.shape.top_k = top_k  # experts that a token is sent to
    train.pretraining(config)

    losses.add(config, ("nll", "load_balance", *more))

    config.steps = 100_000
    config.seq_len = 2048
    config.optimizer.learning_rate = rate
    if size == "local":
        config.shape.vocab_size = 4096
        config.shape.tied = True
        config.steps, config.batch_size, config.accumulation, config.seq_len = 5000, 16, 1, 128
        config.optimizer.warmup_steps = 300
        config.data.validation_fraction = 0.05
        config.eval.every, config.eval.max_batches = 500, 32
    return config


KIND = "train"
BALANCE = "losses.load_balance.weight"
SWEEPS = {
    # The weight of the balance loss (one compilation for all); at 0 the load is measured, too.
    "balance": product({BALANCE: (0.0, 0.001, 0.01, 0.1)}),
    # With and without it, over three seeds.
    "seeds": product({BALANCE: (0.0, 0.01)}, {"seed": (0, 1, 2)}),
}
