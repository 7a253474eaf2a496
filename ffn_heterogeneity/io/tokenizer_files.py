"""Reading and writing of a directory's tokenizer with `transformers`, after checks within limits.

It is written so that transformers 4 and 5 tokenize texts as with the original.

A tokenizer.json is a kind of program: its normalizers can multiply text, and its patterns can match
forever. So a child process with limits (`io.child`) first reads it and encodes a sample of all
kinds of text, while this process imports `transformers`. A text made for the purpose can still
exceed the limits of a tokenizer that passes.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ffn_heterogeneity.io import child
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.read import open_regular, read_object
from ffn_heterogeneity.wording import first_line

# Files that are fetched from the hub and checked here.
FILES = (
    "tokenizer*",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
)
# Gemma's file of 33 MB takes one second and 300 MB.
SECONDS, BYTES, MAX_BYTES = 10.0, 768 << 20, 128 << 20
_KINDS = {"tokenizer_class": str, "auto_map": (dict, list), "added_tokens_decoder": dict}
_KINDS |= {"model_input_names": list}
_KINDS |= {"model_max_length": (int, float), "chat_template": (str, list, dict)}
_CONFIG, _NAMES = "tokenizer_config.json", "model_input_names"
# The generic class in transformers 5, which makes no token types by default, and in 4, which does.
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Special tokens that transformers' classes have by default, which old files do not name.
_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
_T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_ROBERTA = _T5 | {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>"}
_DEFAULTS = {"gpt2": _GPT2, "bert": _BERT, "t5": _T5}
_DEFAULTS["roberta"] = _ROBERTA | {"mask_token": "<mask>"}


def read_tokenizer(directory: str | os.PathLike) -> Any:
    """Read the directory's tokenizer (`transformers.PreTrainedTokenizerFast`); None if it has none.

    Its attribute `original_config` has its tokenizer_config.json, for `save_tokenizer`.
    `makes_types` is False if its `model_input_names` have no token types, or if they are absent and
    the class is transformers 5's generic one, which makes no token types by default.

    tokenizer.json is read by the `tokenizers` library, without PyTorch. A directory with only a
    SentencePiece or vocabulary file goes through transformers' converters (which import PyTorch).
    Code in the directory (`auto_map`) is never run, without asking.

    Raises:
      CheckpointError: a file that is not regular, or too large; settings of wrong types; a
        tokenizer that takes more than `SECONDS` or `BYTES`; files that transformers cannot read, or
        not without such code.
    """
    directory = Path(directory)
    fast = (directory / "tokenizer.json").is_file()
    others = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
    if not fast and not any((directory / name).is_file() for name in others):
        return None
    values = _settings(directory)
    if fast:
        if problem := _try(directory / "tokenizer.json"):
            raise CheckpointError(f"{directory / 'tokenizer.json'}{problem}")
        from transformers import PreTrainedTokenizerFast

        tokenizer = _read(directory, PreTrainedTokenizerFast, values, "fetch it again")
        return _with_defaults(tokenizer, directory, values)
    from transformers import AutoTokenizer

    way = "code in a model's directory is never run: save it as tokenizer.json where you trust it"
    return _read(directory, AutoTokenizer, values, way)


def _read(directory: Path, kind: Any, values: dict[str, Any], way: str) -> Any:
    try:
        tokenizer = kind.from_pretrained(directory, trust_remote_code=False)
        tokenizer.original_config = values
        names, generic = values.get(_NAMES), values.get("tokenizer_class") == _GENERIC[0]
        tokenizer.makes_types = "token_type_ids" in names if names else not generic
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library panics, which is no Exception
        raise CheckpointError(
            f"{directory}: the tokenizer cannot be read ({first_line(error)}): {way}"
        ) from None


def _with_defaults(tokenizer: Any, directory: Path, values: Mapping[str, Any]) -> Any:
    """Add the special tokens of the class that the files name, or of the model's."""
    path = directory / "config.json"
    stem = str(values.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if not stem and path.is_file():
        stem = str(read_object(path).get("model_type"))
    vocabulary = tokenizer.get_vocab()
    for name, token in _DEFAULTS.get(stem.lower(), {}).items():
        absent = name not in values and getattr(tokenizer, name) is None
        if absent and token in vocabulary:
            setattr(tokenizer, name, token)
    return tokenizer


def save_tokenizer(tokenizer: Any, directory: Path, types: bool) -> None:
    """Write the tokenizer with its original tokenizer_config.json, most importantly its class.

    Transformers 5 keeps few of the settings, and 4 cannot read some of those that 5 writes.

    Args:
      types: whether the model uses token types for pairs, for a tokenizer without a class.
    """
    try:
        tokenizer.save_pretrained(os.fspath(directory))
    except Exception as error:  # from the library's Rust code, e.g. a full disk
        raise CheckpointError(f"the tokenizer cannot be written: {first_line(error)}") from None
    path = directory / _CONFIG
    if not path.is_file():
        return
    made = {"tokenizer_class": _GENERIC[0], "clean_up_tokenization_spaces": False}  # in memory
    original = getattr(tokenizer, "original_config", made)
    # Without code, and without the content of chat_template.jinja.
    settings = {k: v for k, v in original.items() if k not in ("auto_map", "chat_template")}
    values = {k: v for k, v in read_object(path).items() if k != "auto_map"}
    for name in ("backend", "is_local", "local_files_only", "tokenizer_class"):
        values.pop(name, None)
    if "clean_up_tokenization_spaces" not in original:
        values.pop("clean_up_tokenization_spaces", None)
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
        settings.pop("extra_special_tokens", None)
    values = settings | values
    # (transformers 4's generic class names none itself; a decoder's copy is left as it was.)
    generic = values.get("tokenizer_class")
    if generic == _GENERIC[0] or (generic == _GENERIC[1] and types):
        names = ["input_ids", "attention_mask"]
        typed = types and getattr(tokenizer, "makes_types", True)
        names[1:1] = ["token_type_ids"] if typed else []
        values = {_NAMES: names} | values | {"tokenizer_class": _GENERIC[1]}
    path.write_text(json.dumps(values, indent=2) + "\n")


def _settings(directory: Path) -> dict[str, Any]:
    """Return the settings in tokenizer_config.json, {} if it does not exist.

    Raises:
      CheckpointError: this or another tokenizer file is too large, malformed, or has a wrong type.
    """
    by_file: dict[str, dict[str, Any]] = {}
    for path in sorted({path for pattern in FILES for path in directory.glob(pattern)}):
        if path.is_dir():  # a training folder
            continue
        with open_regular(path, CheckpointError) as file:
            if (size := file.seek(0, os.SEEK_END)) > MAX_BYTES:
                raise CheckpointError(f"{path}: {size:,} bytes; {MAX_BYTES:,} are read")
    for name in (_CONFIG, "special_tokens_map.json", "added_tokens.json"):
        path = directory / name
        if not path.is_file():
            continue
        values = by_file[name] = read_object(path)
        for key, kind in _KINDS.items():
            if not isinstance(values.get(key), (kind, type(None))):
                raise CheckpointError(f"{path}: {key}={values[key]!r:.60} is of a wrong type")
        if name == "added_tokens.json":
            continue
        groups = [values] if name == "special_tokens_map.json" else []
        named = ("extra_special_tokens", "model_specific_special_tokens")
        groups += [values[key] for key in named if isinstance(values.get(key), dict)]
        # Each becomes an attribute of the tokenizer: chat_template would replace the template.
        for token in (token for group in groups for token in group):
            if not re.fullmatch(r"\w+_tokens?", token):
                raise CheckpointError(f"{path}: a special token named {token!r:.60}, not *_token")
    return by_file.get(_CONFIG, {})


def _try(path: Path) -> str | None:
    """Describe why a tokenizer.json cannot be read or used within the limits; None if it can."""

    def meanwhile() -> None:
        from transformers import PreTrainedTokenizerFast  # noqa: F401  (seconds, the first time)

    reply = child.ask("tokenizer", os.fspath(path.absolute()), SECONDS, BYTES, meanwhile)
    if "runaway" in reply:
        return f" is stopped: it {reply['runaway']}"
    if "refused" in reply:
        return f": the tokenizer cannot be read ({reply['refused']}): fetch it again"
    return None
