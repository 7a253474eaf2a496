"""Pre-training from random weights, without and with the jump-suppressing regulariser (JREG).

Command:   python scripts/train.py --config=configs/jreg_pretrain.py:170m \
             --config.data.path=runs/corpus/tokens --config.tokenizer=runs/corpus/tokenizer \
             --workdir=runs/pretrain
           on what scripts/prepare_data.py made of a corpus (configs/prepare_data.py, its second
           command). The argument is <size>[,<loss>]: 170m (134m is the same) | 1b | 3_4b | local,
           and losses to train with as well: nucl, diversity. Sweeps:
           python scripts/sweep.py --config=... --sweep=alpha | lambda | steps | seeds | nucl ...
           (nucl: with --config=configs/jreg_pretrain.py:<size>,nucl; controls, with ...,rescale:
           JREG, LayerNorm Scaling, and a last block whose output counts 10%).
Hardware:  paper: not stated. Weights, gradients and two moments in float32 need 16 bytes a
           parameter over all devices (134M: 2.2 GB, 928M: 15 GB, 3.59B: 58 GB). local: 2 CPU cores.
Hours:     paper: not stated. 105 billion tokens (512 x 1,024 a step, 200,000 steps): at 40% of an
           H200's peak about 3.5 days for 134M on one, 21 for 928M, 79 for 3.59B (estimates).
           local: 1.5M tokens, about 7 minutes a run on one CPU core.
Paper:     AdamW .9/.95, eps 1e-8, decay 0.1, clip 1.0, cosine to 10%, 1,000 steps of warm-up, a
           rate of 9e-4 (170M), 7e-4 (1B), 5e-4 (3.4B); lambda 1, the best of 1, 2, 3; alpha 1 and
           3 the best of 0, 0.1, 0.3, 0.5, 1, 3 by the mean of nine accuracies (170M: 48.5 against
           47.5 without); zeta_L 7.24 without, 0 from alpha 0.3 on. FineWeb-Edu, vocabulary 32,000.
           The paper's names are not the sizes: untied heads give 134.1M, 928M, 3.59B parameters
           (tied: 109.5M, 862M, 3.50B); which of the two is not stated; untied here.

The keys are those of configs/parts/train.py, explained there, and those below.
"""

from ml_collections import ConfigDict

from configs.parts import adapters, losses, train
from ffn_heterogeneity.launch.sweep import chain, point, product

# size: layers, width, FFN width, heads, learning rate
SIZES = {
    "170m": (12, 768, 2048, 12, 9e-4),
    "1b": (16, 2048, 5376, 16, 7e-4),
    "3_4b": (30, 3072, 8192, 24, 5e-4),
    "local": (6, 128, 344, 4, 3e-3),
}
SIZES["134m"] = SIZES["170m"]


def get_config(argument: str = "170m") -> ConfigDict:
    size, *more = argument.split(",")
    if size not in SIZES:
        raise ValueError(f"config argument {argument!r}: choose one of {', '.join(SIZES)}")
    layers, d_model, ffn_width, heads, rate = SIZES[size]
    config = train.get_config()
    # of a Llama with SwiGLU and as many key heads as heads
    train.new_model(config, layers, d_model, ffn_width, heads)
    train.pretraining(config)

    losses.add(config, ("nll", "jreg", *adapters.add(config, more)))
    # The jump rates with h_L after the final norm too: which of the two the paper took is not said.
    after = ConfigDict()
    after.term = "jreg"  # which term it is, where the group's name does not say it
    after.final_norm = True  # h_L before (False) or after the final norm
    config.monitors.jreg_after_norm = after
    if "nucl" in more:
        config.monitors.entropy = losses.entropy(config)

    if "rescale" in config:
        # (regex, factor) pairs: leaves, or layers, whose learning rate is another.
        config.optimizer.rates = ()
    config.steps = 200_000
    config.seq_len = 1024
    config.optimizer.learning_rate = rate
    # Local: a jump needs many steps and a large vocabulary, not many tokens; tied, because then
    # more seeds jump within the last three layers (of those tried).
    if size == "local":
        config.shape.vocab_size = 4096
        config.shape.tied = True
        config.steps, config.batch_size, config.accumulation, config.seq_len = 3000, 4, 1, 128
        config.optimizer.warmup_steps = 300
        config.data.validation_fraction = 0.05
        config.eval.every, config.eval.max_batches = 500, 32
    return config


def controls(config: ConfigDict):
    """Without JREG, with it, and two other ways to a smaller jump (surgery/rescale.py)."""
    if "rescale" not in config:
        raise ValueError("sweep controls: write --config=configs/jreg_pretrain.py:<size>,rescale")
    count = config.shape.layers
    norms = tuple((rf"layers/{i}/\w+_norm/", (i + 1) ** -0.5) for i in range(1, count))
    last = ((rf"layers/{count - 1}/(attention/out|ffn/down)/", 0.1),)
    scaled = [
        point(name, {JREG: 0.0, "rescale.factors": factors, "optimizer.rates": factors})
        for name, factors in (("norm_scaling", norms), ("small_last_block", last))
    ]
    return chain(BASELINE, point("jreg", {JREG: 1.0}), *scaled)


KIND = "train"
JREG, ALPHA = "losses.jreg.weight", "losses.jreg.alpha"
BASELINE = point("baseline", {JREG: 0.0})  # its jump rates are measured all the same
SWEEPS = {
    # Table 3: the sharpness (part of the program: one compilation each).
    "alpha": chain(BASELINE, {ALPHA: (0.0, 0.1, 0.3, 0.5, 1.0, 3.0)}),
    # The weight (one compilation for all); the paper tried 1, 2, 3.
    "lambda": chain(BASELINE, {JREG: (0.3, 1.0, 2.0, 3.0)}),
    # The same batch size for 10% of the steps (10% of the tokens), each with its own schedule.
    # (Appendix D is another experiment: it keeps the tokens and changes the batch.)
    "steps": product({JREG: (0.0, 1.0), "steps": (20_000, 200_000)}),
    # NUCL in pre-training, what its paper names as a limitation (one compilation for all); with
    # :<size>,nucl.
    "nucl": product(point("nucl", {JREG: 0.0}), {"losses.nucl.weight": (0.0, 1.0, 10.0, 100.0)}),
    "controls": controls,
    # Baseline and four sharpnesses over five seeds, for a small machine.
    "seeds": product(chain(BASELINE, {ALPHA: (0.0, 0.3, 1.0, 3.0)}), {"seed": (0, 1, 2, 3, 4)}),
}
