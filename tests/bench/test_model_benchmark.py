"""The timed calls compute the same as the peer's; rounds are saved and resumed."""

import dataclasses

import numpy as np
import pytest
from tiny_models import LLAMA, config_of, random_params, save_tiny, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.bench import cases as bench
from ffn_heterogeneity.bench.page import write_page
from ffn_heterogeneity.bench.peer import Torch
from ffn_heterogeneity.io.files import write_json

pytestmark = pytest.mark.usefixtures("compiled_quickly")
MODEL = dataclasses.replace(LLAMA, bos_id=None, eos_id=None)
SIZES = {"batch": 2, "seq_len": 12, "windows": 4, "window": 70, "repetitions": 2}


@pytest.fixture(scope="module", params=("llama", "t5"))
def both(torch, request):
    config = config_of("benchmark", **SIZES)
    model = MODEL if request.param == "llama" else tiny_of("t5", 4)
    ours = bench.Ours(model, config)
    return ours, Torch(model, ours.params, batch=2)


OFTEN = ("forward", "train step", "generate 1")
CALLS = [name for name in bench.CALLS if name not in [*bench.STEPS][1:]]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CALLS if name not in OFTEN]


@pytest.mark.parametrize("call", [*OFTEN, *SLOW])
def test_the_peer_computes_the_same(both, call):
    ours, peer = both
    rows = ours.rows(call)
    if call == "perplexity" and ours.model.kind == "encoder_decoder":
        config = config_of("benchmark", **SIZES)
        refused("encoder-decoder: perplexity", bench.time_model, config, None, model=ours.model)
        return
    mine, theirs = (one.call(call, "float32", rows)() for one in (ours, peer))
    if call.startswith("generate"):
        theirs = theirs.numpy()[:, -bench.NEW :]
        assert theirs.shape == (len(rows), bench.NEW)
        np.testing.assert_array_equal([one.tokens for one in mine], theirs)
    else:
        mine = mine["perplexity"] if call == "perplexity" else mine
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)


def test_rounds_are_kept_and_tables_made(tmp_path, capsys):
    calls = ("forward", "train step", "train step + JREG")
    config = config_of("benchmark", calls=calls, **SIZES)
    results = bench.time_model(config, tmp_path, model=MODEL)
    assert "warm-up: forward, float32" in capsys.readouterr().err
    first, second = sorted((tmp_path / "rounds").iterdir())
    recorded = first.read_text()
    second.unlink()
    again = bench.time_model(config, tmp_path, model=MODEL)
    assert first.read_text() == recorded and second.exists()
    for name, seconds in results["seconds"].items():
        assert again["seconds"][name][0] == seconds[0] and len(seconds) == 2
    rows = {row[0] for one in again["tables"] for row in one["rows"]}
    assert {
        "train step + JREG, bfloat16 / train step, bfloat16",
        "forward, float32 / bfloat16",
    } <= rows

    path = tmp_path / "results.json"
    write_json(path, {"benchmark": "model", **again})
    page = write_page([str(path)], tmp_path)
    machine = "[{processor}, {cores} cores, {units}](results.json)".format(**again["machine"])
    assert page.count(f"| {machine} ") == 2  # of a term, of bfloat16: without a peer
    ratios = {row[0]: row[1] for row in again["tables"][1]["rows"]}
    for columns in (("JREG, bfloat16", "JREG, float32"), ("forward", "train step")):
        assert " | ".join(columns) in " ".join(page.split())
    assert ratios.pop("train step + JREG, float32 / bfloat16") not in page
    assert all(ratio in page for ratio in ratios.values())


@pytest.mark.slow
def test_a_second_model_takes_turns_in_the_same_rounds(torch, tmp_path):
    save_tiny(tmp_path / "other", LLAMA, random_params(LLAMA))
    config = config_of("benchmark", calls=("forward",), dtypes=("float32",), **SIZES)
    config.beside = str(tmp_path / "other")
    name = "forward, float32"
    results = bench.time_model(config, tmp_path, model=MODEL)
    seconds = results["seconds"]
    ratio = np.median(seconds[name] / seconds[f"{config.beside}: {name}"])
    [row] = results["tables"][1]["rows"]
    assert row[0] == f"{name} over {config.beside}" and row[1].startswith(f"{ratio:.3f}")
    write_json(tmp_path / "results.json", {"benchmark": "model", **results})
    page = write_page([str(tmp_path / "results.json")], tmp_path)
    assert "Is a model faster than another?" in page and row[1] in page

    config.peer = "transformers"
    results = bench.time_model(config, tmp_path / "run", model=tiny_of("t5", 4))
    seconds = results["seconds"]
    assert len(seconds) == 4
    ahead = [
        seconds[f"{who}torch: {name}"] / seconds[who + name] for who in ("", f"{config.beside}: ")
    ]
    [row] = results["tables"][1]["rows"]
    assert row[0] == f"{name} / {config.beside}'s"
    assert row[1].startswith(f"{np.median(ahead[0] / ahead[1]):.3f}")
    write_json(tmp_path / "results.json", {"benchmark": "model", **results})
    page = write_page([str(tmp_path / "results.json")], tmp_path)
    assert "as far ahead of torch as another" in page and row[1] in page


def test_adapters_stand_beside_lora(tmp_path):
    calls = [name for name in bench.STEPS if " of " in name]
    config = config_of("benchmark", calls=tuple(calls), **SIZES)
    ratios = bench.time_model(config, tmp_path, model=MODEL)["tables"][1]["rows"]
    assert [row[0] for row in ratios if "bfloat16" not in row[0]] == [
        f"{name}, float32 / train step of LoRA, float32" for name in calls[1:]
    ]
