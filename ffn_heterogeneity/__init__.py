"""Train, reshape and understand the feed-forward layers of language models, in JAX.

    import ffn_heterogeneity as fh

    model = fh.load_model("smollm2_135m")
    fh.perplexity(model, text), fh.generate(model, "Once upon a time")
    smaller, report = fh.prune(model, criterion="entropy", ratio=0.25)
    fh.save_model(smaller, "smaller")

docs/python.md shows more. Everything is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"
_FACE = (
    "load_model",
    "save_model",
    "generate",
    "perplexity",
    "classify",
    "hidden_states",
    "prune",
    "fuse",
    "attack",
    "lora",
    "fold",
    "fit",
    "analyze",
    "push",
    "run",
    "results",
    "curves",
)
_ROOMS = (
    "adapters",
    "bench",
    "data",
    "evaluate",
    "io",
    "losses",
    "models",
    "parallel",
    "probes",
    "report",
    "surgery",
    "train",
)
__all__ = ["__version__", *_FACE, *_ROOMS]
# What others call it, and what it is here: of names that newcomers try.
GUESSES = {
    "load": "fh.load_model",
    "Model": "fh.load_model",
    "AutoModelForCausalLM": "fh.load_model",
    "list_models": "fh.models.families.PRESETS",
    "num_parameters": "fh.models.shapes.count_parameters(model.config)",
    "summary": "print(model)",
    "logits": "fh.models.causal_lm.logits",
    "forward": "fh.models.causal_lm.forward",
    "from_pretrained": "fh.load_model",
    "save": "fh.save_model",
    "save_pretrained": "fh.save_model",
    "export": "fh.save_model",
    "push_to_hub": "fh.push",
    "train_model": "fh.fit",
    "finetune": "fh.fit",
    "fine_tune": "fh.fit",
    "compress": "fh.prune or fh.fuse",
    "cluster": "fh.fuse",
    "merge": "fh.fold",
    "merge_and_unload": "fh.fold",
    "dora": 'fh.surgery.SURGERIES["dora"]',
    "quantize": 'fh.surgery.SURGERIES["nf4"]',
    "ppl": "fh.perplexity",
    "loss": "fh.perplexity",
    "predict": "fh.classify",
    "embed": "fh.hidden_states",
    "encode": "fh.hidden_states",
    "chat": "fh.generate(..., chat=True)",
    "massive_weights": 'fh.analyze(model, "massive")',
}


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"{__name__}.api"), name)
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: "
        + (f"that is {GUESSES[name]}" if name in GUESSES else f"there are {__all__}")
    )


def __dir__() -> list[str]:
    return __all__
