"""Data-free removal compared: NUCL's Table 4 (criteria), Figure 4 (layer pairs), Table 5 (halves).

Command:   python scripts/sweep.py --config=configs/prune_table.py --sweep=criteria \
             --config.model=<any> --config.text=<wiki.test.raw> --workdir=runs/table4
           --sweep=pairs: every two adjacent layers; --sweep=halves: all, top, bottom, even, odd;
           --sweep=rules: rules of a neuron's weights or activations, one random draw:
           --config.calibrations="('<one.txt>', '<other.txt>')"
           --sweep=rivals: the same and 20 random draws, also with a few neurons spared
           --sweep=own: rules on text that the model itself writes (or on `calibrations`, where an
           own_text.jsonl saves writing it again), plain and with the compensation
           state_ridge; --sweep=tokens: the hybrid on more and less of it
           --sweep=reach: the hybrid with state_ridge on three lengths of each of `calibrations`
           --sweep=shrink: what people use (Wanda-sp, FLAP, whole blocks) and ours, on such text
           --sweep=blocks: each whole block alone goes, or all from one on (exits at every depth)
           --sweep=needed: does entropy need the neurons that it leaves alone? Some are lost too
Hardware:  one CPU or accelerator with the model's size in host memory twice. The model is loaded
           once; nothing but numbers is written.
Hours:     SmolLM2-135M, 40 windows of 512: about a minute a point on 2 cores.
Paper:     Gemma-2 2B at 25%: 9,216 -> 6,912 neurons a layer, 414.06M parameters (16%) removed. Its
           tables give few-shot accuracies (MMLU 5, HellaSwag 10, ARC-e 0, PIQA 0, SIQA 0, TriviaQA
           5, NQ-open 5 shots); magnitude and both merging rows print MMLU 22.95, chance.

The keys are those of configs/prune.py, configs/perplexity.py and configs/parts/tasks.py, explained
there, and save_model. --config.tasks="('hellaswag', 'piqa')" adds accuracies.
Layers are numbered from 0 here: "odd" are layers 1, 3, 5, ..., which the paper, counting from 1,
calls even (in Gemma-2 those with global attention).
"""

import math
import os
from collections.abc import Sequence

from ml_collections import ConfigDict

from configs import prune
from configs.parts import in_memory
from ffn_heterogeneity.io.load import load_config
from ffn_heterogeneity.launch.sweep import Sweep, chain, point, product
from ffn_heterogeneity.models.leaves import expected_shapes
from ffn_heterogeneity.surgery.blockwise import has_ffn_bias
from ffn_heterogeneity.surgery.criteria import CRITERIA, ON_TEXT
from ffn_heterogeneity.surgery.reduce import Removal
from ffn_heterogeneity.surgery.selection import layer_subset

KIND = "in_memory"


def get_config() -> ConfigDict:
    # criterion: besides those of configs/prune.py also "none".
    config = in_memory.get_config(prune.get_config())
    # Of rules, rivals, own, tokens and shrink: texts that the rules read, one point each.
    config.calibrations = ()
    config.surgery = "prune"  # prune | drop_layers (configs/drop_layers.py)
    config.blocks = 1  # of drop_layers: how many go
    return config


UNPRUNED = point("unpruned", {"criterion": "none"})
RANDOM = point("random", {"criterion": "random"})
LOST = ("", "massive:1", "massive:2", "massive:5", "bos:5", "entropy:0.01")
PROTECTED = ("", "bos:5", "massive:5", "entropy:0.01", "entropy:0.05", "entropy:0.25")


def pairs(config: ConfigDict):
    """Figure 4: the config's criterion on layers i and i + 1 alone, for every i."""
    count = load_config(config.model, revision=config.revision).n_layers
    rows = [point(f"layers_{i}_{i + 1}", {"layers": f"pair:{i}"}) for i in range(count - 1)]
    return chain(UNPRUNED, *rows)


def rules(config: ConfigDict):
    """Every rule that scores neurons one by one, and one random draw."""
    names = [name for name in CRITERIA if name not in ("random", *ON_TEXT)]
    on_text = [
        point(f"{name}-{os.path.basename(text)}", {"criterion": name, "calibration": text})
        for name in ON_TEXT
        for text in config.calibrations or ("",)  # without one: an error names it
    ]
    return chain(
        UNPRUNED,
        *(point(name, {"criterion": name}) for name in names),
        *on_text,
        point("entropy_ridge", {"criterion": "entropy", "compensation": "ridge"}),
        point("magnitude_reversed", {"criterion": "magnitude", "reverse": True}),
        point("similarity", {"criterion": "similarity"}),
        product(RANDOM, {"seed": (0,)}),
    )


def rivals(config: ConfigDict):
    """`rules`, and random draws with a few neurons protected."""
    protected = product(RANDOM, {"seed": tuple(range(20)), "protect": PROTECTED})
    return chain(rules(config)[:-1], protected)


def blocks(config: ConfigDict):
    """Each block skipped, and the head after the first 1, 2, ... blocks."""
    count = load_config(config.model, revision=config.revision).n_layers
    spans = [(f"skip_{i}", i, i) for i in range(count)]
    # The exit before the last block alone is the point that skips it.
    spans += [(f"exit_{i}", i, count - 1) for i in range(1, count - 1)]
    whole = {"surgery": "drop_layers", "calibration": "own"}  # no text is read: blocks are named
    rows = [point(name, whole | {"layers": f"{a}-{b}"}) for name, a, b in spans]
    return chain(UNPRUNED, *rows)


