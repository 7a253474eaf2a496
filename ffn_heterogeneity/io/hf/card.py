"""Model cards (README.md) of saved directories, and their upload to the hub."""

import collections
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.fetch import SOURCES, models_directory
from ffn_heterogeneity.io.files import plain, reject_bucket
from ffn_heterogeneity.io.hf import peft
from ffn_heterogeneity.io.hf.classifiers import torch_facts
from ffn_heterogeneity.io.hf.export import loads_in, transformers_class
from ffn_heterogeneity.io.read import read_text
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.io.safetensors import is_run
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import PRESETS
from ffn_heterogeneity.models.leaves import parameters_text
from ffn_heterogeneity.wording import first_line, some

CARD = "README.md"
_LICENCES = {"smollm2": "apache-2.0", "gemma": "gemma", "minilm": "apache-2.0"}
_LICENCES |= {"qwen2.5-coder-0.5b": "apache-2.0"}
# Class of transformers -> the hub's name (pipeline tag) for the task.
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModel": "feature-extraction",
}


def write_card(
    directory: str | os.PathLike,
    base: str,
    method: str,
    facts: Mapping[str, Any],
    config: ModelConfig | None = None,
    place: str = "",
) -> str:
    """Write the model card `<directory>/README.md`.

    It lists the base model, the method, which programs load it, a task head's labels and PyTorch
    code, and every number of `facts` to three digits; the main result is also in the metadata that
    the hub displays. Of local paths only the last part appears, because a card is public.

    Args:
      base: what the model was made from: a path, a hub id or a preset.
      method: one line.
      facts: content of results.json; lists and texts are omitted, nested numbers get "a/b" names.
      config: the model's config, for its head.
      place: <owner>/<name> of the model on the hub.

    Returns:
      `export.loads_in` of the directory.
    """
    from huggingface_hub import ModelCard, ModelCardData

    loader, loads = transformers_class(directory), loads_in(directory)
    facts = plain(facts)  # "inf" and "nan" are texts
    flat = {key.replace(".", "/"): value for key, value in flatten_config(facts).items()}
    licence, name, head = licence_of(base), public_text(base), config and config.head
    measured = _measured(facts)
    data = ModelCardData(
        library_name="transformers" if loader else "ffn_heterogeneity",
        license=licence or "other",
        pipeline_tag="text-classification" if head else _TASKS.get(loader),
        base_model=hub_of(base) or None,
        model_name=(name or "model") if measured else None,
        eval_results=measured,
    )
    protocol = {key: public_text(value) for key, value in facts.get("protocol", {}).items()}
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md")),
        name=name,
        method=method,
        widths=_widths(facts),
        sizes=parameters_text(config) if config and any(x.experts for x in config.layers) else "",
        head=head,
        labels=some(head.settings.get("labels") or (), 20) if head else "",
        protocol=", ".join(f"{key} {value}" for key, value in protocol.items()),
        before=_digits(facts.get("perplexity_before")),
        after=_digits(facts.get("perplexity_after")),
        licence=licence,
        loads_in=loads,
        place=place,
        loader=loader,
        torch=torch_facts(config) if config else {},
        numbers={k: _digits(x) for k, x in flat.items() if type(x) in (int, float)},
    )
    (epath.Path(directory) / CARD).write_text(f"{card}\n")
    return loads


