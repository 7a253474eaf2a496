"""Windows for perplexity: rows of ids of a long text (MW, section 4; its authors' protocol).

Every position after a row's first is predicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ffn_heterogeneity.data.packing import encode
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.wording import check_choice, check_number

WINDOW_BOS = ("segment", "stream", "none")


def text_windows(
    text: str, tokenizer: Any, window: int, max_windows: int | None = None, bos: str = "segment"
) -> np.ndarray:
    """Cut a text into windows of `window` PREDICTIONS each.

    The whole text is tokenized without special tokens: x_0 ... x_{N-1}. Row i has window + 1 ids:
    row[1:] are the targets, row[:-1] their inputs. With w = window:

    - "segment": [bos, x_{iw} ... x_{iw+w-1}]: every window starts with a bos. Windows do not
      overlap; each token is predicted once; floor(N / w) windows. This is the default, because
      Gemma-2 does not work without bos.
    - "stream": the stream bos, x_0, x_1, ... cut every w ids: the same predicted tokens as
      "segment", but only the first window starts with bos; the others start with the token before
      their first prediction, x_{iw-1}.
    - "none": no bos anywhere: [x_{iw} ... x_{iw+w}]. The first id is context only and is the last
      target of the window before, so x_1, x_2, ... are predicted once each; floor((N - 1) / w)
      windows.

    Tokens after the last complete window are ignored.

    Args:
      text: the text.
      tokenizer: `transformers`-like; needs a `bos_token_id` unless bos is "none".
      window: number of predictions per window, at least 1.
      max_windows: use only the first windows, up to this number; None (or 0) for all.
      bos: one of the above.

    Returns:
      int32 [n, window + 1].

    Raises:
      DataError: empty text, fewer tokens than one window needs (says how many there are), bad
        arguments, or no bos token in the tokenizer.
    """
    check_number("window", window, "[1, inf)", DataError)
    check_number("max_windows", max_windows or 0, "[0, inf), or None for all", DataError)
    check_choice("bos", bos, WINDOW_BOS, DataError)
    if bos != "none" and tokenizer.bos_token_id is None:
        raise DataError(f'bos is {bos!r}, but this tokenizer has no bos token; use "none"')
    if not text:
        raise DataError("the text is empty: there is nothing to predict")
    ids = np.asarray(encode(tokenizer, text), np.int32)
    stream = ids if bos == "none" else np.concatenate([[tokenizer.bos_token_id], ids])
    count = (len(stream) - 1) // window
    if count < 1:
        needed = window + 1 if bos == "none" else window
        raise DataError(
            f"the text has {len(ids)} tokens, fewer than one window of {window} predictions needs "
            f"({needed}); use a longer text or a smaller window"
        )
    count = min(count, max_windows) if max_windows else count
    starts = np.arange(count)[:, None] * window
    rows = stream[starts + np.arange(window + 1)].astype(np.int32)
    if bos == "segment":
        rows[:, 0] = tokenizer.bos_token_id
    return rows
