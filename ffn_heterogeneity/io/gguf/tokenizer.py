"""Tokenizer of a GGUF file, rebuilt with the `tokenizers` library (without PyTorch).

Two kinds exist for our families: byte-level BPE (tokenizer.ggml.model "gpt2"), whose pre-tokenizer
is named by tokenizer.ggml.pre, and SentencePiece BPE ("llama"), whose merges follow the scores.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf.file import GGUFFile, open_gguf
from ffn_heterogeneity.wording import first_line

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_LONGEST = 1_000  # characters of a token
_SPACE = "\u2581"  # SentencePiece's visible space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REGEX_LLAMA3 = _CONTRACTIONS + r"\p{N}{1,3}" + _REST
_REGEX_QWEN2 = _CONTRACTIONS + r"\p{N}" + _REST
# tokenizer.ggml.pre -> (split regex or None for GPT-2's own, digits split one by one)
_PRE_TOKENIZERS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, False),
    "olmo": (None, False),
    "smollm": (None, True),
    "starcoder": (None, True),
    "refact": (None, True),
    "command-r": (None, True),
    "llama-bpe": (_REGEX_LLAMA3, False),
    "qwen2": (_REGEX_QWEN2, False),
}


def read_tokenizer(path: str | os.PathLike | GGUFFile) -> Any:
    """Return the tokenizer as `transformers.PreTrainedTokenizerFast`, chat template included.

    Raises:
      CheckpointError: damaged file, no tokenizer inside, or an unsupported kind.
    """
    file = path if isinstance(path, GGUFFile) else open_gguf(path)
    return tokenizer_from(file.path, file.fields)


def tokenizer_from(path: str, fields: dict[str, Any]) -> Any:
    """Return the tokenizer of the fields; as `read_tokenizer`, whose errors name `path`."""
    given = _given(path, fields)
    try:
        return _build(path, fields, given.get)
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library panics, which is no Exception
        raise CheckpointError(
            f"{path}: its fields do not form a tokenizer ({first_line(error)}): fetch it again"
        ) from None


def _build(path: str, fields: dict[str, Any], get: Callable) -> Any:
    tokens, kind = get("tokens"), get("model")
    types = get("token_type") or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        pre = get("pre", "gpt-2")
        if pre not in _PRE_TOKENIZERS:
            raise CheckpointError(
                f"{path}: pre-tokenizer tokenizer.ggml.pre={pre!r} is not known: "
                f"{', '.join(_PRE_TOKENIZERS)}; load the model from its Hugging Face directory"
            )
        tokenizer = _byte_level(tokens, types, get("merges", []), pre)
    elif kind == "llama":
        scores = get("scores")
        if scores is None:
            raise CheckpointError(f"{path}: a SentencePiece tokenizer needs tokenizer.ggml.scores")
        unknown = tokens[get("unknown_token_id", 0)]
        tokenizer = _sentencepiece(tokens, types, scores, unknown, get("add_space_prefix", True))
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model={kind!r} is not known: gpt2 (byte-level BPE), llama "
            "(SentencePiece)"
        )
    special = _special_tokens(tokens, get)
    _add_template(tokenizer, tokens, get, kind)
    return _wrap(tokenizer, special, fields, str(path))


# Types of the fields that are read: of list entries, and of single values.
_LISTS = {"tokens": str, "merges": str, "token_type": int, "scores": float}
_VALUES = {"model": str, "pre": str, "add_space_prefix": bool, "add_bos_token": bool}
_VALUES |= {"add_eos_token": bool}
_VALUES |= {f"{name}_token_id": int for name in ("bos", "eos", "unknown", "padding")}


def _given(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields tokenizer.ggml.<name> that the file has, by name.

    Raises:
      CheckpointError: no tokens, a field of the wrong type, a list whose length differs from the
        vocabulary's, or an id outside the vocabulary.
    """
    place = "tokenizer.ggml."
    names = [name for name in (*_LISTS, *_VALUES) if fields.get(f"{place}{name}") is not None]
    given = {name: fields[f"{place}{name}"] for name in names}
    if "tokens" not in given:
        raise CheckpointError(f"{path} holds no tokenizer (tokenizer.ggml.tokens)")
    tokens, template = given["tokens"], fields.get("tokenizer.chat_template")
    for name, value in given.items():
        where, kind = f"{path}: {place}{name}", _LISTS.get(name) or _VALUES[name]
        if name in _LISTS:
            if not isinstance(value, list) or {*map(type, value)} - {kind}:
                raise CheckpointError(f"{where} is no list of {kind.__name__}")
            if name != "merges" and len(value) != len(tokens):
                raise CheckpointError(f"{where} has {len(value)} entries for {len(tokens)} tokens")
        elif type(value) is not kind:
            raise CheckpointError(f"{where}={value!r:.60} is no {kind.__name__}")
        elif kind is int and not 0 <= value < len(tokens):
            raise CheckpointError(f"{where}={value} is outside the {len(tokens)} tokens")
    if (longest := max(map(len, tokens), default=0)) > _LONGEST:  # all its splits are looked up
        raise CheckpointError(f"{path}: a token of {longest:,} characters; {_LONGEST:,} are read")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: tokenizer.chat_template is no text")
    return given


