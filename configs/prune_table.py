"""Data-free removal compared: NUCL's Table 4 (criteria), Figure 4 (layer pairs), Table 5 (halves).

Command:   python scripts/sweep.py --config=configs/prune_table.py --sweep=criteria \
             --config.model=<any> --config.text=<wiki.test.raw> --workdir=runs/table4
           --sweep=pairs: every two adjacent layers; --sweep=halves: all, top, bottom, even, odd.
Hardware:  one CPU or accelerator with the model's size in host memory twice. The model is loaded
           once; nothing but numbers is written.
Hours:     SmolLM2-135M, 40 windows of 512: about a minute a point on 2 cores.
Paper:     Gemma-2 2B at 25%: 9,216 -> 6,912 neurons a layer, 414.06M parameters (16%) removed. Its
           tables give few-shot accuracies (MMLU 5, HellaSwag 10, ARC-e 0, PIQA 0, SIQA 0, TriviaQA
           5, NQ-open 5 shots); magnitude and both merging rows stand at MMLU 22.95, chance.

The keys are those of configs/prune.py, configs/perplexity.py and configs/parts/tasks.py, explained
there, and save_model. --config.tasks="('hellaswag', 'piqa')" adds accuracies.
Layers are numbered from 0 here: "odd" are layers 1, 3, 5, ..., which the paper, counting from 1,
calls even (in Gemma-2 those with global attention).
"""

from ml_collections import ConfigDict

from configs import perplexity, prune
from configs.parts import tasks
from ffn_heterogeneity.io.load import load_config
from ffn_heterogeneity.launch.sweep import chain, point, product
from ffn_heterogeneity.surgery.criteria import CRITERIA

KIND = "removal"


def get_config() -> ConfigDict:
    keys: dict = {}
    for part in (tasks, perplexity, prune):
        keys |= dict(part.get_config().items(preserve_field_references=True))
    config = ConfigDict(keys)
    config.compute_dtype = "float32"  # as what docs/results has, on any machine
    # criterion: besides those of configs/prune.py also "none".
    config.tasks = ()  # scored beside the perplexity
    config.save_samples = False
    # Also write the smaller model, to <workdir>/<point>/model.
    config.save_model = False
    return config


UNPRUNED = point("unpruned", {"criterion": "none"})


def pairs(config: ConfigDict):
    """Figure 4: the config's criterion on layers i and i + 1 alone, for every i."""
    count = load_config(config.model, revision=config.revision).n_layers
    rows = [point(f"layers_{i}_{i + 1}", {"layers": f"pair:{i}"}) for i in range(count - 1)]
    return chain(UNPRUNED, *rows)


SWEEPS = {
    "criteria": chain(
        UNPRUNED,
        point("entropy", {"criterion": "entropy"}),
        point("gini", {"criterion": "gini"}),
        point("mstd", {"criterion": "mstd"}),
        product(point("random", {"criterion": "random"}), {"seed": (0, 1, 2)}),
        point("magnitude", {"criterion": "magnitude"}),
        point("srinivas_babu", {"criterion": "similarity", "compensation": "sum"}),
        point("stahlberg_byrne", {"criterion": "similarity", "compensation": "least_squares"}),
        point("stahlberg_byrne_ridge", {"criterion": "similarity", "compensation": "ridge"}),
        point("lowest_entropy", {"criterion": "entropy", "reverse": True}),
    ),
    # Every rule of one number a neuron, and what protecting a few neurons does for chance.
    "rivals": chain(
        UNPRUNED,
        *(point(name, {"criterion": name}) for name in CRITERIA if name != "random"),
        point("entropy_ridge", {"criterion": "entropy", "compensation": "ridge"}),
        point("magnitude_reversed", {"criterion": "magnitude", "reverse": True}),
        point("similarity", {"criterion": "similarity"}),
        product(
            point("random", {"criterion": "random"}),
            {
                "protect": (
                    "",
                    "bos:5",
                    "massive:5",
                    "entropy:0.01",
                    "entropy:0.05",
                    "entropy:0.25",
                ),
                "seed": tuple(range(20)),
            },
        ),
    ),
    "pairs": pairs,
    "halves": chain(
        UNPRUNED,
        *(point(name, {"layers": name}) for name in ("all", "top", "bottom", "even", "odd")),
    ),
}
