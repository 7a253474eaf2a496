"""Pre-training of an encoder-decoder from random weights, or further, by span corruption (T5).

Command:   python scripts/train.py --config=configs/t5_pretrain.py:local \
             --config.data.path=runs/corpus/tokens --config.tokenizer=runs/corpus/tokenizer \
             --workdir=runs/t5
           on what scripts/prepare_data.py made of a corpus (configs/prepare_data.py, its second
           command). The argument is <size>[,<loss or surgery> ...]: local | small | switch, losses
           to train with as well (nucl, jreg, diversity), and surgeries before it trains.
           --config.model=<a T5> continues from a model.
Hardware:  local: 2 CPU cores. small: T5 1.1's, weights and gradients in float32 need 8 bytes a
           parameter (83M: 0.7 GB); the moments of Adafactor are sums of rows and columns.
Hours:     on one CPU core, with other work running: local: 0.13 s a step of 8 x 128 tokens. switch:
           4 + 4 layers, every second one with 8 experts; 0.77 s a step of 16 x 128 tokens.
Paper:     T5 (arXiv 1910.10683): 15% of the tokens in spans of 3 on average; Adafactor, whose steps
           are shares of each leaf's rms (the rate: 0.01 for 10,000 steps, then falling as 1 /
           sqrt(step); here a cosine). Switch (2101.03961): one expert a token, the balance loss at
           0.01, noise of 1% on the router's input; the capacity of 64 tokens of a row is
           transformers'.

The keys are those of configs/parts/train.py, explained there, and those below. seq_len is the
length of the encoder's rows. JREG's layers are counted over both stacks, the encoder's first.
"""

from ml_collections import ConfigDict

from configs.parts import adapters, losses, train
from ffn_heterogeneity.train.text_to_text import SPANS

# size: layers of each stack, width, FFN width, heads, learning rate
SIZES = {
    "local": (4, 128, 320, 4, 0.03),
    "small": (8, 512, 1024, 8, 0.01),
    "switch": (4, 192, 768, 4, 0.03),
}


def get_config(argument: str = "local") -> ConfigDict:
    size, *more = argument.split(",")
    if size not in SIZES:
        raise ValueError(f"config argument {argument!r}: choose one of {', '.join(SIZES)}")
    layers, d_model, ffn_width, heads, rate = SIZES[size]
    config = train.get_config()
    config.objective = "span_corruption"  # of rows of text
    config.density = SPANS["density"]  # share of the tokens that become targets
    config.mean_span = SPANS["mean_span"]  # mean length of their spans, in tokens

    # of a T5 1.1 (gated GELU); with experts of a Switch (ReLU)
    train.new_model(config, layers, d_model, ffn_width, heads)
    config.shape.encoder_layers = layers  # blocks of the encoder
    # The tokenizer's and 100 sentinels, unless it has <extra_id_0> and so on.
    config.shape.vocab_size = 32_128
    train.pretraining(config)
    config.data.bos = "none"  # a row begins with a document's first token

    if size == "switch":
        config.shape.experts = 8  # of every second layer
        config.shape.capacity = 64  # tokens of a row that an expert accepts
        config.shape.jitter = 0.01  # noise on the router's input
        more = ["load_balance", "router_z", *more]
    losses.add(config, ("nll", *adapters.add(config, more)))

    config.steps = 100_000
    config.seq_len = 512
    config.optimizer.name = "adafactor"
    config.optimizer.learning_rate = rate
    config.optimizer.multiply_by_parameter_scale = True  # of Adafactor: the rate is a share
    config.optimizer.weight_decay = 0.0
    del config.optimizer["b2"]  # AdamW's
    if size == "switch":
        config.losses.load_balance.per_row = True
    if size != "small":
        config.shape.vocab_size = 4224
        config.shape.tied = True
        config.steps, config.batch_size, config.accumulation, config.seq_len = 500, 8, 1, 128
        config.optimizer.warmup_steps = 50
        config.data.validation_fraction = 0.05
        config.eval.every, config.eval.max_batches = 100, 16
    return config