def _byte_level(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre: str):
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # In Llama 3, a word that is a token is used directly, regardless of the merges.
    model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        # Qwen's published tokenizers do this; GGUF has no field for it, and llama.cpp omits it.
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types, normalized=False)
    return tokenizer


def _pre_tokenizer(pre: str):
    from tokenizers import Regex, pre_tokenizers

    regex, digits = _PRE_TOKENIZERS[pre]
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if regex is not None:
        steps.append(pre_tokenizers.Split(Regex(regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    unknown: str,
    space_prefix: bool,
):
    from tokenizers import Tokenizer, decoders, models, normalizers

    # llama.cpp writes spaces in user-defined pieces as they are typed; the vocabulary has U+2581.
    tokens = list(tokens)
    for i, kind in enumerate(types):
        if kind == _USER_DEFINED:
            tokens[i] = tokens[i].replace(" ", _SPACE)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = merges_by_score(tokens, types, scores)
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    spaces = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    # With normalized matching, runs of spaces (by then U+2581) match; with a normalizer that adds a
    # prefix, the tokens themselves would get it.
    _add_tokens(tokenizer, tokens, types, normalized=not space_prefix)
    return tokenizer


def merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """BPE merges equivalent to SentencePiece: the pair whose union scores highest comes first.

    Every split of a normal piece into two normal pieces is a merge; all splits of one piece share
    its score, so they are ordered as transformers orders them: by the ids of the parts.
    """
    ids = {t: i for i, t in enumerate(tokens) if types[i] == _NORMAL}
    ranked: list[tuple[float, int, int, int]] = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _add_tokens(tokenizer, tokens: Sequence[str], types: Sequence[int], normalized: bool) -> None:
    """Control tokens are special; user-defined ones are matched whole before any merge."""
    from tokenizers import AddedToken

    special = [t for t, k in zip(tokens, types, strict=True) if k in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    user_defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, normalized=normalized) for t in user_defined])


def _special_tokens(tokens: Sequence[str], get) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids: dict[str, int | None] = {}
    ids |= {f"{ours}_token": get(f"{theirs}_token_id") for ours, theirs in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def _add_template(tokenizer, tokens: Sequence[str], get, kind: str) -> None:
    """Add bos and eos around texts encoded with special tokens, if the file requests them."""
    from tokenizers import processors

    adds = kind == "llama" or get("pre") == "llama-bpe"  # as in llama.cpp, where the file is silent
    before = [get("bos_token_id")] if get("add_bos_token", adds) else []
    after = [get("eos_token_id")] if get("add_eos_token", False) else []
    ids = [i for i in (*before, *after) if i is not None]
    if ids:
        names = {i: tokens[i] for i in ids}
        single = [*(names[i] for i in before), "$A", *(names[i] for i in after)]
        second = [*(f"{names[i]}:1" for i in before), "$B:1", *(f"{names[i]}:1" for i in after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=single + second, special_tokens=[(t, i) for i, t in names.items()]
        )


def _wrap(tokenizer, special: dict[str, str], fields: dict[str, Any], path: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    length = fields.get(f"{fields.get('general.architecture')}.context_length")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **({"model_max_length": int(length)} if length else {}),
        **special,
    )
    # Passed as an argument, transformers would look for this path on the hub (> 100,000 tokens).
    wrapped.name_or_path = path
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    return wrapped
