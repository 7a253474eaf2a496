"""Hostile files of runs, corpora and adapters (for models: tests/io/test_hostile.py). Each value of
each file is replaced in turn by a wrong one.

Each file is read, or rejected in one line that names it; within 1 GB and 20 s. A fixed sample of
the cases runs always; all of them with RUN_SLOW=1.
"""

import json
import os
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_models import LLAMA, byte_tokenizer, config_of, places, random_params, replaced, save_tiny

import ffn_heterogeneity as fh
from ffn_heterogeneity.data.corpus.prepare import prepare
from ffn_heterogeneity.data.corpus.shards import open_corpus
from ffn_heterogeneity.io.hf.peft import save_adapters
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.io.workdir import finished, prepare_workdir
from ffn_heterogeneity.report.compare import write_report
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.calibration import read_rows, write_rows
from ffn_heterogeneity.tree import flatten

HOSTILE = [None, True, -1, 0, 0.5, 10**12, 2**63, 10**23, 10**400, 1e308, "", "x", "nan", "\ud800"]
HOSTILE += ["<b>|[a](b)", "../../x", "a\nb", "x" * 5000, [], [7], [[1.0], [2.0, 3.0]], [None], {}]
HOSTILE += [{"": 0}, {"x": {"y": []}}]
WHOLE = ["", "null", "7", "{", "[" * 100_000, '{"a": ' * 5000 + "1" + "}" * 5000, "\x00" * 99]
WHOLE += ['{"a": 1, "a": 2}', '{"a": ' + "9" * 5000 + "}", '{"a": NaN}', "\ufeff{}"]
ALL = os.environ.get("RUN_SLOW") == "1"


def bent(text, share):
    """Texts of JSON or JSON lines with one value replaced; and some that are not JSON."""
    lines = text.splitlines() if text.count("\n{") else [text]
    cases = [("whole", bad) for bad in WHOLE]
    for number in sorted({0, len(lines) - 1}):
        document = json.loads(lines[number])
        for path in places(document):
            for value in HOSTILE:
                one = json.dumps(replaced(document, path, value))
                new = "\n".join([*lines[:number], one, *lines[number + 1 :]])
                cases.append((f"{number} {path} {str(value)[:30]}", new))
    return random.Random(0).sample(cases, max(round(share * len(cases)), 12))


def all_bent(read, path, root, least=6, share=1.0 if ALL else 0.12):
    """Reads with each changed text instead of the file's; at least that many are rejected."""
    path, refused = Path(path), 0
    good = path.read_text()
    for name, text in bent(good, share):
        path.write_text(text)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        try:
            read()
        except (ValueError, OSError) as error:
            refused += 1
            said = str(error)
            assert said and "\n" not in said and str(root) in said, (name, said[:500])
        except BaseException as error:
            raise AssertionError(f"{path.name}, {name}: {error!r:.300}") from error
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, name
        assert time.perf_counter() - start < 20, name
    path.write_text(good)
    read()
    assert refused >= least


# ---- adapters


def test_adapters(tmp_path):
    base = save_tiny(tmp_path / "base")
    model, _ = SURGERIES["lora"](Model(LLAMA, random_params(LLAMA), None, ""), {"rank": 2})
    save_adapters(model.config, model.params, tmp_path / "adapter", str(base))
    config = tmp_path / "adapter" / "adapter_config.json"
    all_bent(lambda: load_model(tmp_path / "adapter"), config, tmp_path)


# ---- models with our structure/


@pytest.fixture
def pruned(tmp_path):
    """A model with P, masks and a native section in config.json."""
    model = fh.load_model(save_tiny(tmp_path / "base"))
    fused, _ = SURGERIES["fuse"](model, {"method": "fusion", "ratio": 0.5, "layers": "1-2"})
    fh.save_model(fused, tmp_path / "fused")
    return tmp_path / "fused"


def test_native_sections(pruned):
    assert [path for path in flatten(load_model(pruned).params) if path.endswith("neuron_scale")]
    all_bent(lambda: load_model(pruned), pruned / "config.json", pruned)


# ---- corpora and what is read of them


def test_manifests_of_token_shards(tmp_path):
    (tmp_path / "a.txt").write_text("one two three\n\nfour five\n")
    out = tmp_path / "tokens"
    prepare(str(tmp_path / "a.txt"), byte_tokenizer(), out, processes=1)

    def read():
        for shard in open_corpus(out).shards:
            assert shard.documents_count >= 0 and len(shard.document(0)) >= 0

    all_bent(read, out / "manifest.json", tmp_path)


def test_rows_of_the_models_own_text(tmp_path):
    model = Model(LLAMA, random_params(LLAMA), None, "tiny")
    rows = [np.array([LLAMA.bos_id, *range(5, 12)]) for _ in range(3)]
    write_rows(tmp_path / "own.jsonl", rows)
    path = tmp_path / "own.jsonl"
    all_bent(lambda: read_rows(model, str(path), 12), path, tmp_path)


# ---- work directories


@pytest.mark.parametrize("name", ["config.json", "inputs.json", "results.json"])
def test_work_directories(tmp_path, name):
    (tmp_path / "text.txt").write_text("x")
    config = {"steps": 10, "optimizer": {"name": "adamw", "betas": (0.9, 0.99)}}
    config |= {"text": str(tmp_path / "text.txt"), "seeds": ()}
    run = tmp_path / "run"
    prepare_workdir(run, config)
    write_results(run, {"nll": 1.0, "layers": [1.0, 2.0]})

    def read():
        prepare_workdir(run, config)
        finished(run)

    all_bent(read, run / name, tmp_path, 2)


# ---- reports


FILES = ["config.json", "results.json", "rows.jsonl", "metrics.jsonl", "inputs.json"]


@pytest.mark.parametrize("name", FILES)
def test_reports(tmp_path, name):
    config = config_of("nucl_finetune", "tiny,text").to_dict()
    small = {key: config[key] for key in ("model", "seed", "steps", "data")}
    for run in ("one", "two"):
        folder = tmp_path / run
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(small))
        (folder / "inputs.json").write_text('{"data.path": "0123"}')
        more = {"validation/nll": 2.0, "nucl/entropy": [1.0]}
        curve = [{"step": i, "train/loss": 1.0 / i, **more} for i in range(1, 4)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in curve))
        last = {"step": 3, "validation/nll": 2.0}
        best = {"step": 3, "metric": "validation/nll", "value": 2.0}
        tasks = {"piqa": {"accuracy": 0.5, "n": 10}}
        write_results(folder, {"final": last, "best": best, "layers": [1.0], "tasks": tasks})
    (tmp_path / "sweep.json").write_text('{"sweep": "s", "kind": "train", "points": []}')

    def read():
        page = write_report([os.fspath(tmp_path / run) for run in ("one", "two")], tmp_path / "out")
        assert "<b>" not in page.replace("\\<b>", "") and "](b)" not in page
        fh.results(tmp_path)
        fh.curves(tmp_path)

    # (Each draws a figure.)
    all_bent(read, tmp_path / "two" / name, tmp_path, 1, 0.4 if ALL else 0.03)
