"""Five commands killed eight times each with SIGKILL, in the middle of a save if possible."""

import json
import random
import re
import shutil
import signal
import time

import pytest
from lives import Launch, files, half_written
from tiny_models import TEXT, WIDE, save_tiny
from tiny_runs import flags_of, write_rows

KILLS = 8
OFTEN = {"batch_size": 2, "eval__every": 8, "checkpoint__every": 2, "tensorboard": False}
TRAINING = OFTEN | {"steps": 60, "accumulation": 1, "seq_len": 96}
TRAINING["data__path"] = "{folder}/alpaca.jsonl"
POINTS = OFTEN | {"steps": 24, "seq_len": 32, "data__path": "{folder}/text.txt"}
POINTS |= {"data__passage_chars": 400, "data__validation_fraction": 0.2}
CORPUS = {"input": "{folder}/corpus.jsonl", "shard_mb": 0.01, "tokenizer": "{folder}/model"}
SFT, TEXTS = "configs/macdrop_sft.py:{folder}/model", "configs/nucl_finetune.py:{folder}/model,text"
# Name -> (script, flags, largest number of temporary files before a kill).
COMMANDS = {
    "macdrop": ("train", flags_of(f"{SFT},lora,macdrop", **TRAINING), 8),
    "qlora": ("train", flags_of(f"{SFT},lora,nf4", **TRAINING), 8),
    "sweep": ("sweep", [*flags_of(f"{TEXTS},lora", **POINTS), "--sweep=targets"], 12),
    "compress": ("compress", flags_of("configs/prune.py", model="{folder}/model"), 0),
    "prepare": ("prepare_data", flags_of(**CORPUS), 20),
}
TIMED = re.compile("seconds|per_second|timing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the commands' inputs; `compiled` has the first one's compiled programs."""
    folder, words = tmp_path_factory.mktemp("read"), TEXT.split()
    save_tiny(folder / "model", WIDE)
    (folder / "text.txt").write_text(TEXT)
    texts = (" ".join(words[i : i + 4]) for i in range(80))
    pairs = [{"instruction": one, "input": "", "output": one[::-1]} for one in texts]
    write_rows(folder / "alpaca.jsonl", pairs)
    documents = [{"text": f"{i} {' '.join(words[i % 90 :][:60])}"} for i in range(3000)]
    write_rows(folder / "corpus.jsonl", documents)
    return folder


def untimed(value):
    """The value without times; a row of results with a time is left out."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if not TIMED.search(k)}
    if isinstance(value, list):
        return [untimed(v) for v in value]
    return value


def read(path):
    if path.suffix not in (".json", ".jsonl"):
        return path.read_bytes()
    text = path.read_text()
    if path.suffix == ".json":
        return untimed(json.loads(text))
    rows = [json.loads(line) for line in text.splitlines()]
    return [untimed(row) for row in rows if not TIMED.search(str(row.get("what")))]


def left(workdir):
    """Every file's content; of checkpoints only the names, because the model has their states."""
    out = {str(path.relative_to(workdir)): path for path in workdir.rglob("*") if path.is_file()}
    differ = re.compile("checkpoints|command.txt|README.md")  # paths and times
    return {name: read(path) for name, path in out.items() if not differ.search(name)}


def kill(life, kind, chance, most):
    """Kills at its moment; returns whether it was within a save, or None if it was too late."""
    born = time.time()  # ignores temporary files of an earlier process
    if kind == "start":
        time.sleep(chance.uniform(0, 3))
    elif most:
        life.wait_for_halves(chance.randint(1, most))
    else:
        life.wait_for_export(chance.choice((0, 1, 4)))
    code, output = life.end(signal.SIGKILL)
    if code == 0:
        return None
    assert code == -signal.SIGKILL, output
    return bool(half_written(life.workdir, born))


@pytest.mark.slow
def test_forty_commands_killed(folder, tmp_path):
    chance, inside = random.Random(3), dict.fromkeys(COMMANDS, 0)
    for name, (script, flags, most) in COMMANDS.items():
        flags = [flag.format(folder=folder) for flag in flags]
        plain, workdir = tmp_path / name, tmp_path / f"{name}_killed"
        code, output = Launch(plain, flags, folder / "compiled", script).end()
        assert code == 0, output
        for number in range(KILLS):
            kind, landed = "start" if number % 4 == 0 else "save", None
            while landed is None:
                if (workdir / "results.json").exists():  # it ended before its kill: start again
                    shutil.rmtree(workdir)
                life = Launch(workdir, flags, folder / "compiled", script)
                landed = kill(life, kind, chance, most)
            inside[name] += landed and kind == "save"
        code, output = Launch(workdir, flags, folder / "compiled", script).end()
        assert code == 0, output
        assert files(workdir) == files(plain), name
        assert left(workdir) == left(plain), name
    print(inside)
    assert sum(inside.values()) >= 15, inside
