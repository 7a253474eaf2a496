"""Trains a byte-level BPE tokenizer: every text can be written with it, none needs <unk>."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.data import corpora
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.files import atomic_path

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SPECIAL = (BOS, EOS, PAD)  # ids 0, 1, 2
# One token for every byte and the special ones.
SMALLEST = 256 + len(SPECIAL)

_log = logging.getLogger(__name__)


def train_tokenizer(texts: Iterable[str], vocab_size: int, min_frequency: int = 2) -> Any:
    """BPE on bytes, split into words as GPT-2's; the same texts give the same tokenizer.

    `<s>` stands before a text that is encoded with special tokens, as Llama's does.

    Args:
      vocab_size: in all: special tokens, bytes and merges. A small corpus gives fewer (a warning).
      min_frequency: how often a pair must occur to be merged.

    Returns:
      `transformers.PreTrainedTokenizerFast`.

    Raises:
      DataError: a vocabulary too small for the bytes, or no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST:
        raise DataError(
            f"vocab_size is {vocab_size}; {len(SPECIAL)} special tokens and 256 bytes need "
            f"{SMALLEST} or more"
        )
    seen = 0

    def counted() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen += bool(text.strip())
            yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=os.isatty(2),
    )
    tokenizer.train_from_iterator(counted(), trainer)
    if not seen:
        raise DataError("no text to train the tokenizer on: all documents are empty")
    if tokenizer.get_vocab_size() < vocab_size:
        _log.warning(
            "the texts gave %d tokens of the %d asked for: there are no more pairs that occur "
            "%d times",
            tokenizer.get_vocab_size(), vocab_size, min_frequency,
        )  # fmt: skip
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, SPECIAL.index(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def sample_texts(
    chunks: Sequence[corpora.Chunk], layout: corpora.Layout, max_bytes: int
) -> Iterator[str]:
    """The documents of evenly spread chunks, at most about `max_bytes` of them."""
    total = sum(chunk.size for chunk in chunks)
    count = min(max(1, round(len(chunks) * max_bytes / total)), len(chunks))
    left = max_bytes
    for number in np.linspace(0, len(chunks) - 1, count).astype(int):
        for text in corpora.read_chunk(chunks[number], layout):
            if left <= 0:
                return
            left -= len(text)
            yield text


def save_tokenizer(tokenizer: Any, directory: str | Path) -> None:
    """Writes a directory that `transformers.AutoTokenizer` loads; whole or not at all."""
    with atomic_path(directory) as temporary:
        tokenizer.save_pretrained(os.fspath(temporary))
