"""Conversion of a tokenizer to a GGUF file's fields: the inverse of tokenizer.py."""

import json
import re
from typing import Any

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf.tokenizer import _PRE_TOKENIZERS, _pre_tokenizer, tokenizer_from
from ffn_heterogeneity.models.config import ModelConfig

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# What normalizers, prefixes and pre-tokenizers change.
_SAMPLES = (
    "a b",
    " a",
    "",
    "Hello WORLD  it's 12345;\n\n x",
    "e\u0301 \u00e9 \ufb01 \u5b57 \U0001f600",
)


def tokenizer_fields(tokenizer: Any, config: ModelConfig) -> dict[str, Any]:
    """Return the GGUF fields of a tokenizer.

    They are the tokens with their types, merges (byte-level BPE) or scores (SentencePiece), special
    ids and the chat template.

    Args:
      tokenizer: a `transformers.PreTrainedTokenizerFast`.

    Raises:
      CheckpointError: another kind of tokenizer, a pre-tokenizer that llama.cpp has no name for, or
        more tokens than the model's vocabulary.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    if model.get("type") != "BPE":
        raise _refused(f"it is {model.get('type')}, not BPE")
    ids = model["vocab"] | {token["content"]: token["id"] for token in state["added_tokens"]}
    # Spare special tokens, which no text has (an image's): the model has no row for them.
    spare = {token["content"] for token in state["added_tokens"] if token["special"]}
    spare -= {tokenizer.bos_token, tokenizer.eos_token}
    ids = {x: i for x, i in ids.items() if i < config.vocab_size or x not in spare}
    if max(ids.values()) >= config.vocab_size:
        raise _refused(f"id {max(ids.values())} is beyond the vocabulary of {config.vocab_size}")
    sentencepiece = bool(model.get("byte_fallback"))
    # Ids without a token (padded vocabularies) get llama.cpp's placeholder names.
    tokens = [f"[PAD{i}]" for i in range(config.vocab_size)]
    types = [_UNUSED] * config.vocab_size
    for token, i in ids.items():
        tokens[i] = token
        byte = sentencepiece and token.startswith("<0x") and len(token) == 6
        types[i] = _BYTE if byte else _NORMAL
    for token in state["added_tokens"]:
        if token["content"] not in ids:
            continue
        types[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    if tokenizer.unk_token_id is not None and sentencepiece:
        types[tokenizer.unk_token_id] = _UNKNOWN
    # Older files join the two by a space.
    pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    kind = _scores(tokens, pairs, state) if sentencepiece else _merges(pairs, state)
    fields = {"tokens": tokens, "token_type": types, **kind, **_special(tokenizer)}
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    if isinstance(tokenizer.chat_template, str):
        fields["tokenizer.chat_template"] = tokenizer.chat_template
    made = tokenizer_from("the file", fields)
    for text in _SAMPLES:
        one, other = (x.encode(text, add_special_tokens=False) for x in (tokenizer, made))
        if one != other:
            raise _refused(f"{text!r} is {one}, and would be {other}")
    return fields


def _refused(why: str) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer has no form in GGUF ({why}): write the model without it (tokenizer=None)"
    )


def _merges(pairs: list[tuple[str, ...]], state: dict) -> dict[str, Any]:
    """Fields of byte-level BPE; llama.cpp identifies the pre-tokenizer by name."""
    there = _plain(state["pre_tokenizer"])
    steps = {name: json.loads(_pre_tokenizer(name).__getstate__()) for name in _PRE_TOKENIZERS}
    names = [name for name, node in steps.items() if _plain(node) == there]
    if not names:
        raise _refused(f"its pre-tokenizer is none of {', '.join(_PRE_TOKENIZERS)}")
    merges = [" ".join(pair) for pair in pairs]
    return {"model": "gpt2", "pre": names[0], **({"merges": merges} if merges else {})}


def _plain(node: Any) -> list[dict]:
    """Steps of a pre-tokenizer, without settings that only change offsets."""
    steps = node["pretokenizers"] if node and node.get("type") == "Sequence" else [node or {}]
    return [
        {k: v for k, v in step.items() if k not in ("trim_offsets", "invert")} for step in steps
    ]


def _scores(tokens: list[str], pairs: list[tuple[str, ...]], state: dict) -> dict[str, Any]:
    """Fields of SentencePiece BPE: earlier merges get higher scores, as in SentencePiece."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    prefix = "Prepend" in json.dumps(state["normalizer"]) or (
        re.search('"prepend_scheme": "(first|always)"', json.dumps(state["pre_tokenizer"]))
        is not None
    )
    return {
        "model": "llama",
        "pre": "default",
        "scores": [-float(ranks.get(token, len(pairs))) for token in tokens],
        "add_space_prefix": prefix,
    }


def _special(tokenizer: Any) -> dict[str, Any]:
    """Special ids, and whether texts encoded with special tokens begin or end with them."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {theirs: getattr(tokenizer, f"{ours}_token_id") for ours, theirs in names.items()}
    fields = {f"{name}_token_id": i for name, i in ids.items() if i is not None}
    encoded = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    more = len(encoded) - len(plain)
    fields["add_bos_token"] = more > 0 and encoded[0] == ids["bos"]
    fields["add_eos_token"] = more > 0 and encoded[-1] == ids["eos"]
    return fields
