"""Calibration text as rows of token ids, for methods that use a model's states."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.data.packing import encode
from ffn_heterogeneity.data.sources import read_utf8
from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.io.read import parse_object, read_text
from ffn_heterogeneity.surgery.own_text import WINDOW, WRITTEN, own_rows
from ffn_heterogeneity.surgery.states import METHODS

# Default number of tokens of a text file, and of self-generated text.
TOKENS, OWN_TOKENS = 2048, 8192
KEPT = ".jsonl"


def check_calibration(asked: Any, chooser: str = "") -> None:
    """Check the calibration settings as far as that is possible without the model.

    Args:
      asked: a surgery's settings: compensation, calibration, calibration_tokens, sequential.
      chooser: another user of calibration text, e.g. "criterion 'flap'".

    Raises:
      ValueError: calibration text is missing or too short, or `sequential` has nothing to act on.
    """
    who = chooser
    if asked.compensation in METHODS:
        who = who or f"compensation {asked.compensation!r}"
    elif asked.sequential:
        raise ValueError(f"sequential=True works only with compensation {', '.join(METHODS)}")
    check_text(who, asked.calibration, asked.calibration_tokens)


def check_text(who: str, calibration: str, tokens: int | None) -> None:
    """Raise ValueError if the user `who` ("": nothing) has no calibration text, or too little."""
    if who and not calibration:
        raise ValueError(
            f"{who} needs calibration text: give --config.calibration=<text file>, or "
            "own (own_chat) for self-generated text"
        )
    if tokens is not None and tokens < WINDOW:
        raise ValueError(f"calibration_tokens={tokens}: at least {WINDOW}")


def expected_tokens(calibration: str, tokens: int | None) -> float:
    """Number of tokens that `calibration_rows` will return; infinity if only the file says it."""
    if tokens is None and calibration.endswith(KEPT):
        return math.inf
    return tokens or (OWN_TOKENS if calibration in WRITTEN else TOKENS)


def calibration_rows(
    model: Model, calibration: str, tokens: int | None = None, seed: int = 0
) -> Sequence[np.ndarray]:
    """Return rows of token ids, each bos and at most 512 tokens, with `tokens` tokens in all.

    An encoder's rows have its first and last special token ([CLS], [SEP]) and fit its positions; an
    encoder-decoder's end with eos, and have no bos.

    Args:
      calibration: a UTF-8 text file; "own" or "own_chat" for self-generated text
        (`own_text.own_rows`); or a .jsonl file of rows that `write_rows` saved.
      tokens: how many tokens to take from the start; of a text file a multiple of 512. None: 2,048
        of a text file, 8,192 of self-generated text, all of saved rows.

    Raises:
      ValueError: no tokenizer, a text that is too short, rows of another model, or as `own_rows`.
    """
    if calibration in WRITTEN:
        return own_rows(model, tokens or OWN_TOKENS, seed, calibration)
    if calibration.endswith(KEPT):
        return read_rows(model, calibration, tokens)
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer to read the calibration text with")
    windows, rest = divmod(tokens or TOKENS, WINDOW)
    if model.config.kind != "decoder":
        return _encoder_rows(model, calibration, tokens or TOKENS)
    if rest:
        raise ValueError(f"calibration_tokens={tokens}: expected a multiple of {WINDOW}")
    # Qwen's is in config.json alone; OLMo has none at all. It comes first also where the tokenizer
    # puts none: the first token of a row is left out of the fits. In Qwen2.5 that would be the
    # massive one (Qwen2.5-Coder-0.5B, 25% by hybrid + state_ridge, measured without bos: 3.30 nats
    # with bos in the calibration rows, 3.91 without; entropy 3.73).
    begins = model.tokenizer.bos_token_id is not None or model.config.bos_id is not None
    rows = text_windows(
        read_utf8(calibration),
        model.tokenizer,
        WINDOW,
        max_windows=windows,
        bos="segment" if begins else "none",
        bos_id=model.config.bos_id,
    )
    if len(rows) < windows:
        needed = f"{windows} are needed for {windows * WINDOW:,} tokens"
        raise ValueError(f"{calibration}: {len(rows)} windows of {WINDOW} tokens, {needed}")
    return list(rows)


def _encoder_rows(model: Model, path: str, tokens: int) -> list[np.ndarray]:
    tokenizer = model.tokenizer
    first = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    last = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    both = model.config.kind == "encoder_decoder"
    if last is None or (first is None and not both):
        raise ValueError(f"{model.source}: its tokenizer has no first and last special token")
    ids = np.asarray(encode(tokenizer, read_utf8(path)), np.int32)[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"{path}: {len(ids):,} tokens, {tokens:,} are needed")
    window = min(WINDOW, model.config.row_limit - 2)
    parts = (ids[start : start + window] for start in range(0, tokens, window))
    return [np.asarray([*[first] * (not both), *part, last], np.int32) for part in parts]


def written(calibration: str, rows: Sequence[np.ndarray] | None) -> dict:
    """{"own_rows": rows} if the model wrote them, which a run then saves; else {}."""
    return {"own_rows": rows} if calibration in WRITTEN and rows else {}


def write_rows(path: Path, rows: Sequence[np.ndarray]) -> None:
    """Save rows of token ids, one JSON object per line."""
    path.write_text("".join(json.dumps({"tokens": row.tolist()}) + "\n" for row in rows))


def read_rows(model: Model, path: str, tokens: int | None = None) -> list[np.ndarray]:
    """Read rows that `write_rows` saved; the last is cut at `tokens` tokens (bos not counted).

    Raises:
      ValueError: malformed lines, ids outside the model's vocabulary, another bos, or too few
        tokens.
    """
    rows, left, config = [], np.inf if tokens is None else tokens, model.config
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            row = np.asarray(parse_object(line, "the line")["tokens"])
            if row.ndim != 1 or row.dtype.kind != "i" or not 2 <= len(row) <= WINDOW + 1:
                raise ValueError(f"no list of 2 to {WINDOW + 1} ids")
        except (ValueError, KeyError, TypeError) as error:
            message = f'{path}, line {number}: no row {{"tokens": [bos, ...]}} ({error})'
            raise ValueError(message) from None
        other = row.min() < 0 or row.max() >= config.vocab_size
        begins = config.bos_id if config.kind == "decoder" else None
        if other or (begins is not None and row[0] != begins):
            raise ValueError(
                f"{path}, line {number}: rows of another model: ids {row.min()} to {row.max()}, "
                f"bos {row[0]}, of a vocabulary of {config.vocab_size} with bos {config.bos_id}"
            )
        if left > 0:
            rows.append(row[: int(min(left, len(row) - 1)) + 1].astype(np.int32))
            left -= len(rows[-1]) - 1
    if tokens is not None and left > 0:
        raise ValueError(f"{path}: {tokens - left:,} tokens, {tokens:,} are asked for")
    return rows
