"""Train, compress and analyze the feed-forward layers of language models in JAX.

    import ffn_heterogeneity as fh

    model = fh.load_model("smollm2_135m")
    fh.perplexity(model, text), fh.generate(model, "Once upon a time")
    smaller, report = fh.prune(model, criterion="entropy", ratio=0.25)
    fh.save_model(smaller, "smaller")

Functions take the model as their first argument:

- read and write: `load_model`, `save_model`, `push` (to the Hugging Face hub);
- use: `generate`, `classify`, `hidden_states`; `model(ids)` returns logits;
- measure: `perplexity`, `analyze`;
- change, to (new model, report): `prune`, `fuse`, `attack`, `lora`, `fold`; with experts:
  `experts` (removes some), `merge_experts`, `partition`, `upcycle`;
- train: `fit`; run any command of `ffnh`: `run`; read results: `results`, `curves`.

`fh.train`, `fh.evaluate` and `fh.report` are packages of modules, not functions. docs/python.md
shows more. Everything is imported when it is first used.
"""

import functools
import importlib
from typing import Any

__version__ = "0.2.0"
_FACE = ("load_model", "save_model", "generate", "perplexity", "classify", "hidden_states")
_FACE += ("prune", "fuse", "attack", "lora", "fold", "fit", "analyze", "push", "run", "results")
_FACE += ("curves", "ffn", "experts", "merge_experts", "partition", "upcycle")
_ROOMS = ("adapters", "bench", "data", "evaluate", "io", "losses", "models", "parallel", "probes")
_ROOMS += ("report", "surgery", "train")
__all__ = ["__version__", *_FACE, *_ROOMS]
# {our way: names of it in other libraries, or names that newcomers try}.
_NAMES = {"fh.load_model": "load Model from_pretrained", 'fh.surgery.SURGERIES["nf4"]': "quantize"}
_NAMES |= {"fh.load_model, then fh.generate": "pipeline", "not needed": "to cuda cpu device eval"}
_NAMES |= {"fh.load_model(..., dtype=...)": "half float", "fh.io.load.load_config": "AutoConfig"}
_NAMES |= {"model.tokenizer": "AutoTokenizer decode batch_decode", "fh.classify": "predict"}
_NAMES |= {"fh.push": "push_to_hub", "fh.lora": "LoraConfig get_peft_model add_adapter set_adapter"}
_NAMES |= {"fh.save_model": "save save_pretrained export", "fh.models.causal_lm.forward": "forward"}
_NAMES |= {"fh.fit": "train_model finetune fine_tune Trainer TrainingArguments distill_model"}
_NAMES |= {"fh.prune or fh.fuse": "compress", "fh.models.causal_lm.logits": "logits"}
_NAMES |= {"fh.fuse": "cluster", 'fh.analyze(model, "displacement")': "analyze_layer_importance"}
_NAMES |= {"print(model)": "summary", "model.params": "parameters named_parameters state_dict"}
_NAMES |= {"fh.prune": "prune_model", 'fh.surgery.SURGERIES["drop_layers"]': "prune_model_depth"}
_NAMES |= {"fh.fold": "merge merge_and_unload merge_adapter", "fh.generate(..., chat=True)": "chat"}
_NAMES |= {"fh.perplexity": "ppl loss", "fh.generate(..., seed=...)": "GenerationConfig set_seed"}
_NAMES |= {'fh.surgery.SURGERIES["dora"]': "dora", "fh.models.families.PRESETS": "list_models"}
_NAMES |= {"fh.hidden_states": "embed encode", 'fh.analyze(model, "massive")': "massive_weights"}
_NAMES |= {"fh.models.leaves.count_parameters": "num_parameters print_trainable_parameters"}
GUESSES = {name: way for way, names in _NAMES.items() for name in names.split()}
# Methods of models in other libraries. (`fh.train` and `fh.evaluate` are packages.)
METHODS = {name: f"fh.{name}" for name in _FACE} | {"train": "fh.fit", "evaluate": "fh.perplexity"}
# {function: {argument in other libraries: our way}}. (Surgeries list their settings.)
_GENERATE = {"max_length": "give max_new_tokens, which does not count the prompt"}
_GENERATE |= {"num_return_sequences": "repeat the prompt", "input_ids": "give texts (decode ids)"}
_GENERATE |= {"stop_strings": "give stop", "eos_token_id": "give eos, a tuple of ids"}
_GENERATE |= dict.fromkeys(("stream", "streamer"), "leave it out: whole texts are returned")
_SAMPLED = ("top_k", "min_p", "num_beams", "penalty_alpha", "repetition_penalty")
_GENERATE |= dict.fromkeys(_SAMPLED, "give top_p or temperature")
_LOAD = {"torch_dtype": "give dtype", "load_in_4bit": 'call fh.surgery.SURGERIES["nf4"]'}
_LOAD |= {"device_map": "leave it out: functions run on JAX's default device"}
_ARGUMENTS = {"generate": _GENERATE, "load_model": _LOAD}
_ARGUMENTS["perplexity"] = dict.fromkeys(("stride", "max_length"), "give window")
_ARGUMENTS["prune"] = {"return_stats": "leave it out: the second value returned is the report"}


def __getattr__(name: str) -> Any:
    if name in _FACE:
        function = getattr(importlib.import_module(f"{__name__}.api"), name)
        return globals().setdefault(name, _named(function, _ARGUMENTS.get(name, {})))
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    way = GUESSES.get(name, "fh.load_model" if name.startswith(("Auto", "Peft")) else "")
    way = f"that is {way}" if way else f"there are {__all__}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {way}")


def _named(function: Any, ways: dict[str, str]) -> Any:
    """Wrap a function: its TypeError for an argument of another library names our way."""

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        for name in named.keys() & ways.keys():
            got = f"{function.__name__}() has no argument {name!r}: got {named[name]!r:.40}"
            raise TypeError(f"{got}; {ways[name]}")
        return function(*values, **named)

    call.__module__ = __name__  # so that pickle and help find it
    return call


def __dir__() -> list[str]:
    return __all__