WAYS = (
    point("plain"),
    point("ridge", {"compensation": "state_ridge"}),
    point("ridge_sequential", {"compensation": "state_ridge", "sequential": True}),
)


def own(config: ConfigDict):
    """Removal without data: rules on `calibrations` (none: what the model itself writes), plain and
    with the others regressed on the kept neurons."""
    texts = _named(config.calibrations or ("own",))
    return chain(
        UNPRUNED,
        point("entropy", {"criterion": "entropy"}),
        product(point("entropy", {"criterion": "entropy"}), texts, chain(*WAYS[1:])),
        *(product(point(name, {"criterion": name}), texts, chain(*WAYS)) for name in ON_TEXT),
    )


def shrink(config: ConfigDict):
    """Rules on text (`calibrations`; none: what the model writes), and as many parameters in whole
    blocks."""
    model = load_config(config.model, revision=config.revision)
    asked = Removal(ratio=config.ratio, count=config.count, multiple=config.multiple)
    leaves = {path: math.prod(shape) for path, shape in expected_shapes(model).items()}
    chosen, sizes, lost = layer_subset(config.layers, model.n_layers, model.groups), [], 0.0
    for i, layer in enumerate(model.layers):
        its, ffn = (
            sum(size for path, size in leaves.items() if path.startswith(f"layers/{i}/{part}"))
            for part in ("", "ffn/")
        )
        sizes.append(its)
        if i in chosen:
            lost += asked.count_of(layer.ffn_width) * ffn / layer.ffn_width
    blocks = max(1, round(lost * len(sizes) / sum(sizes)))
    flap = {"criterion": "flap_published", "budget": "global"}
    if has_ffn_bias(model):
        flap["compensation"] = "bias"
    hybrid = {"criterion": "optipfair"}
    rules = chain(
        point("mean_state", {"criterion": "mean_state"}),
        point("wanda_sp", {"criterion": "wanda_sp_published"}),
        point("flap", flap),
        point("flap_ridge", flap | {"compensation": "state_ridge"}),
        point("hybrid", hybrid),
        point("hybrid_ridge", hybrid | {"compensation": "state_ridge"}),
        point("depth", {"surgery": "drop_layers", "layers": "", "blocks": blocks}),
    )
    return chain(
        UNPRUNED,
        point("entropy", {"criterion": "entropy"}),
        product(RANDOM, {"seed": (0, 1, 2)}),
        product(rules, _named(config.calibrations or ("own",))),
    )


def tokens(config: ConfigDict):
    """The hybrid on more and less text."""
    hybrid, sizes = point("optipfair", {"criterion": "optipfair"}), (2048, 8192, 32768, 65536)
    texts = _named(config.calibrations or ("own",))
    return product(hybrid, texts, {"calibration_tokens": sizes}, chain(*WAYS))


def reach(config: ConfigDict):
    """Our default rule on three lengths of each text: what if it is self-generated?"""
    ours = point("hybrid", {"criterion": "optipfair", "compensation": "state_ridge"})
    texts = _named(config.calibrations or ("own",))
    entropy = point("entropy", {"criterion": "entropy"})
    lengths = product(ours, {"calibration_tokens": (2048, 8192, 32768)}, texts)
    return chain(UNPRUNED, entropy, lengths)


def _named(texts: Sequence[str]) -> Sweep:
    names = [os.path.basename(text) for text in texts]
    if len(set(names)) < len(names):  # runs/own-0/own_text.jsonl, runs/own-1/own_text.jsonl
        names = [os.path.basename(os.path.dirname(text)) for text in texts]
    return chain(*(point(x, {"calibration": y}) for x, y in zip(names, texts, strict=True)))


SWEEPS = {
    "criteria": chain(
        UNPRUNED,
        point("entropy", {"criterion": "entropy"}),
        point("gini", {"criterion": "gini"}),
        point("mstd", {"criterion": "mstd"}),
        product(RANDOM, {"seed": (0, 1, 2)}),
        point("magnitude", {"criterion": "magnitude"}),
        point("srinivas_babu", {"criterion": "similarity", "compensation": "sum"}),
        point("stahlberg_byrne", {"criterion": "similarity", "compensation": "least_squares"}),
        point("stahlberg_byrne_ridge", {"criterion": "similarity", "compensation": "ridge"}),
        point("lowest_entropy", {"criterion": "entropy", "reverse": True}),
    ),
    "rules": rules,
    "rivals": rivals,
    "own": own,
    "tokens": tokens,
    "reach": reach,
    "shrink": shrink,
    "blocks": blocks,
    "needed": chain(
        UNPRUNED,
        product(point("entropy", {"criterion": "entropy"}), {"lose": LOST}),
        product(
            point("control", {"criterion": "entropy"}),
            {"lose": ("random:5", "random:0.01"), "seed": (0, 1, 2)},
        ),
    ),
    "pairs": pairs,
    "halves": chain(
        UNPRUNED,
        *(point(name, {"layers": name}) for name in ("all", "top", "bottom", "even", "odd")),
    ),
}
