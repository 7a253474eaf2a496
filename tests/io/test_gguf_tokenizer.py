"""Tokenizers rebuilt from GGUF metadata against independent ones.

SentencePiece kind: the `sentencepiece` library itself. Byte-level kind: GPT-2's algorithm written
here from its definition (split, bytes, merges by rank).
"""

import inspect
import json
import random
import re
import struct
import unicodedata

import pytest

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf.file import GGUFFile, open_gguf
from ffn_heterogeneity.io.gguf.tokenizer import read_tokenizer

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "Hello, world! It's 2024; we'd paid $1,234.50 (or 12%).",
    "def f(x):\n\treturn {'a': x[0], \"b\": -x**2}  # done\n\n\n    pass\n",
    "  leading, trailing  ",
    "tabs\t\tand\r\nreturns",
    "café naïve Ærøskøbing ß Ǆ",
    "日本語のテキスト 한국어 العربية עברית ไทย हिन्दी",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 ✨",
    "x\u200by\u00a0z\u2003w",
    "𝒳 𐍈 \U0010fffd \x00\x01\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 70 + "x" + "\n" * 40,
    "<table><tr><td>1</td></tr></table>",
    "½ ² ٣ Ⅷ 1½x",
    "= Robert Boulter =\n\n Robert Boulter is an English film , television and theatre actor .",
]


def random_texts(count, seed=0):
    rng = random.Random(seed)
    letters = " \n\tabcdeABC'é😀日.,<>/h1234\"_-"
    return ["".join(rng.choice(letters) for _ in range(rng.randrange(60))) for _ in range(count)]


# ---- SentencePiece kind


def sentencepiece_model(file):
    """A `sentencepiece` processor with the pieces, scores and types of a GGUF file."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    fields = {k.removeprefix("tokenizer.ggml."): v for k, v in file.fields.items()}
    proto = sentencepiece_model_pb2.ModelProto()
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, True
    trainer.vocab_size = len(fields["tokens"])
    trainer.unk_id = fields["unknown_token_id"]
    trainer.bos_id, trainer.eos_id = fields["bos_token_id"], fields["eos_token_id"]
    trainer.pad_id = fields.get("padding_token_id", -1)
    for name in ("unk", "bos", "eos", "pad"):
        if getattr(trainer, f"{name}_id") >= 0:
            setattr(trainer, f"{name}_piece", fields["tokens"][getattr(trainer, f"{name}_id")])
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = fields["add_space_prefix"]
    normalizer.remove_extra_whitespaces = False
    for i, token in enumerate(fields["tokens"]):
        kind = fields["token_type"][i]
        piece = proto.pieces.add()
        piece.piece = token.replace(" ", "▁") if kind == 4 else token
        piece.score = fields["scores"][i]
        piece.type = 2 if i == trainer.unk_id else kind
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


@pytest.fixture(scope="module", params=[True, False], ids=["space prefix", "no space prefix"])
def trained(request, tmp_path_factory):
    """A GGUF header like that of Llama 2 or Gemma, with a BPE model trained here."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    from ffn_heterogeneity.models import block, causal_lm, stack

    directory = tmp_path_factory.mktemp("spm")
    corpus = "\n".join(map(inspect.getsource, (block, causal_lm, stack)))
    (directory / "corpus.txt").write_text(corpus + "\n".join(TEXTS).replace("\x00", ""))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "corpus.txt"),
        model_prefix=str(directory / "m"),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        # Gemma has them; Llama 2, the model with the prefix, has none.
        user_defined_symbols=[] if request.param else ["▁▁", "▁▁▁▁", "\n", "\n\n", "<table>"],
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((directory / "m.model").read_bytes())
    # Ids have another order than scores: the scores must decide.
    special = [p for p in proto.pieces if p.type != 1]
    normal = [p for p in proto.pieces if p.type == 1]
    random.Random(0).shuffle(normal)
    pieces = special + normal
    fields = {
        "general.architecture": "llama",
        "llama.context_length": 4096,
        "tokenizer.ggml.model": "llama",
        # llama.cpp writes the spaces of user-defined pieces as they are typed.
        "tokenizer.ggml.tokens": [
            p.piece.replace("▁", " ") if p.type == 4 else p.piece for p in pieces
        ],
        "tokenizer.ggml.scores": [p.score for p in pieces],
        "tokenizer.ggml.token_type": [p.type for p in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": request.param,
    }
    file = GGUFFile("trained.gguf", fields, {})
    return file, read_tokenizer(file), sentencepiece_model(file)


def test_sentencepiece_ids(trained):
    _, ours, theirs = trained
    for text in TEXTS + random_texts(500):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), repr(text)


