"""Readers fed by chance for as long as asked, from good files that are bent a little.

python tests/fuzz.py json|metrics|gguf|safetensors|peft --minutes=20 --seed=0

Every input is read, or refused by one error in one line that names the file. What breaks that is
printed, its input kept in /tmp/fuzz-<target>-<number>; the exit code is the number of kinds. Bytes
are cut, doubled and replaced by tokens that the format knows; values of JSON by others.
"""

# ruff: noqa: E402 (the tests' helpers are found by a path that is set first)

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_hostile_cases import HOSTILE
from tiny_models import LLAMA, byte_tokenizer, places, random_params, replaced, save_tiny
from tokenizers import pre_tokenizers

from ffn_heterogeneity.io.gguf import tokenizer as gguf_tokenizer
from ffn_heterogeneity.io.gguf.export import save_gguf
from ffn_heterogeneity.io.gguf.read import read_gguf
from ffn_heterogeneity.io.hf.peft import save_adapters
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.surgery import SURGERIES

TOKENS = [b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\ud800", b"1e999", b"NaN", b"-", b"null"]
TOKENS += [b"\xff", b"\x00", b"\n", b"9" * 50, b"[" * 100, (2**63).to_bytes(8, "little")]
TOKENS += [(2**31).to_bytes(4, "little"), b"\x00" * 8]


def bytes_bent(data: bytes, chance: random.Random) -> bytes:
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        at = chance.randrange(len(data) + 1)
        # Headers are where readers decide: half of all changes fall there.
        at = min(at, chance.randrange(4096)) if chance.random() < 0.5 else at
        kind, size = chance.random(), chance.choice([0, 1, 1, 4, 8, 100])
        if kind < 0.5:
            data[at : at + size] = chance.choice(TOKENS)
        elif kind < 0.7:
            data[at : at + 1] = bytes([chance.randrange(256)])
        elif kind < 0.8:
            data[at:at] = data[at : at + size]
        elif kind < 0.9:
            del data[at : at + size]
        else:
            del data[at:]
    return bytes(data)


def json_bent(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.3:
        return bytes_bent(data, chance)
    lines = data.decode().splitlines() if data.count(b"\n{") else [data.decode()]
    number = chance.randrange(len(lines))
    document = json.loads(lines[number])
    for _ in range(chance.choice([1, 1, 2, 5])):
        where = chance.choice([*places(document)])
        document = replaced(document, where, chance.choice(HOSTILE))
    lines[number] = json.dumps(document)
    return "\n".join(lines).encode()


def header_bent(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file with its header's JSON bent, or any of its bytes."""
    size = int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        return bytes_bent(data, chance)
    header = json_bent(data[8 : 8 + size], chance)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def targets(root: Path) -> dict:
    """Name -> (file that is bent, how, read)."""
    model = Path(save_tiny(root / "model"))
    rows = [{"step": i, "train/loss": 1.5, "layers": [1.0, "nan"]} for i in range(5)]
    (root / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "any.json").write_text(json.dumps({"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}))
    lora, _ = SURGERIES["lora"](Model(LLAMA, random_params(LLAMA), None, ""), {"rank": 2})
    save_adapters(lora.config, lora.params, root / "adapter", str(model))
    tokenizer, gguf = byte_tokenizer(), root / "tiny.gguf"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    save_gguf(LLAMA, random_params(LLAMA), gguf, tokenizer=tokenizer)

    def both(path):
        read_gguf(path)
        gguf_tokenizer.read_tokenizer(path)

    adapter = root / "adapter"
    return {
        "json": (root / "any.json", json_bent, read_json),
        "metrics": (root / "metrics.jsonl", json_bent, read_metrics),
        "gguf": (gguf, bytes_bent, both),
        "safetensors": (model / "model.safetensors", header_bent, lambda _: read_pretrained(model)),
        "peft": (adapter / "adapter_config.json", json_bent, lambda _: load_model(adapter)),
    }


def fuzz(target: str, minutes: float, seed: int) -> collections.Counter:
    chance, found = random.Random(seed), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        path, bend, read = targets(Path(folder).resolve())[target]
        good, counts = path.read_bytes(), collections.Counter()
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            data = bend(good, chance)
            path.write_bytes(data)
            start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            kind = ""
            try:
                read(path)
                counts["read"] += 1
            except (ValueError, OSError) as error:
                counts["refused"] += 1
                if "\n" in str(error) or folder not in str(error):
                    kind = f"no line that names the file: {str(error)[:100]!r}"
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                place = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            if time.monotonic() - start > 20:
                kind = "longer than 20 s"
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 2**20:
                kind = "more than 1 GB"
            if kind and not found[kind]:
                kept = Path(f"/tmp/fuzz-{target}-{len(found)}")
                kept.write_bytes(data)
                print(f"{kind}: {kept}", flush=True)
            if kind:
                found[kind] += 1
    print(f"{target}, seed {seed}, {minutes:g} minutes: {dict(counts)}; {dict(found) or 'nothing'}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(len(fuzz(asked.target, asked.minutes, asked.seed)))