def _digits(value: Any) -> str:
    """Format a number to three digits (integers and large numbers without decimals), or a text."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _measured(facts: Mapping[str, Any]) -> list | None:
    """Result for the hub's metadata: perplexity, or the metric that selected a task's checkpoint.

    None if there is no finite one.
    """
    from huggingface_hub import EvalResult

    if "protocol" in facts:
        metric, value, data = "perplexity", facts["perplexity_after"], facts["protocol"]["text"]
        kind = "text-generation"
    elif "task" in facts and facts.get("best"):
        metric, data, kind = facts["best"]["metric"], facts["task"], "text-classification"
        exported = (row for row in facts["history"] if row["step"] == facts["exported_step"])
        value = next(exported, {}).get(metric)
    else:
        return None
    if not isinstance(value, (int, float)):
        return None
    data = str(public_text(data))
    return [EvalResult(kind, data, data, metric.rpartition("/")[2], float(_digits(value)))]


def hub_of(base: str) -> str:
    """Hub id of a base model: itself, or that of a preset or a fetched model; "" if unknown."""
    for name, source in SOURCES.items():
        path = Path(base)
        fetched = path.suffix == ".gguf" or path.parent.absolute() == models_directory().absolute()
        if base == name or (path.name == source.target and fetched):
            return source.hub
    return PRESETS[base][1] if base in PRESETS else base if _is_hub_id(base) else ""


def compared(before: float, after: float, **protocol: Any) -> dict[str, Any]:
    """Facts for `results.json` and the card: perplexity before and after.

    Args:
      protocol: how the numbers were measured: text, window, windows, tokens, dtype ...
    """
    return {"perplexity_before": before, "perplexity_after": after, "protocol": protocol}


def published(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with every text reduced to what may be published."""
    return {key: public_text(value) for key, value in facts.items()}


def public_text(value: Any) -> Any:
    """Last part of a path, since a user's directories are private; a hub id is unchanged."""
    if not isinstance(value, str) or _is_hub_id(value):
        return value
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1]


def _is_hub_id(text: str) -> bool:
    return re.fullmatch(r"[\w-]+/[\w.-]+", text) is not None and not Path(text).exists()


def _widths(facts: Mapping[str, Any]) -> str:
    """Describe the widths after a removal: "15 layers of 1,536, 15 of 1,152"."""
    widths = collections.Counter(facts.get("ffn_widths_after", ()))
    text = ", ".join(f"{count:,} of {width:,}" for width, count in widths.items())
    return text.replace(" of", " layers of", 1)


def licence_of(base: str) -> str:
    """License of the base as its card states it, or of a model that we know; "" if unknown."""
    card = Path(base) / CARD
    if card.is_file() and (matched := re.search(r"^license: *(\S+)", read_text(card), re.M)):
        return matched[1] if matched[1] != "other" else ""
    name = Path(base).name.lower()
    return next((licence for key, licence in _LICENCES.items() if name.startswith(key)), "")


def push_directory(directory: str | os.PathLike, repository: str, *, private: bool = True) -> str:
    """Upload a model directory to the Hugging Face hub; return its address there.

    The repository is created if missing. The token is that of `hf auth login`.

    Args:
      repository: "owner/name".

    Raises:
      CheckpointError: no such directory, no valid name, no network, not logged in, not allowed.
    """
    import huggingface_hub

    reject_bucket(directory)
    directory = Path(directory).expanduser()
    if not any((directory / name).is_file() for name in ("config.json", peft.CONFIG)):
        raise CheckpointError(f"{directory} holds no model: give a directory with config.json")
    if is_run(directory):
        raise CheckpointError(f"{directory} is a work directory: push {directory / 'model'}")
    check_repository(repository)
    try:
        api = huggingface_hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        if private and api.repo_info(repository).private is False:
            raise ValueError("it exists and is public: push with private=False, or to another")
        return str(api.upload_folder(repo_id=repository, folder_path=directory))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot push {directory} to {repository!r} ({type(error).__name__}: "
            f"{first_line(error)}): check the name, the network and `hf auth login`"
        ) from None


def check_repository(repository: str, output: str = "") -> None:
    """Reject an invalid repository name, or a file to push, before anything is computed."""
    if output.endswith(".gguf"):
        raise CheckpointError(f"push: {output} is a file: write a directory to push it")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repository):
        raise CheckpointError(f"push={repository!r}: write <owner>/<name> of the Hugging Face hub")
