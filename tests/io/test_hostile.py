"""Files that somebody made up: every reader ends in one line that names the file, or reads what it
says: the model there was before, but for what the file says of one of its fields.

Some 900 files: each value of config.json, of the index, of GGUF's metadata and of the tokenizer
replaced in turn by what has no business there, and containers that lie about counts and sizes.
"""

import contextlib
import dataclasses
import json
import struct

import jax
import numpy as np
import pytest
from test_gguf import random_leaves, tiny_config, write
from tiny_models import places, replaced, save_tiny
from tiny_runs import bounded

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf.read import read_gguf
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.io.tokenizer_files import read_tokenizer
from ffn_heterogeneity.models.config import ConfigError

DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE = [None, True, -1, 0, 0.5, 10**9, 10**23, 1e308, float("nan"), "", "x", "\ud800", [], [7]]
HOSTILE += [{}, {"x": {"y": []}}, [[[[1]]]]]


def reads_or_refuses(read, path, *, name=None, base=None, **changed):
    """`read(path)` gives `base` with fields changed, or raises CheckpointError in one line; with at
    most 1 GB and in 20 s."""
    with bounded():
        try:
            loaded = read(path)
            if base is not None:
                assert loaded[0] == dataclasses.replace(base[0], **changed), "the config"
                same = jax.tree.map(np.array_equal, loaded[1], base[1])
                assert all(jax.tree.leaves(same)), "the weights"
        except CheckpointError as error:
            message = str(error)
            assert message and "\n" not in message, message[:500]
            assert (name or path.name) in message, message[:500]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def base(directory):
    return read_pretrained(directory)


KEYS = ("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size")
KEYS += ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "dtype")
KEYS += ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "eos_token_id")
KEYS += ("rope_parameters", "rope_scaling", "rope_theta", "hidden_act", "attention_bias")
KEYS += ("per_layer_config", "ffn_heterogeneity", "quantization_config")
# key -> our field, and its value without the key
FIELDS_OF = {"rms_norm_eps": ("norm_eps", 1e-6), "max_position_embeddings": ("max_position", 2048)}
FIELDS_OF |= {"eos_token_id": ("eos_id", None)}


@pytest.mark.parametrize("key", KEYS)
def test_config_values(directory, base, tmp_path, key):
    """The model is as the value says: unchanged where it is empty, where another key overrides it,
    and where it is a true word for true."""
    field, default = FIELDS_OF.get(key, ("", None))
    passed = key in ("architectures", "dtype", "rope_theta", "tie_word_embeddings")
    original = json.loads((directory / "config.json").read_text())
    for number, value in enumerate(HOSTILE):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(directory / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**original, key: value}))
        said = tuple(value) if isinstance(value, list) else value
        if value is None or (key == "eos_token_id" and value == -1):
            said = default
        more = {field: said} if field else {}
        try:
            reads_or_refuses(read_pretrained, folder, name=str(folder), base=base, **more)
        except ConfigError:  # no config can have this value, so it must be rejected
            reads_or_refuses(read_pretrained, folder, name=str(folder))
            with pytest.raises(CheckpointError):
                read_pretrained(folder)
        else:
            ignored = {"x": {"y": []}} if key == "ffn_heterogeneity" else None
            with contextlib.suppress(CheckpointError):
                read_pretrained(folder)
                assert field or passed or not value or value == ignored, value


WHOLE = ["", "null", "[]", "7", '"x"', "{", "{}", DEEP, '{"a": ' * 5000 + "1" + "}" * 5000]
WHOLE += ["\x00" * 100, '{"vocab_size": 1e999}']
FILES = ["config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_whole_files(directory, base, tmp_path, name, number):
    for file in directory.iterdir():
        if file.name != name and not (name.endswith("index.json") and "safetensors" in file.name):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).write_text(WHOLE[number])
    read = read_tokenizer if name.startswith("token") else read_pretrained
    original = None if read is read_tokenizer else base
    reads_or_refuses(read, tmp_path, name=str(tmp_path), base=original)


def test_index_values(directory, base, tmp_path):
    index = {"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": "a.safetensors"}}
    for number, path in enumerate(places(index)):
        for other, value in enumerate([*HOSTILE, "../config.json", "/etc/passwd"]):
            folder = tmp_path / f"{number}-{other}"
            folder.mkdir()
            (folder / "config.json").symlink_to(directory / "config.json")
            text = json.dumps(replaced(index, path, value))
            (folder / "model.safetensors.index.json").write_text(text)
            reads_or_refuses(read_pretrained, folder, name=str(folder), base=base)


