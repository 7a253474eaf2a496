"""Label heads on the last layer in transformers' form: `...ForSequenceClassification`.

Transformers has no class for other poolings over depth. They are saved in structure/ next to a
plain model, and the model card shows PyTorch code that computes them (`torch_facts`).
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from ffn_heterogeneity.heads import ROOT
from ffn_heterogeneity.heads.classification import PROBLEMS
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.models.config import ConfigError, HeadConfig, ModelConfig
from ffn_heterogeneity.models.families import Family, Rule, family_by_name
from ffn_heterogeneity.models.families.rules import one_tensor
from ffn_heterogeneity.wording import check_choice

CLASS, NAME = "ForSequenceClassification", "classification"
# Upper bound for untrusted files.
_MOST_LABELS = 100_000


def is_published(config: ModelConfig, export: str = "auto") -> bool:
    """True if a model's head is written as a transformers class.

    Raises:
      CheckpointError: export="classifier", but the model has no such head.
    """
    head, written = config.head, family_by_name(config.family).classifier
    fits = head is not None and head.name == NAME and head.settings["pooling"] == "last"
    if fits and not written:
        if export == "classifier":
            raise CheckpointError(
                f"export='classifier': transformers has no {CLASS} of {config.family}; use auto"
            )
        return False
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


def as_class(config: ModelConfig, family: Family) -> ModelConfig:
    """Config of the class's model: without heads, and with a pooler iff the class reads one."""
    pooler = config.is_encoder and not family.dense
    return dataclasses.replace(config, head=None, lm_head=False, pooler=pooler)


def parts_of_class(
    config: ModelConfig, family: Family, tree: dict, head: dict
) -> tuple[ModelConfig, dict, dict]:
    """Return (`as_class`, unstacked tree, flat head leaves) with exactly the class's parts.

    The dense layer of a head on a BERT without a pooler becomes that pooler.
    """
    config = as_class(config, family)
    dense, pooler = f"{ROOT}/dense/", tree.get("pooler")
    tree = {name: subtree for name, subtree in tree.items() if name not in ("head", "pooler")}
    if config.pooler:
        moved = {path: leaf for path, leaf in head.items() if path.startswith(dense)}
        tree["pooler"] = pooler or {path.removeprefix(dense): x for path, x in moved.items()}
        head = {path: leaf for path, leaf in head.items() if path not in moved}
    return config, tree, head


def class_of(family: Family) -> str:
    """Name of the family's class."""
    stem = re.sub("(Model|ForCausalLM|ForConditionalGeneration)$", "", family.architecture)
    return f"{family.classifier_stem or stem}{CLASS}"


def files_of_class(
    config: ModelConfig, family: Family, head: HeadConfig
) -> tuple[list[Rule], dict[str, Any]]:
    """Return (the tensor rules of a classifier: the model's, prefixed, and the head's; the keys of
    config.json for the head).

    A decoder's class rejects batches without a padding id, and pools the rightmost token that is
    not padding. If the model has no padding id, eos is used, which no row contains.

    Args:
      config: from `as_class`.
    """
    prefixed = [
        dataclasses.replace(rule, names=tuple(f"{family.prefix}{name}" for name in rule.names))
        for rule in family.rules(config)
    ]
    labels = head.settings["labels"]
    problem = "single_label_classification" if labels else "regression"
    names = labels or [f"LABEL_{i}" for i in range(head.settings["outputs"])]
    return [*prefixed, *head_rules(family)], {
        "architectures": [class_of(family)],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": head.settings.get("problem") or problem,
        "pad_token_id": config.padding_id,
    }


def head_rules(family: Family) -> list[Rule]:
    """Rules of the head's tensors."""
    return [one_tensor(f"{ROOT}/{path}", name) for path, name in family.classifier.items()]


def is_class(values: Mapping[str, Any], family: Family, names: Collection[str]) -> bool:
    """True if config.json names such a class or, without any class, if the file has its tensors.

    Args:
      names: names of the file's tensors.
    """
    if architectures := values.get("architectures"):
        return any(str(name).endswith(CLASS) for name in architectures)
    tensors = {*family.classifier.values()}
    return bool(tensors) and tensors <= {*names}


def read_head(values: Mapping[str, Any]) -> HeadConfig:
    """Read the head that the config.json of a transformers classifier describes.

    As in transformers' losses, one output without a `problem_type` is a regression.

    Raises:
      ConfigError: invalid labels, or another `problem_type`.
    """
    problem = values.get("problem_type") or ""
    problem = "" if problem == "single_label_classification" else problem
    check_choice("problem_type", problem, PROBLEMS, ConfigError)
    names = values.get("id2label")
    try:
        names = names or {str(i): f"LABEL_{i}" for i in range(int(values.get("num_labels") or 2))}
        ordered = sorted(names.items(), key=lambda item: int(item[0]))
        count, last = len(ordered), int(ordered[-1][0])
    except (AttributeError, TypeError, ValueError, IndexError):
        raise ConfigError(f"id2label is {names!r:.80}: expected numbers and names") from None
    if last != count - 1 or count > _MOST_LABELS or not all(isinstance(x[1], str) for x in ordered):
        raise ConfigError(f"id2label is {names!r:.80}: expected numbers 0 to {count - 1} and names")
    problem = "regression" if count == 1 and not problem else problem
    labels = [name for _, name in ordered]
    settings = {"pooling": "last", "final_norm": "pooled", "outputs": count, "labels": labels}
    settings |= {"task": "", "fields": [], "max_length": 0, "problem": problem}
    return HeadConfig.of(NAME, settings)


def torch_facts(config: ModelConfig) -> dict[str, Any]:
    """Facts for the PyTorch code on the model card; {} if none is needed.

    It is needed for a head over depth, and for a decoder whose rows differ from its tokenizer's
    default.
    """
    head = config.head
    if head is None or head.name != NAME or head.settings["pooling"] == "scalar_mix":
        return {}
    if config.kind == "encoder_decoder":  # its class reads such rows, or there is none
        return {}
    pooling, norm = head.settings["pooling"], head.settings["final_norm"]
    if pooling == "last" and (config.is_encoder or not head.settings["task"]):
        return {}
    family, kind, submodule = family_by_name(config.family), "AutoModel", ""
    if pooling == "last":
        kind = f"AutoModel{CLASS}"
    elif not config.is_encoder:  # AutoModel of transformers 4 does not find Gemma 3's weights
        names = {rule.paths[0]: rule.names[0] for rule in family.rules(config)}
        kind, submodule = "AutoModelForCausalLM", "." + names["embed/embedding"].partition(".")[0]
    return {
        "kind": kind,
        "part": submodule,
        "pooling": pooling,
        "pair": len((head.settings["fields"] or [[""]])[0]) > 1,
        "encoder": config.is_encoder,
        "bos": config.bos_id is not None,
        # Transformers returns the last state after the norm.
        "raw": not config.is_encoder and norm != "hidden_states",
        "normed": norm == "pooled",
        "final_norm": family.torch_final_norm,
        "pooler": config.pooler and not family.dense,
    }
