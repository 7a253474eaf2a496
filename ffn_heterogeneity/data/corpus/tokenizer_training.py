"""Training of a byte-level BPE tokenizer, which can encode every text without <unk>."""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.data.corpus.documents import Chunk, Layout, read_parts
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.files import atomic_path, write_json
from ffn_heterogeneity.io.read import read_json

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SPECIAL = (BOS, EOS, PAD)  # ids 0, 1, 2
# One token per byte, and the special tokens.
SMALLEST = 256 + len(SPECIAL)
# File next to a trained tokenizer with everything that determines it.
MADE_OF = "made_of.json"

_log = logging.getLogger(__name__)


def train_tokenizer(texts: Iterable[str], vocab_size: int, min_frequency: int = 2) -> Any:
    """Train BPE on bytes with GPT-2's word splitting; the same texts give the same tokenizer.

    `<s>` precedes texts that are encoded with special tokens, as in Llama.

    Args:
      vocab_size: total number of special tokens, bytes and merges. A small corpus gives fewer, with
        a warning.
      min_frequency: minimum number of occurrences of a merged pair.

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
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        why = f"there are no more pairs that occur {min_frequency} times"
        _log.warning("the texts gave %d of %d requested tokens: %s", size, vocab_size, why)
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


def sample_texts(chunks: Sequence[Chunk], layout: Layout, max_bytes: int) -> Iterator[str]:
    """Sample documents of evenly spaced chunks, long ones in parts, up to `max_bytes` of UTF-8.

    The last document is cut at the limit.
    """
    total = sum(chunk.size for chunk in chunks)
    count = min(max(1, round(len(chunks) * max_bytes / total)), len(chunks))
    last = count if layout.stream else len(chunks)  # a stream must be read up to there
    left = max_bytes
    for number in np.linspace(0, last - 1, count).astype(int):
        for text, _ in read_parts(chunks[number], layout):
            if left <= 0:
                return
            # A character has at least one byte, so the rest of a long document is not needed.
            encoded = text[:left].encode()
            left -= len(encoded)
            yield text if left > 0 else encoded[: len(encoded) + left].decode(errors="ignore")


class Hashed:
    """Iterator that passes texts on; `digest()` is the hash of the texts so far."""

    def __init__(self, texts: Iterable[str]):
        self._texts, self._hash = texts, hashlib.sha256()

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            encoded = text.encode()
            # With its length, so that two texts differ from their concatenation.
            self._hash.update(len(encoded).to_bytes(8, "little") + encoded)
            yield text

    def digest(self) -> str:
        return self._hash.hexdigest()


def save_tokenizer(
    tokenizer: Any, directory: str | Path, made_of: Mapping[str, Any] | None = None
) -> None:
    """Write a directory that `transformers.AutoTokenizer` loads, atomically.

    Args:
      made_of: saved in `made_of.json`, for `differs`.
    """
    with atomic_path(directory, directory=True) as temporary:
        tokenizer.save_pretrained(os.fspath(temporary))
        if made_of is not None:
            write_json(Path(temporary) / MADE_OF, dict(made_of))


def differs(directory: str | Path, made_of: Mapping[str, Any]) -> list[str]:
    """Names of the facts in which the tokenizer in `directory` differs from `made_of`.

    Raises:
      DataError: the directory has no such facts.
    """
    path = Path(directory) / MADE_OF
    if not path.is_file():
        raise DataError(
            f"{directory} holds a tokenizer that was not trained by this command: use it by "
            f"--config.tokenizer={directory} without training, or use another --workdir"
        )
    recorded = read_json(path)
    return [key for key, value in made_of.items() if recorded.get(key) != value]
