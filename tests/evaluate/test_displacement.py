"""`analyze.py:displacement` against float64 hidden states of torch; checkpoints; bad input."""

from __future__ import annotations

import dataclasses
import json

import jreg_oracle as oracle
import numpy as np
import pytest
from tiny_models import LLAMA, byte_tokenizer, config_of, random_params, run_script, tiny_of

from ffn_heterogeneity.evaluate.displacement import displacements
from ffn_heterogeneity.evaluate.run import run
from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.stack import restack, unstack

quickly = pytest.mark.usefixtures("compiled_quickly")
RATES = {"zeta_L": 0, "zeta_L-1": 1, "zeta_L-2": 2}


def torch_psi(torch, directory, rows) -> dict[str, np.ndarray]:
    """Both readings from transformers' float64 hidden states of a model in a directory."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    body, unnormed = model.base_model, []
    final = next(getattr(body, n) for n in ("norm", "final_layer_norm") if hasattr(body, n))
    final.register_forward_pre_hook(lambda _, inputs: unnormed.append(inputs[0]))
    sums = {"before_final_norm": 0.0, "after_final_norm": 0.0}
    with torch.no_grad():
        for row in rows:
            states = model(torch.tensor(row[None]), output_hidden_states=True).hidden_states
            states = [state.numpy() for state in states]
            counted = np.ones(states[0].shape[:2], bool)
            sums["after_final_norm"] += oracle.displacement(states, counted)
            states[-1] = unnormed.pop().numpy()
            sums["before_final_norm"] += oracle.displacement(states, counted)
    return {name: total / len(rows) for name, total in sums.items()}


def check(found: dict, expected: dict[str, np.ndarray]) -> None:
    for reading, psi in expected.items():
        np.testing.assert_allclose(found[reading]["psi"], psi, atol=1e-6)
        for name, back in RATES.items():
            rate = oracle.jump_rate(psi, len(psi) - back)
            assert found[reading][name] == pytest.approx(rate, abs=1e-4), (reading, name)


@quickly
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "olmo"])
def test_both_readings_equal_torch(torch, tmp_path, family):
    config = dataclasses.replace(tiny_of(family, layers=7), tied=family != "gpt_neox")
    save_pretrained(config, random_params(config), tmp_path / "model")
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (3, 12))
    np.save(tmp_path / "ids.npy", rows)
    found = run(
        config_of("analyze", "displacement", model=str(tmp_path / "model"), batch_size=2,
                  token_ids=str(tmp_path / "ids.npy")), tmp_path / "run",
    )  # fmt: skip
    check(found, torch_psi(torch, tmp_path / "model", rows))
    assert found["tokens"] == rows.size and found["windows"] == 3
    psi = np.array(found["before_final_norm"]["psi"])
    np.testing.assert_allclose(found["block_influence"], 2 * psi)
    assert found["least_influential"] == np.argsort(psi).tolist()
    assert found["before_final_norm"]["psi"][:-1] == found["after_final_norm"]["psi"][:-1]
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert written["before_final_norm"] == found["before_final_norm"]
    assert (tmp_path / "run" / "displacement.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_equal_torch(torch, request, shared_data, tmp_path, name):
    """Windows of WikiText-2: Psi and zeta to 1e-4 (of 1, and of 100 percent)."""
    gguf = request.getfixturevalue(f"{name}_gguf")
    text = shared_data / "wikitext2" / "test.raw.txt"
    found = run(
        config_of("analyze", "displacement", model=str(gguf), text=str(text), window=255,
                  max_windows=4), tmp_path / "run",
    )  # fmt: skip
    from ffn_heterogeneity.data.windows import text_windows

    model = load_model(gguf)
    save_pretrained(model.config, model.params, tmp_path / "model", dtype="float32")
    rows = text_windows(text.read_text(), model.tokenizer, 255, max_windows=4)
    expected = torch_psi(torch, tmp_path / "model", rows)
    for reading, psi in expected.items():
        error = np.abs(np.array(found[reading]["psi"]) - psi).max()
        assert error <= 1e-4, (reading, error)
        rates = {rate: oracle.jump_rate(psi, len(psi) - back) for rate, back in RATES.items()}
        for rate, value in rates.items():
            assert abs(found[reading][rate] - value) <= 1e-2, (reading, rate)  # percent: 1e-4 of 1
        print(name, reading, {rate: round(value, 3) for rate, value in rates.items()}, error)


@quickly
def test_checkpoints_of_a_run_give_a_curve(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 20)
    for step in (100, 20, 3):
        save_pretrained(
            LLAMA, random_params(LLAMA, seed=step), tmp_path / "run" / f"step_{step}",
            tokenizer=byte_tokenizer(),
        )  # fmt: skip
    (tmp_path / "run" / "notes").mkdir()
    config = config_of("analyze", "displacement", model=str(tmp_path / "run"), text=str(text),
                       window=20, max_windows=2)  # fmt: skip
    found = run(config, tmp_path / "out")["checkpoints"]
    assert [row["step"] for row in found] == [3, 20, 100]
    config.model = str(tmp_path / "run" / "step_20")
    alone = run(config, tmp_path / "alone")
    assert alone["after_final_norm"] == found[1]["after_final_norm"]
    assert (tmp_path / "out" / "displacement.png").exists()
    # The last token of each window alone.
    config.positions = "last"
    last = run(config, tmp_path / "last")
    assert last["before_final_norm"] != alone["before_final_norm"]
    assert (alone["tokens"], last["tokens"]) == (42, 2), "those that are averaged"


@quickly
def test_a_stopped_series_goes_on(tmp_path):
    """What was done is read again; its checkpoint need not be there any more."""
    np.save(tmp_path / "ids.npy", np.arange(12).reshape(2, 6))
    for step in (3, 20):
        save_pretrained(
            LLAMA, random_params(LLAMA, seed=step), tmp_path / "run" / f"step_{step}"
        )  # fmt: skip
    config = config_of("analyze", "displacement", model=str(tmp_path / "run"),
                       token_ids=str(tmp_path / "ids.npy"))  # fmt: skip
    weights = tmp_path / "run" / "step_20" / "model.safetensors"
    hidden = weights.rename(tmp_path / "away")
    with pytest.raises(ValueError, match="step_20"):
        run(config, tmp_path / "out")
    assert not (tmp_path / "out" / "results.json").exists()
    hidden.rename(weights)
    (tmp_path / "run" / "step_3" / "model.safetensors").unlink()
    found = run(config, tmp_path / "out")["checkpoints"]
    assert [row["step"] for row in found] == [3, 20]
    config.model = str(weights.parent)
    assert run(config, tmp_path / "alone")["after_final_norm"] == found[1]["after_final_norm"]


@quickly
def test_bad_input_is_named(tmp_path):
    save_pretrained(LLAMA, random_params(LLAMA), tmp_path / "model")
    np.save(tmp_path / "far.npy", np.array([[1, 2, 258]]))
    np.save(tmp_path / "flat.npy", np.array([1, 2]))
    flags = [f"--config.model={tmp_path / 'model'}", f"--workdir={tmp_path / 'run'}"]
    for extra, message in (
        ([], "give exactly one of --config.text=<file> and --config.token_ids"),
        ([f"--config.token_ids={tmp_path / 'far.npy'}"], "token id 258 is outside the vocabulary"),
        ([f"--config.token_ids={tmp_path / 'flat.npy'}"], r"shape (2,): [windows, length >= 2]"),
        ([f"--config.text={__file__}"], "has no tokenizer"),
        ([f"--config.text={__file__}", "--config.positions=some"], "positions='some'"),
    ):
        if "positions" in str(extra):
            save_pretrained(LLAMA, random_params(LLAMA), tmp_path / "model",
                            tokenizer=byte_tokenizer(), overwrite=True)  # fmt: skip
        config = "--config=configs/analyze.py:displacement"
        done = run_script("analyze", config, *flags, *extra)
        assert message in done.error, done.error
        assert not (tmp_path / "run" / "results.json").exists()
    tree = unstack(random_params(LLAMA))
    tree["layers"][2]["ffn"]["down"]["kernel"][0] = np.nan
    rows = np.ones((1, 4), np.int32)
    with pytest.raises(ValueError, match="before_final_norm of layer 2 is nan"):
        displacements(LLAMA, restack(LLAMA, tree), rows, progress=None)
