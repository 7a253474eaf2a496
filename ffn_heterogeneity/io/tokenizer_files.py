"""A directory's tokenizer: its files checked, tried within bounds, then read by `transformers`; and
written so that transformers 4 and 5 make of a text what they make with the original.

A tokenizer.json is a program of a kind: normalisers that multiply, patterns that match for ever.
First it is read in a process with bounds (`io.child`), and a page of every kind of text encoded by
it, while this one imports `transformers`. A text may still be made for a tokenizer that passes.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from ffn_heterogeneity.io import child
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.read import open_regular, read_object
from ffn_heterogeneity.wording import first_line

# What the hub is asked for, and what is checked here.
FILES = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json")
FILES += ("vocab.json", "vocab.txt", "merges.txt")
# Gemma's 33 MB take a second and 300 MB.
SECONDS, BYTES, MAX_BYTES = 10.0, 768 << 20, 128 << 20
_KINDS = {"tokenizer_class": str, "auto_map": (dict, list), "added_tokens_decoder": dict}
_KINDS |= {"model_input_names": list}
_KINDS |= {"model_max_length": (int, float), "chat_template": (str, list, dict)}
_CONFIG, _NAMES = "tokenizer_config.json", "model_input_names"
# The generic class in transformers 5, which makes no token types by default, and in 4, which does.
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")


def read_tokenizer(directory: str | os.PathLike) -> Any:
    """The directory's tokenizer (`transformers.PreTrainedTokenizerFast`); None if it has none.

    `original_config` holds its tokenizer_config.json, for `save_tokenizer`; `makes_types` is False
    of one whose `model_input_names` have no token types, or that has none of these and transformers
    5's generic class, which makes no token types by default.
    tokenizer.json is read by the `tokenizers` library, without torch. A directory with only a
    SentencePiece or vocabulary file goes through transformers' converters (which import torch).
    Code that a directory brings along (`auto_map`) is never run, and nobody is asked whether to.

    Raises:
      CheckpointError: a file that is none, or too large; settings of wrong types; a tokenizer that
        takes more than `SECONDS` or `BYTES`; transformers cannot read the files, or not without
        such code.
    """
    directory = Path(directory)
    fast = (directory / "tokenizer.json").is_file()
    others = ("tokenizer.model", "vocab.json", "vocab.txt")
    if not fast and not any((directory / name).is_file() for name in others):
        return None
    values = _settings(directory)
    if fast:
        if problem := _try(directory / "tokenizer.json"):
            raise CheckpointError(f"{directory / 'tokenizer.json'}{problem}")
        from transformers import PreTrainedTokenizerFast

        return _read(directory, PreTrainedTokenizerFast, values, "fetch it again")
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


def save_tokenizer(tokenizer: Any, directory: Path, types: bool) -> None:
    """Writes the tokenizer with the settings of tokenizer_config.json that it was read with, its
    class above all: transformers 5 keeps few of them, and 4 cannot read some that it writes.

    Args:
      types: whether the model distinguishes the texts of a pair, for a tokenizer of no class.
    """
    try:
        tokenizer.save_pretrained(os.fspath(directory))
    except Exception as error:  # of its library's Rust: a full disk
        raise CheckpointError(f"the tokenizer cannot be written: {first_line(error)}") from None
    path = directory / _CONFIG
    if not path.is_file():
        return
    made = {"tokenizer_class": _GENERIC[0], "clean_up_tokenization_spaces": False}  # in memory
    original = getattr(tokenizer, "original_config", made)
    # Not code, and not what chat_template.jinja holds.
    kept = {k: v for k, v in original.items() if k not in ("auto_map", "chat_template")}
    values = {k: v for k, v in read_object(path).items() if k != "auto_map"}
    for name in ("backend", "is_local", "local_files_only", "tokenizer_class"):
        values.pop(name, None)
    if "clean_up_tokenization_spaces" not in original:
        values.pop("clean_up_tokenization_spaces", None)
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
        kept.pop("extra_special_tokens", None)
    values = kept | values
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
      CheckpointError: it, or a file beside it, is too large, malformed, or has a wrong type.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted({path for pattern in FILES for path in directory.glob(pattern)}):
        if path.is_dir():  # a folder of training
            continue
        with open_regular(path, CheckpointError) as file:
            if (size := file.seek(0, os.SEEK_END)) > MAX_BYTES:
                raise CheckpointError(f"{path}: {size:,} bytes; {MAX_BYTES:,} are read")
    for name in (_CONFIG, "special_tokens_map.json", "added_tokens.json"):
        path = directory / name
        if not path.is_file():
            continue
        values = found[name] = read_object(path)
        for key, kind in _KINDS.items():
            if not isinstance(values.get(key), (kind, type(None))):
                raise CheckpointError(f"{path}: {key}={values[key]!r:.60} is of a wrong type")
        if name == "added_tokens.json":
            continue
        groups = [values] if name == "special_tokens_map.json" else []
        named = ("extra_special_tokens", "model_specific_special_tokens")
        groups += [values[key] for key in named if isinstance(values.get(key), dict)]
        # Each becomes an attribute of the tokenizer: one named chat_template would be the template.
        for token in (token for group in groups for token in group):
            if not re.fullmatch(r"\w+_tokens?", token):
                raise CheckpointError(f"{path}: a special token named {token!r:.60}, not *_token")
    return found.get(_CONFIG, {})


def _try(path: Path) -> str | None:
    """Describe why a tokenizer.json cannot be read, or used, within the bounds; None if it can."""

    def meanwhile() -> None:
        from transformers import PreTrainedTokenizerFast  # noqa: F401  (seconds, the first time)

    reply = child.ask("tokenizer", os.fspath(path.absolute()), SECONDS, BYTES, meanwhile)
    if "runaway" in reply:
        return f" is stopped: it {reply['runaway']}"
    if "refused" in reply:
        return f": the tokenizer cannot be read ({reply['refused']}): fetch it again"
    return None
