"""Tokenizers for the data tests: a trained byte-level BPE, and one id per character; a corpus."""

import copy
import json

import pytest
from prepare_tools import texts


class Characters:
    """One id per character; bos 1, eos 2 (or None). Counts its calls."""

    def __init__(self, bos=1, eos=2):
        self.bos_token_id, self.eos_token_id, self.calls = bos, eos, 0

    def encode(self, text, add_special_tokens=True):
        assert add_special_tokens is False
        self.calls += 1
        return [ord(character) + 3 for character in text]

    def decode(self, ids):
        return "".join(chr(i - 3) for i in ids if i > 2)


@pytest.fixture(scope="session")
def characters():
    return Characters


@pytest.fixture(scope="session")
def bpe(shared_data):
    """A byte-level BPE of 2,000 tokens trained on tinyshakespeare, as `transformers` wraps it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    text = str(shared_data / "tinyshakespeare" / "input.txt")
    trained.train([text], 2000, special_tokens=["<bos>", "<eos>"], show_progress=False)
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "model_max_length": 128}
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **names)


@pytest.fixture(scope="session")
def bos_first(bpe):
    """The same tokenizer, which begins a text with its bos."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(bpe)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 0)]
    )
    return tokenizer


@pytest.fixture
def write(tmp_path):
    """`write(name, content)`: text, bytes, or a list of records as JSONL -> path as str."""

    def _write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return _write


@pytest.fixture
def corpus(write):
    """JSONL of 90 documents, some of them empty, in two files."""
    records = [{"text": text, "id": i} for i, text in enumerate(texts(90))]
    for i in (0, 17, 89):
        records[i]["text"] = " \n" if i else ""
    return [write("a.jsonl", records[:60]), write("b.jsonl", records[60:])]
