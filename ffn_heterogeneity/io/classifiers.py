"""Heads of labels on the last layer, as transformers has them: `...ForSequenceClassification`.

Other poolings over depth have no class there. They are kept in structure/, beside a plain model,
and the model card prints the lines of torch that compute them (`torch_lines`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.heads import ROOT
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.models.config import ConfigError, HeadConfig, ModelConfig
from ffn_heterogeneity.models.families import Rule, family_by_name
from ffn_heterogeneity.models.families.rules import one_tensor

CLASS, NAME = "ForSequenceClassification", "classification"
# A file's word is not enough to build more.
_MOST_LABELS = 100_000


def is_published(config: ModelConfig, export: str = "auto") -> bool:
    """True where a model's head is written as transformers has it.

    Raises:
      CheckpointError: that is asked for (export="classifier"), and it has no such head.
    """
    head = config.head
    fits = head is not None and head.name == NAME and head.settings["pooling"] == "last"
    if export == "classifier" and not fits:
        what = "no head" if head is None else f"the head {head.name!r}"
        if head is not None and head.name == NAME:
            what = f"pooling={head.settings['pooling']!r}"
        raise CheckpointError(
            f"export='classifier': the model has {what}; {CLASS} of transformers reads the last "
            "layer alone (pooling='last'): use export='auto', and the lines of torch that the "
            "model card then has"
        )
    return fits


def without_lm_head(config: ModelConfig) -> ModelConfig:
    """The classifier's config without its head: a language model's head is none of its parts."""
    return dataclasses.replace(config, head=None, lm_head=False)


def class_of(config: ModelConfig) -> str:
    """The class's name."""
    family = family_by_name(config.family)
    stem = family.architecture.removesuffix("Model").removesuffix("ForCausalLM")
    return f"{family.classifier_stem or stem}{CLASS}"


def rules_of(config: ModelConfig) -> list[Rule]:
    """The rules of a classifier's tensors: the model's, behind their prefix, and the head's.

    Args:
      config: without the head, as `without_lm_head` gives it.
    """
    family = family_by_name(config.family)
    prefixed = [
        dataclasses.replace(rule, names=tuple(f"{family.prefix}{name}" for name in rule.names))
        for rule in family.rules(config)
    ]
    return [*prefixed, *head_rules(config)]


def head_rules(config: ModelConfig) -> list[Rule]:
    """The rules of the head's tensors."""
    tensors = family_by_name(config.family).classifier
    return [one_tensor(f"{ROOT}/{path}", name) for path, name in tensors.items()]


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{leaf: shape} of the head that the config speaks of."""
    assert config.head is not None
    outputs, size = config.head.settings["outputs"], config.d_model
    shapes = {"out/kernel": (size, outputs), "out/bias": (outputs,)}
    shapes |= {"dense/kernel": (size, size), "dense/bias": (size,)}
    return {f"{ROOT}/{path}": shapes[path] for path in family_by_name(config.family).classifier}


def values_of(config: ModelConfig, head: HeadConfig) -> dict[str, Any]:
    """The keys of config.json that speak of it.

    A decoder's class refuses batches without a padding id, and pools the rightmost token that is
    none: where the model has no such id it is the end of a text, which no row holds.
    """
    labels = head.settings["labels"]
    names = labels or [f"LABEL_{i}" for i in range(head.settings["outputs"])]
    return {
        "architectures": [class_of(config)],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": "single_label_classification" if labels else "regression",
        "pad_token_id": config.padding_id,
    }


def is_class(values: Mapping[str, Any]) -> bool:
    """True where config.json is of such a class."""
    return any(str(name).endswith(CLASS) for name in values.get("architectures") or [])


def read_head(values: Mapping[str, Any]) -> HeadConfig | None:
    """The head that somebody's config.json speaks of; None: the model has no such class.

    Raises:
      ConfigError: labels that are none.
    """
    if not is_class(values):
        return None
    names = values.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    try:
        ordered = sorted(names.items(), key=lambda item: int(item[0]))
        count, last = len(ordered), int(ordered[-1][0])
    except (AttributeError, TypeError, ValueError, IndexError):
        raise ConfigError(f"id2label is {names!r:.80}: numbers and names are needed") from None
    if last != count - 1 or count > _MOST_LABELS or not all(isinstance(x[1], str) for x in ordered):
        raise ConfigError(f"id2label is {names!r:.80}: the numbers 0 to {count - 1}, and names")
    regression = count == 1 or values.get("problem_type") == "regression"
    labels = [] if regression else [name for _, name in ordered]
    settings = {"pooling": "last", "final_norm": "pooled", "outputs": count, "labels": labels}
    return HeadConfig.of(NAME, settings | {"task": "", "fields": [], "max_length": 0})


def torch_lines(config: ModelConfig, directory: str) -> list[str]:
    """Lines of torch that give a depth-wise head's outputs; [] where none are needed."""
    head = config.head
    if head is None or head.name != NAME or head.settings["pooling"] in ("last", "scalar_mix"):
        return []
    pooling, norm = head.settings["pooling"], head.settings["final_norm"]
    place = "0" if config.is_encoder else "rows['attention_mask'].sum(1) - 1"
    weights = "torch.softmax(head['lambda'], 0)" if pooling == "p32" else "1 / len(states)"
    final = family_by_name(config.family).torch_final_norm
    raw = not config.is_encoder and norm != "hidden_states"
    read = "[first], [second]" if len((head.settings["fields"] or [[""]])[0]) > 1 else "[first]"
    lines = [
        "import torch",
        "from safetensors.torch import load_file",
        "from transformers import AutoModel, AutoTokenizer",
        f"model = AutoModel.from_pretrained({directory!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({directory!r})",
        f"head = load_file({directory + '/structure/model.safetensors'!r})",
        "head = {k[10:]: v for k, v in head.items() if k.startswith('task_head/')}",
    ]
    if config.is_encoder:
        lines.append(f"rows = tokenizer({read}, padding=True, return_tensors='pt')")
    else:
        joined = "first + '\\n' + second" if "second" in read else "first"
        bos = "tokenizer.bos_token + " if config.bos_id is not None else ""
        lines.append(
            f"rows = tokenizer([{bos}{joined}], add_special_tokens=False, return_tensors='pt')"
        )
    if raw:  # the library hands the last state out behind the norm
        lines += ["last = []", f"{final}.register_forward_pre_hook(lambda m, x: last.append(x[0]))"]
    lines.append("states = model(**rows, output_hidden_states=True).hidden_states[1:]")
    if raw:
        lines.append("states = (*states[:-1], last[0])")
    lines += [
        f"states = torch.stack([s[range(len(s)), {place}] for s in states])",
        f"pooled = (states * ({weights}{'[:, None, None]' if pooling == 'p32' else ''})).sum(0)",
    ]
    if raw and norm == "pooled":
        lines.append(f"pooled = {final}(pooled)")
    if config.pooler:
        lines.append("pooled = torch.tanh(model.pooler.dense(pooled))")
    elif config.is_encoder:
        lines.append("pooled = torch.tanh(pooled @ head['dense/kernel'] + head['dense/bias'])")
    bias = " + head['out/bias']" if config.is_encoder else ""
    return [*lines, f"logits = pooled @ head['out/kernel']{bias}"]
