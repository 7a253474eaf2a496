"""Attacks compared (House of Cards: massive weights, Table 1, Figure 4).

Command:   python scripts/sweep.py --config=configs/attack_table.py --sweep=k \
             --config.model=<any> --config.text=<wiki.test.raw> --config.max_windows=40 \
             --workdir=runs/attacks
           --sweep=table: no attack, top-5 zeroing, top-5 retaining, with
           --config.tasks="('arc_easy', 'arc_challenge', 'boolq', 'piqa', 'winogrande')"
           --sweep=trained: models that sweeps of configs/macdrop_sft.py trained, as they are and
           under top-3 zeroing (Tables 3, 4): --config.models="('runs/macdrop/*/model',)". The
           neurons are those of the model before its training, with --config.anew=True those that
           are massive now. A report of these needs the trainings, too:
           python scripts/report.py runs/attacks runs/macdrop --paper=massive_weights --out=reports
           --sweep=experts: top-3 zeroing in each expert of the massive layer of a mixture
Hardware:  one CPU or accelerator with the model's size in host memory twice. The model is loaded
           once; nothing but numbers is written.
Hours:     SmolLM2-135M, 40 windows of 512: about a minute a point on 2 cores.
Paper:     Table 1: five tasks (accuracy, acc_norm where there is one) without examples, perplexity
           in segments of 4,096 tokens. Figure 4: Llama-3-8B and others, k from 0 on;
           the text names 0, 1, 3, 5, 30, and 50 for Mixtral, of which only the massive expert is
           attacked.

The keys are those of configs/attack.py, configs/perplexity.py and configs/parts/tasks.py.
"""

import functools
import glob
import json
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from configs import attack
from configs.parts import in_memory
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.runs import CONFIG
from ffn_heterogeneity.launch.sweep import chain, point, product
from ffn_heterogeneity.surgery.adapt import folded
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.wording import naming

KIND = "in_memory"
KS = (1, 2, 3, 5, 10, 30, 50)


def get_config() -> ConfigDict:
    config = in_memory.get_config(attack.get_config())
    # Of the sweep "trained": models, or patterns of their directories; default: model.
    config.models = ()
    config.anew = False  # of "trained": find the neurons in the trained model, not the one before
    config.experts = 8  # of the sweep "experts": how many a layer has
    return config


def _name(path: str) -> str:
    return "-".join(path.rstrip("/").removesuffix("/model").split("/")[-2:]) or "model"


@functools.cache
def _massive(model: str, revision: str | None, layer: int | None, token: int | None) -> dict:
    """The settings that attack the three massive weights of that model."""
    with naming("config.anew=True needs no model before the training"):
        loaded = folded(load_model(model, revision=revision))
    found = massive_weights(loaded.config, loaded.params, layer, token)
    place = {"layer": found.layer} | ({} if found.expert is None else {"expert": found.expert})
    return place | {"neurons": tuple(found.indices[:3].tolist())}


def _before(path: str, config: ConfigDict) -> dict[str, Any]:
    """`_massive` of the model that the run in this directory started from.

    Without the run's config.json nothing is known of it: {}, as with `config.anew`.
    """
    run = epath.Path(path).parent / CONFIG
    if config.anew or not run.exists():
        return {}
    values = json.loads(run.read_text())
    before = (values.get("model"), values.get("revision"))
    return _massive(*before, config.layer, config.token) if before[0] else {}


def trained(config: ConfigDict):
    """Each model of `config.models` (default: the config's) whole and under top-3 zeroing.

    The paper does not say which neurons of an adapted model its Table 4 attacks [ours: `anew`].
    """
    paths: list[str] = []
    for pattern in config.models or (config.model,):
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not matches:
            raise ValueError(f"models={pattern!r} matches nothing")
        paths += matches
    rows = [
        point(_name(path), {"model": path} | _before(path, config)) for path in dict.fromkeys(paths)
    ]
    return chain(*(product(row, {"attack": ("zero",), "k": (0, 3)}) for row in rows))


def experts(config: ConfigDict):
    """Top-3 zeroing in each expert of the layer in turn (`config.experts` of them)."""
    return chain(NONE, product({"k": (3,), "expert": tuple(range(config.experts))}))


BOTH = {"attack": ("zero", "retain")}
NONE = point("none", {"attack": "zero", "k": 0})
ALL = point("attack=retain,k=0", {"attack": "retain", "k": 0})
SWEEPS = {
    "k": chain(NONE, ALL, product(BOTH, {"k": KS})),
    "trained": trained,
    "experts": experts,
    "table": chain(NONE, product(BOTH, {"k": (5,)})),
}
