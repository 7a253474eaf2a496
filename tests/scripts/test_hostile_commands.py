"""Commands that cannot run: code 2, one last line, no traceback, no result; fast, low memory."""

import gzip
import json
import os

import pytest
from tiny_models import run_script, save_tiny
from tiny_runs import bounded, flags_of

OWN = {"data.path": "{text}", "data.validation_fraction": 0, "tensorboard": "false"}
OWN |= {"steps": 1, "seq_len": 16, "batch_size": 1}
TRAIN = ("train", *flags_of("configs/nucl_finetune.py:{model},text", **OWN))
PREPARE = ("prepare_data", "--config.input={text}", "--config.tokenizer={model}")
PERPLEXITY = ("evaluate", *flags_of(model="{model}", text="{text}", window=16))
COMPRESS = ("compress", "--config.model={model}")
FUSE = ("compress", "--config=configs/fuse.py", "--config.model={model}")
ATTACK = ("compress", "--config=configs/attack.py", "--config.model={model}")
BIG = "1" + "0" * 400
# (command, words of its error)
CASES = [
    ((*TRAIN, f"--config.seed={BIG}"), "seed"),
    ((*TRAIN, "--config.seed=-1"), "seed=-1"),
    ((*TRAIN, f"--config.steps={10**15}"), "steps"),
    ((*TRAIN, "--config.steps=-3"), "steps=-3"),
    ((*TRAIN, f"--config.batch_size={10**12}"), "batch_size"),
    ((*TRAIN, f"--config.seq_len={10**12}"), "seq_len"),
    ((*TRAIN, "--config.seq_len=0"), "seq_len=0"),
    ((*TRAIN, "--config.optimizer.learning_rate=nan"), "learning_rate"),
    ((*TRAIN, "--config.losses.nucl.weight=inf"), "weight"),
    ((*TRAIN, "--config.dropout=7"), "dropout"),
    ((*TRAIN, f"--config.mesh.data={10**9}"), "mesh"),
    ((*TRAIN, "--config.data.path={fifo}"), "fifo"),
    ((*TRAIN, "--config.data.path={zero}"), "zero"),
    ((*TRAIN, "--config.data.path={deep}"), "deep.jsonl, line 2"),
    ((*TRAIN, "--config.data.path={half}"), "half.jsonl"),
    ((*TRAIN, "--config.data.path={binary}"), "not UTF-8"),
    ((*TRAIN, "--config.data.path={folder}"), "folder"),
    ((*TRAIN, "--config.data.passage_chars=-5"), "passage_chars"),
    ((*TRAIN, "--config.eval.every=-1"), "every"),
    ((*TRAIN, "--config.checkpoint.every=-1"), "every"),
    ((*PREPARE, "--config.chunk_mb=inf"), "chunk_mb"),
    ((*PREPARE, "--config.input={deep}"), "deep.jsonl, line 2: not JSON"),
    ((*PREPARE, "--config.input={gzip}"), "not a readable .gz"),
    ((*PREPARE, "--config.input={fifo}"), "fifo"),
    ((*PREPARE, "--config.passage_chars=0"), "passage_chars"),
    ((*PREPARE, "--config.processes=-2"), "processes"),
    ((*PREPARE, "--config.tokenizer=train", "--config.min_frequency=-1"), "min_frequency"),
    ((*PREPARE, "--config.tokenizer=train", f"--config.vocab_size={BIG}"), "vocab_size"),
    ((*PERPLEXITY, "--config.text={fifo}"), "fifo"),
    ((*PERPLEXITY, "--config.window=-7"), "window"),
    ((*PERPLEXITY, f"--config.window={10**12}"), "window"),
    ((*PERPLEXITY, "--config.token_ids={npy}", "--config.text="), "huge.npy"),
    ((*COMPRESS, "--config.ratio=nan"), "ratio"),
    ((*COMPRESS, "--config.layers=0-999999999999"), "layers"),
    ((*COMPRESS, f"--config.layers={BIG}"), "layers"),
    ((*FUSE, f"--config.n_init={10**12}"), "n_init"),
    ((*FUSE, "--config.ratio=1e999"), "ratio"),
    ((*ATTACK, f"--config.k={10**9}"), "k="),
    ((*COMPRESS[:1], "--config.model={bomb}"), "tokenizer.json is stopped"),
    ((*COMPRESS[:1], "--config.model={pipe}"), "regular file"),
    (("train", "--config={own}"), "own.py, line 3: ZeroDivisionError"),
    (("train", "--config={syntax}"), "syntax.py, line 2"),
    (("report", "{run}"), "results.json"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Hostile files by name, and a good model and text."""
    root = tmp_path_factory.mktemp("hostile")
    model = root / "model"
    save_tiny(model)
    paths = {"model": model, "folder": root / "folder", "zero": root / "zero.txt"}
    (root / "folder").mkdir()
    (root / "zero.txt").symlink_to("/dev/zero")
    for name, content in {
        "text.txt": b"one two three. " * 200,
        "deep.jsonl": b'{"text": "x"}\n{"text": ' + b"[" * 100_000,
        "half.jsonl": b'{"text": "\\ud800"}\n',
        "binary.txt": b"\xff\xfe" * 100,
        "gzip.txt.gz": gzip.compress(b"x" * 1000)[:-9],
        "own.py": b"def get_config():\n    x = 1\n    return x / 0\n",
        "syntax.py": b"def get_config():\n    return (\n",
        "npy.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': "
        b"(200000000000000,), }".ljust(127)
        + b"\n",
    }.items():
        (root / name).write_bytes(content)
        paths[name.partition(".")[0]] = root / name
    paths["npy"] = (root / "npy.npy").rename(root / "huge.npy")
    os.mkfifo(root / "fifo.txt")
    paths["fifo"] = root / "fifo.txt"
    for name in ("bomb", "pipe"):
        save_tiny(root / name)
        paths[name] = root / name
    path = root / "bomb" / "tokenizer.json"
    more = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    bomb = {"normalizer": {"type": "Sequence", "normalizers": [more] * 5}}
    path.write_text(json.dumps(json.loads(path.read_text()) | bomb))
    (root / "pipe" / "tokenizer.json").unlink()
    os.mkfifo(root / "pipe" / "tokenizer.json")
    (root / "pipe" / "vocab.json").write_text("{}")
    (root / "run").mkdir()
    (root / "run" / "config.json").write_text("{}")
    (root / "run" / "results.json").write_text("[" * 100_000)
    paths["run"] = root / "run"
    return paths


@pytest.mark.parametrize("command, says", CASES, ids=range(len(CASES)))
def test_one_line(places, tmp_path, command, says):
    script, *flags = (word.format(**places) for word in command)
    more = "--output" if script == "report" else "--workdir"
    with bounded():
        done = run_script(script, *flags, f"{more}={tmp_path / 'out'}")
    assert done.code == 2 and "Traceback" not in done.err, done.err[-2000:]
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("error: ") and says in last and len(last) < 1000, last
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in left if path.name in ("results.json", "rows.jsonl")], left