def test_sentencepiece_round_trip(trained):
    _, ours, _ = trained
    for text in TEXTS + random_texts(200):
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text


def test_sentencepiece_bos_and_special_tokens(trained):
    _, ours, _ = trained
    plain = ours.encode("Hello", add_special_tokens=False)
    assert ours.encode("Hello") == [1, *plain], "a Llama file asks for bos unless it says no"
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)
    assert ours.decode(ours.encode("Hello"), skip_special_tokens=True) == "Hello"
    assert ours.model_max_length == 4096
    assert ours.encode("</s>", add_special_tokens=False) == [2]


# ---- byte-level kind

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def gpt2_alphabet():
    """GPT-2's printable character for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in printable}, 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


def byte_level_oracle(text, vocab, merges, digits):
    """Ids by definition: isolate digits, split, bytes, then the lowest-ranked pair until none."""
    import regex

    alphabet = gpt2_alphabet()
    parts = [text]
    if digits:
        parts, run = [], ""
        for char in text:
            # `tokenizers` calls a digit whatever has a numeric category, as Rust does.
            if unicodedata.category(char) in ("Nd", "Nl", "No"):
                parts += [run, char]
                run = ""
            else:
                run += char
        parts.append(run)
    ids = []
    for piece in parts:
        for word in regex.findall(GPT2_SPLIT, piece):
            symbols = [alphabet[b] for b in word.encode()]
            while len(symbols) > 1:
                pairs = list(zip(symbols, symbols[1:], strict=False))
                ranked = [(merges[pair], i) for i, pair in enumerate(pairs) if pair in merges]
                if not ranked:
                    break
                i = min(ranked)[1]
                symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
            ids += [vocab[symbol] for symbol in symbols]
    return ids


def byte_level_file(merge_count=400, **changes):
    """A GGUF header with merges learned here from a little text, as BPE learns them."""
    alphabet = gpt2_alphabet()
    words = [
        [alphabet[b] for b in word.encode()]
        for word in re.findall(r" ?[^\W\d]+| ?\d+|\s+", "\n".join(TEXTS) * 2 + " the cat sat" * 5)
    ]
    merges = []
    for _ in range(merge_count):
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    tokens = ["<|endoftext|>", *sorted(alphabet.values()), *dict.fromkeys(map("".join, merges))]
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return GGUFFile("small.gguf", fields, {})


def oracle_of(file):
    fields = file.fields
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    pairs = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    merges = {pair: rank for rank, pair in enumerate(pairs)}
    digits = fields["tokenizer.ggml.pre"] == "smollm"
    return lambda text: byte_level_oracle(text, vocab, merges, digits)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "olmo"])
def test_byte_level_ids_and_round_trip(pre):
    file = byte_level_file(pre=pre)
    ours, oracle = read_tokenizer(file), oracle_of(file)
    for text in TEXTS + random_texts(300):
        ids = ours.encode(text)
        assert ids == oracle(text), repr(text)
        assert ours.decode(ids) == text


def test_digits_are_split_only_where_the_file_says_so():
    text = "12 12"
    fields = {"merges": ["1 2", "Ġ 12"], "tokens": _tokens(), "token_type": [3] + [1] * 258}
    split = read_tokenizer(byte_level_file(pre="smollm", **fields))
    unsplit = read_tokenizer(byte_level_file(pre="gpt-2", **fields))
    assert split.convert_ids_to_tokens(split.encode(text)) == ["1", "2", "Ġ", "1", "2"]
    assert unsplit.convert_ids_to_tokens(unsplit.encode(text)) == ["12", "Ġ12"]


def _tokens():
    return ["<|endoftext|>", *sorted(gpt2_alphabet().values()), "12", "Ġ12"]


def test_llama3_splits_digits_in_threes_and_keeps_whole_words():
    tokens = [*_tokens(), "123", "hello"]
    merges = ["1 2", "12 3", "Ġ 12"]
    file = byte_level_file(
        pre="llama-bpe", tokens=tokens, merges=merges, token_type=[3] + [1] * 260
    )
    ours = read_tokenizer(file)
    pieces = ours.convert_ids_to_tokens(ours.encode("12345hello"))
    # "hello" has no merges: Llama 3 looks whole words up first. And as in llama.cpp, a bos.
    assert pieces == ["<|endoftext|>", "123", "4", "5", "hello"]
    assert read_tokenizer(byte_level_file(pre="llama-bpe", add_bos_token=False)).encode("cat")[0]


def test_special_tokens_chat_template_and_eos():
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
    file = byte_level_file(add_bos_token=True, add_eos_token=True)
    file.fields["tokenizer.chat_template"] = template
    ours = read_tokenizer(file)
    plain = ours.encode("cat", add_special_tokens=False)
    assert ours.encode("cat") == [0, *plain, 0]
    assert ours.encode("cat<|endoftext|>", add_special_tokens=False) == [*plain, 0]
    assert ours.decode([0, *plain, 0], skip_special_tokens=True) == "cat"
    rendered = ours.apply_chat_template([{"role": "user", "content": "cat"}], tokenize=False)
    assert rendered == "<|im_start|>cat"


def test_save_and_load_again(tmp_path):
    from checkpoint_tools import random_params, tiny_config

    from ffn_heterogeneity.io.hf.export import save_pretrained
    from ffn_heterogeneity.io.load import load_model

    ours, config = read_tokenizer(byte_level_file()), tiny_config()
    save_pretrained(config, random_params(config), tmp_path / "m", tokenizer=ours)
    again = load_model(tmp_path / "m").tokenizer
    values = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast", "what transformers 4 knows"
    for text in TEXTS:
        assert again.encode(text) == ours.encode(text)
    assert again.eos_token_id == ours.eos_token_id


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"pre": "tekken"}, "smollm"),
        ({"model": "t5"}, "gpt2"),
        ({"model": "llama"}, "scores"),
        ({"tokens": None}, "no tokenizer"),
        ({"token_type": [1, 1]}, "token_type"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id=-1 is outside"),
        ({"bos_token_id": "0"}, "bos_token_id='0' is no int"),
        ({"eos_token_id": True}, "eos_token_id=True is no int"),
        ({"tokens": 5}, "tokens is no list of str"),
        ({"tokens": [1, 2]}, "tokens is no list of str"),
        ({"tokens": []}, "token_type has"),
        ({"token_type": 3.5}, "token_type is no list of int"),
        ({"merges": ["ab"]}, "do not form a tokenizer"),
        ({"merges": ["a nowhere"]}, "do not form a tokenizer"),
        ({"merges": [["a", "b"]]}, "merges is no list of str"),
        ({"pre": 5}, "pre=5 is no str"),
        ({"model": ["gpt2"]}, "model=.'gpt2'. is no str"),
        ({"add_bos_token": "yes"}, "add_bos_token='yes' is no bool"),
        ({"model": "llama", "scores": ["a"]}, "scores is no list of float"),
        ({"model": "llama", "scores": [0.5]}, "scores has 1 entries"),
    ],
)
def test_unknown_kinds_are_refused(change, word):
    file = byte_level_file(**change)
    with pytest.raises(CheckpointError, match=word) as caught:
        read_tokenizer(file)
    assert "small.gguf" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("alignment", [0, 1, 3, 24, 2**20])
def test_an_alignment_that_no_file_has(tmp_path, alignment):
    name = b"general.alignment"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(name)) + name
    (tmp_path / "x.gguf").write_bytes(header + struct.pack("<II", 4, alignment) + bytes(64))
    with pytest.raises(CheckpointError, match=f"general.alignment={alignment}: expected a power"):
        open_gguf(tmp_path / "x.gguf")


# ---- the real files


@pytest.mark.slow
def test_smollm2_tokenizer(smollm2_gguf, shared_data):
    file = open_gguf(smollm2_gguf)
    ours, oracle = read_tokenizer(file), oracle_of(file)
    wikitext = (shared_data / "wikitext2" / "test.raw.txt").read_text()
    for text in [*TEXTS, *random_texts(300), wikitext[:60_000]]:
        assert ours.encode(text) == oracle(text), repr(text[:80])
    assert ours.decode(ours.encode(wikitext)) == wikitext
    tokens = ours.convert_ids_to_tokens(ours.encode("In 2024"))
    assert tokens == ["In", "Ġ", "2", "0", "2", "4"]
    assert ours.encode("<|im_start|>") == [ours.bos_token_id] == [1]
    chat = ours.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.startswith("<|im_start|>system\n") and "<|im_start|>user\nHi<|im_end|>" in chat


@pytest.mark.slow
def test_gemma3_tokenizer(gemma3_gguf, shared_data):
    file = open_gguf(gemma3_gguf)
    ours, theirs = read_tokenizer(file), sentencepiece_model(file)
    wikitext = (shared_data / "wikitext2" / "test.raw.txt").read_text()
    pieces = [
        token.replace("▁", " ")
        for token, kind in zip(
            file.fields["tokenizer.ggml.tokens"],
            file.fields["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == 1
    ]
    rng = random.Random(0)
    mixtures = ["".join(rng.choices(pieces, k=20)) for _ in range(1000)]
    for text in [*TEXTS, *random_texts(300), *mixtures, wikitext]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), repr(text[:80])
    assert ours.decode(ours.encode(wikitext, add_special_tokens=False)) == wikitext
    assert ours.encode("a")[0] == ours.bos_token_id == 2
