"""configs/shrink.py: a smaller model without data, trained on the text that it wrote."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tiny_models import REPOSITORY, config_of, our_logits, torch_logits, torch_model
from tiny_runs import flags_of, refused

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import experiment
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery.calibration import write_rows
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
SMALL = {"shrink__calibration_tokens": 600, "recover__steps": 4, "recover__batch_size": 2}
SMALL |= {"recover__seq_len": 64, "recover__optimizer__warmup_steps": 1, "recover__eval__every": 2}


def shrunk(files, workdir, words="", **changes):
    config = config_of("shrink", f"{files[0]}{words}", **(SMALL | changes))
    return experiment.run(config, workdir)["stages"]


def test_a_sweep_over_it_is_checked_before_there_is_a_text(files):
    experiment.examine(config_of("shrink", str(files[0]), **SMALL))
    missing = config_of("shrink", str(files[0]), **SMALL, recover__data__path="nowhere.jsonl")
    refused("nowhere.jsonl", experiment.examine, missing)


def leaves_of(directory):
    return flatten(load_model(str(directory)).params)


def test_it_trains_on_what_it_wrote_and_folds_it(torch, files, tmp_path, capsys):
    last = {"recover__export__weights": "last", "recover__optimizer__learning_rate": 0.1}
    scored = {"text": str(files[1]), "window": 16, "window_every": 3}
    made = shrunk(files, tmp_path, **last, **scored)
    rows = [json.loads(x)["tokens"] for x in (tmp_path / "00_shrink/own_text.jsonl").open()]
    assert sum(len(row) - 1 for row in rows) == 600
    config = json.loads((tmp_path / "01_recover" / "config.json").read_text())
    assert config["data"]["path"] == str(tmp_path / "00_shrink" / "own_text.jsonl")
    assert made["shrink"]["criterion"] == "optipfair" and made["shrink"]["compensated"]
    # LoRA alone trained, and it is in the weights of the last stage.
    shrink, recover, fold = (tmp_path / x / "model" for x in ("00_shrink", "01_recover", "02_fold"))
    before, trained, after = map(leaves_of, (shrink, recover, fold))
    assert any(path.endswith("lora_b") and np.any(leaf) for path, leaf in trained.items())
    assert all(np.array_equal(trained[path], leaf) for path, leaf in before.items())
    assert after.keys() == before.keys()
    assert any(not np.array_equal(after[path], leaf) for path, leaf in before.items())
    line = capsys.readouterr().out.splitlines()[-1]
    ends = made["shrink"]["perplexity_before"], made["fold"]["perplexity_after"]
    change = ends[1] / ends[0] - 1
    assert line.endswith(f"perplexity {ends[0]:,.4f} -> {ends[1]:,.4f} ({change:+.1%})")
    sizes = made["shrink"]["parameters_before"], sum(leaf.size for leaf in after.values())
    assert line.startswith(f"{sizes[0]:,} -> {sizes[1]:,} parameters")
    tokens = np.random.default_rng(0).integers(2, 258, (2, 12))
    theirs = torch_logits(torch, torch_model(torch, fold), tokens)
    model = load_model(str(fold))
    np.testing.assert_allclose(our_logits(model.config, model.params, tokens), theirs, atol=1e-4)


def test_blocks_go_instead_and_all_weights_train(files, tmp_path):
    last = {"recover__export__weights": "last"}
    made = shrunk(files, tmp_path, ",depth,full", depth=2, **last)
    assert len(made["shrink"]["dropped"]) == 2
    before, after = (load_model(str(tmp_path / x / "model")) for x in ("00_shrink", "02_fold"))
    assert len(unstack(after.params)["layers"]) == before.config.n_layers == 2
    trained = flatten(after.params)
    assert not any(np.array_equal(x, trained[path]) for path, x in flatten(before.params).items())


def test_nothing_trains(files, tmp_path):
    assert list(shrunk(files, tmp_path, ",none", multiple=8)) == ["shrink"]
    assert {x % 8 for x in load_model(str(tmp_path / "00_shrink/model")).config.ffn_widths} == {0}


def test_a_rule_without_text_leaves_none_to_train_on(files, tmp_path):
    """Said before the training, which goes on with another path."""
    plain = {"shrink__criterion": "entropy", "shrink__compensation": "none"}
    message = "'recover': data.path={shrink}/own_text.jsonl: that stage has not written it"
    refused(message, shrunk, files, tmp_path / "a", **plain)
    write_rows(tmp_path / "rows.jsonl", [np.arange(2, 60)] * 20)
    plain["recover__data__path"] = str(tmp_path / "rows.jsonl")
    assert shrunk(files, tmp_path / "a", **plain)["recover"]["final"]


def test_what_is_wrong_is_said(files, tmp_path):
    refused("write <model>", config_of, "shrink", f"{files[0]},half")
    refused("write <model>", config_of, "shrink", f"{files[0]},full,none")
    message = "stage 'recover': data.path: no stage 'prune' is before it"
    path = {"recover__data__path": "{prune}/own_text.jsonl"}
    refused(message, shrunk, files, tmp_path / "a", **path)
    for line, words in (('{"tokens": [0, -1]}', "holds -1"), ('{"tokens": 3}', "expected a list")):
        (tmp_path / "rows.jsonl").write_text(f"{line}\n")
        changes = {"recover__data__path": str(tmp_path / "rows.jsonl"), "stages": ("recover",)}
        refused(f"rows.jsonl.*{words}", shrunk, files, tmp_path / line[-4:-1], **changes)


@pytest.mark.slow
def test_killed_at_random_in_each_stage_it_ends_with_the_same_bits(files, tmp_path):
    rng, flags = (
        np.random.default_rng(),
        flags_of(f"{REPOSITORY}/configs/shrink.py:{files[0]}", **(SMALL | {"recover__steps": 30})),
    )
    command = [sys.executable, REPOSITORY / "scripts" / "train.py", *flags]
    options = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*command, "--workdir=whole"], check=True, **options)
    for stage in ("00_shrink", "01_recover", "02_fold"):
        seconds = json.loads((tmp_path / "whole" / stage / "done.json").read_text())["seconds"]
        process = subprocess.Popen([*command, "--workdir=killed"], **options)
        while not (tmp_path / "killed" / stage).exists() and process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, "--workdir=killed"], check=True, **options)
    for stage in ("00_shrink", "01_recover", "02_fold"):
        one, other = (leaves_of(tmp_path / name / stage / "model") for name in ("whole", "killed"))
        assert one.keys() == other.keys()
        assert all(np.array_equal(leaf, other[path]) for path, leaf in one.items()), stage
    assert os.listdir(tmp_path / "whole") == os.listdir(tmp_path / "killed")
