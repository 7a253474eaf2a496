"""Small corpora and the expected content of their shards."""

import json
import time
from pathlib import Path

import numpy as np

from ffn_heterogeneity.data.corpus.documents import Layout, read_parts
from ffn_heterogeneity.data.corpus.shards import open_corpus
from ffn_heterogeneity.data.corpus.tokenise import Settings

WORDS = ("the", "of", "and", "whale", "ship", "sea", "naïve", "said", "«日本»\n", "white", "boat")


class Slow:
    """A tokenizer of characters that other processes can import; slow enough to be killed."""

    bos_token_id, eos_token_id = 1, 2

    def encode(self, text, add_special_tokens=True):
        time.sleep(0.005)
        return [ord(character) + 3 for character in text]


def texts(count, seed=0):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(1, 40))) for _ in range(count)]


def contents(directory):
    """Name -> bytes of every file with a final name."""
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.is_file()}


def documents_of(directory):
    return [
        shard.document(number).tolist()
        for shard in open_corpus(directory).shards
        for number in range(shard.documents_count)
    ]


KEYS = ("text_field", "separator", "max_tokens")


def settings(chunk_bytes=2000, **more):
    layout = {key: more.pop(key) for key in KEYS if key in more}
    return Settings(Layout(chunk_bytes=chunk_bytes, **layout), **more)


def expected(paths, tokenizer, eos=2):
    lines = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    return [
        tokenizer.encode(line["text"], add_special_tokens=False) + [eos]
        for line in lines
        if line["text"].strip()
    ]


def read_chunk(chunk, layout):
    """All documents of a chunk."""
    document = ""
    for text, ends in read_parts(chunk, layout):
        document += text
        if ends:
            yield document
            document = ""