def test_safetensors_headers(directory, base, tmp_path):
    content = (directory / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    tensor = next(name for name in header if name != "__metadata__")
    paths = [(tensor, *path) for path in places(header[tensor])]
    for number, path in enumerate(paths):
        for other, value in enumerate(HOSTILE):
            folder = tmp_path / f"{number}-{other}"
            folder.mkdir()
            (folder / "config.json").symlink_to(directory / "config.json")
            try:
                text = json.dumps(replaced(header, path, value)).encode()
            except UnicodeEncodeError:
                continue
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
            reads_or_refuses(read_pretrained, folder, name=str(folder), base=base)


FIELDS = ("llama.block_count", "llama.embedding_length", "llama.feed_forward_length")
FIELDS += ("llama.attention.head_count", "llama.attention.head_count_kv", "llama.rope.freq_base")
FIELDS += ("llama.attention.key_length", "llama.attention.layer_norm_rms_epsilon")
FIELDS += ("llama.context_length", "llama.rope.scaling.type", "llama.expert_count")
FIELDS += ("tokenizer.ggml.bos_token_id", "general.architecture", "general.alignment")
# (GGUF type, its bytes): numbers of every size, strings, lists, a list of lists.
VALUES = [(4, struct.pack("<I", 0)), (4, struct.pack("<I", 2**32 - 1)), (5, struct.pack("<i", -7))]
VALUES += [(10, struct.pack("<Q", 2**63)), (6, struct.pack("<f", float("nan"))), (7, b"\x01")]
VALUES += [(12, struct.pack("<d", 1e308)), (8, struct.pack("<Q", 3) + b"abc"), (99, b"")]
VALUES += [(8, struct.pack("<Q", 2**62)), (9, struct.pack("<IQII", 4, 2, 1, 2))]
VALUES += [(9, struct.pack("<IQ", kind, size)) for kind, size in ((4, 0), (4, 2**40), (8, 2**40))]
VALUES += [(9, struct.pack("<IQ", 9, 1) * 300)]
NUMBERS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 12: "<d"}
OF_MODEL = {"tokenizer.ggml.bos_token_id": "bos_id", "llama.context_length": "max_position"}
OF_MODEL |= {"llama.attention.layer_norm_rms_epsilon": "norm_eps"}


def with_field(content, key, kind, value):
    """The file with one more field before the others, to test order and collisions."""
    name = key.encode()
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    room = -(len(entry) + 23) % 32  # tensors stay aligned
    entry += struct.pack("<Q3sIQ", 3, b"pad", 8, room) + b" " * room
    magic, version, tensors, fields = struct.unpack_from("<4sIQQ", content)
    return struct.pack("<4sIQQ", magic, version, tensors, fields + 2) + entry + content[24:]


@pytest.mark.parametrize("key", FIELDS)
def test_gguf_fields(tmp_path, key):
    config = tiny_config("llama2_7b", 2)
    path = write(tmp_path / "whole.gguf", config, random_leaves(config))
    base = read_gguf(path)
    # The real one under another name, so that the hostile one is the only one.
    content = path.read_bytes().replace(key.encode(), b"?" * len(key))
    for number, (kind, value) in enumerate(VALUES):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(with_field(content, key, kind, value))
        said = struct.unpack(NUMBERS[kind], value)[0] if kind in NUMBERS else None
        short = 1e-5 if said is None or abs(said) > 1e38 else float(str(np.float32(said)))
        changed = {}
        if key in OF_MODEL:
            said = None if key.endswith("bos_token_id") and said == 2**32 - 1 else said
            changed = {OF_MODEL[key]: short if key.endswith("epsilon") else said}
        if key == "llama.rope.freq_base" and short > 0:
            rope = dataclasses.replace(base[0].layers[0].rope, theta=short)
            layers = [dataclasses.replace(layer, rope=rope) for layer in base[0].layers]
            changed = {"layers": tuple(layers)}
        try:
            reads_or_refuses(read_gguf, path, base=base, **changed)
        except ConfigError:  # no config can have it
            with pytest.raises(CheckpointError):
                read_gguf(path)


@pytest.mark.parametrize("offset", [8, 16])
@pytest.mark.parametrize("count", [0, 1, 2**31, 2**62, 2**64 - 1])
def test_gguf_counts(tmp_path, offset, count):
    config = tiny_config("llama2_7b", 2)
    path = write(tmp_path / "whole.gguf", config, random_leaves(config))
    base = read_gguf(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, offset, count)
    path.write_bytes(data)
    reads_or_refuses(read_gguf, path, base=base)
