"""Windows for perplexity: rows of ids of a long text (MW, section 4; its authors' protocol).

Every position after a row's first is predicted.
"""

import re
from typing import Any

import numpy as np

from ffn_heterogeneity.data.packing import encode
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.wording import check_choice, check_number

WINDOW_BOS = ("auto", "segment", "stream", "none")


def window_bos(bos: str, tokenizer: Any) -> str:
    """Return `bos` with "auto" resolved: "segment" if the tokenizer itself begins a text with bos.

    The tokenizers of Qwen2.5 and SmolLM2 have a bos and put none before a text; behind it
    Qwen2.5-Coder-0.5B has 0.5 nats more. Gemma's tokenizer puts it, and Gemma needs it.

    Raises:
      DataError: none of `WINDOW_BOS`.
    """
    check_choice("bos", bos, WINDOW_BOS, DataError)
    if bos != "auto":
        return bos
    first = tokenizer.bos_token_id
    return "segment" if first is not None and list(tokenizer.encode("a"))[:1] == [first] else "none"


def text_windows(
    text: str,
    tokenizer: Any,
    window: int,
    max_windows: int | None = None,
    bos: str = "segment",
    every: int = 1,
    bos_id: int | None = None,
) -> np.ndarray:
    """Cut a text into windows of `window` PREDICTIONS each.

    The text is tokenised whole, as it is, without special tokens: x_0 ... x_{N-1}. Row i, of
    window + 1 ids, is the input followed by nothing else: row[1:] are the targets, row[:-1] their
    inputs. With w = window, and every = 1:

    - "auto": "segment" or "none", by the tokenizer's rule (`window_bos`).
    - "segment": [bos, x_{iw} ... x_{iw+w-1}]: every window starts with a bos. Windows do not
      overlap; each token is predicted once; floor(N / w) windows. Gemma-2 does not work without
      bos.
    - "stream": the stream bos, x_0, x_1, ... cut every w ids: the same predicted tokens as
      "segment", but only the first window starts with bos; the others start with the token before
      their first prediction, x_{iw-1}.
    - "none": no bos anywhere: [x_{iw} ... x_{iw+w}]. The first id is context only and is the last
      target of the window before, so x_1, x_2, ... are predicted once each; floor((N - 1) / w)
      windows.

    Tokens after the last whole window are left out. With a larger `every`, only the windows 0,
    every, 2 every, ... are returned: the first windows of a text may all be of one article.

    Args:
      text: the text.
      tokenizer: `transformers`-like; needs a `bos_token_id` unless bos is "none".
      window: predictions in a window, at least 1.
      max_windows: return at most the first `max_windows` of these windows; None (or 0) for all.
      bos: one of the above.
      every: distance between returned windows, in windows.
      bos_id: the bos of a tokenizer that has none (Qwen's, whose config.json names one).

    Returns:
      int32 [n, window + 1].

    Raises:
      DataError: empty text, fewer tokens than one window needs (says how many there are), bad
        arguments, or no bos token in the tokenizer.
    """
    check_number("window", window, "[1, inf)", DataError)
    check_number("window_every", every, "[1, inf)", DataError)
    check_number("max_windows", max_windows or 0, "[0, inf), or None for all", DataError)
    bos = window_bos(bos, tokenizer)
    first = bos_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if bos != "none" and first is None:
        raise DataError(f'bos is {bos!r}, but this tokenizer has no bos token; use "none"')
    if not text:
        raise DataError("the text is empty: there is nothing to predict")
    ids = np.asarray(encode(tokenizer, text), np.int32)
    stream = ids if bos == "none" or first is None else np.concatenate([[first], ids])
    count = (len(stream) - 1) // window
    if count < 1:
        needed = window + 1 if bos == "none" else window
        raise DataError(
            f"the text has {len(ids)} tokens, fewer than one window of {window} predictions needs "
            f"({needed}); use a longer text or a smaller window"
        )
    starts = np.arange(0, count, every)[: max_windows or None] * window
    rows = stream[starts[:, None] + np.arange(window + 1)].astype(np.int32)
    if bos == "segment":
        rows[:, 0] = stream[0]
    return rows


def document_starts(text: str, heading: str) -> list[int]:
    """Positions of the characters at which documents begin.

    Args:
      heading: regular expression of the lines that begin a document (`re.MULTILINE`).

    Raises:
      DataError: an invalid expression, or one that matches no line.
    """
    try:
        begins = [match.start() for match in re.finditer(heading, text, re.MULTILINE)]
    except re.error as error:
        raise DataError(f"document={heading!r} is no regular expression: {error}") from None
    if not begins:
        raise DataError(f"document={heading!r} matches no line of a text that begins {text[:40]!r}")
    return begins


def window_documents(
    text: str, tokenizer: Any, heading: str, window: int, count: int, every: int = 1
) -> list[int]:
    """Number of the document that each of the first `count` windows of `text_windows` is in.

    Windows of one document are not independent, so intervals draw documents. A window belongs to
    the document of its middle token; text before the first heading is document 0.

    Raises:
      DataError: as `document_starts`; a tokenizer without offsets.
    """
    begins = document_starts(text, heading)
    if not getattr(tokenizer, "is_fast", False):
        raise DataError("document needs a fast tokenizer, which gives the offsets of its tokens")
    given = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    offsets = np.asarray(tokenizer(text, **given)["offset_mapping"])
    middles = np.arange(count) * every * window + window // 2
    return np.searchsorted(begins, offsets[middles, 0], side="right").tolist()
