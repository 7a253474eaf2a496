"""`analyze.py:displacement` against float64 hidden states of torch; checkpoints; bad input."""

import dataclasses
import json

import jreg_oracle as oracle
import numpy as np
import pytest
from tiny_models import LLAMA, config_of, random_params, run_script, save_tiny, tiny_of
from tiny_runs import read_rows, refused

from ffn_heterogeneity.evaluate.displacement import displacements
from ffn_heterogeneity.evaluate.run import run
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.stack import restack, unstack

quickly = pytest.mark.usefixtures("compiled_quickly")
RATES = {"zeta_L": 0, "zeta_L-1": 1, "zeta_L-2": 2}


def torch_psi(torch, directory, documents) -> dict[str, dict[str, np.ndarray]]:
    """{positions: {reading: Psi}} from transformers' float64 hidden states, each document alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    body, unnormed = model.base_model, []
    final = next(getattr(body, n) for n in ("norm", "final_layer_norm") if hasattr(body, n))
    final.register_forward_pre_hook(lambda _, inputs: unnormed.append(inputs[0]))
    readings, tokens = ("before_final_norm", "after_final_norm"), sum(map(len, documents))
    psi = {positions: dict.fromkeys(readings, 0.0) for positions in ("all", "last")}
    with torch.no_grad():
        for ids in documents:
            states = model(torch.tensor(ids[None]), output_hidden_states=True).hidden_states
            after = [state.numpy() for state in states]
            before = [*after[:-1], unnormed.pop().numpy()]
            counted = np.ones((1, len(ids)), bool)
            last = np.arange(len(ids))[None] == len(ids) - 1
            for name, states in zip(readings, (before, after), strict=True):
                share = len(ids) / tokens
                psi["all"][name] += share * oracle.displacement(states, counted)
                psi["last"][name] += oracle.displacement(states, last) / len(documents)
    return psi


def check(result: dict, expected: dict[str, dict[str, np.ndarray]]) -> float:
    """Checks Psi and its summaries against the oracle to 1e-6; returns the largest error."""
    error = 0.0
    for measured, readings in ((result, expected["all"]), (result["last"], expected["last"])):
        for name, psi in readings.items():
            np.testing.assert_allclose(measured[name]["psi"], psi, atol=1e-6, rtol=0)
            error = max(error, np.abs(np.array(measured[name]["psi"]) - psi).max())
            for rate, back in RATES.items():
                exact = oracle.jump_rate(psi, len(psi) - back)
                assert measured[name][rate] == pytest.approx(exact, abs=6e-4), (name, rate)
    return error


def analysed(workdir, model, **settings):
    return run(config_of("analyze", "displacement", model=str(model), **settings), workdir)


@quickly
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "olmo"])
def test_all_readings_equal_torch(torch, tmp_path, family):
    config = dataclasses.replace(tiny_of(family, layers=7), tied=family != "gpt_neox")
    save_pretrained(config, random_params(config), tmp_path / "model")
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (3, 12))
    np.save(tmp_path / "ids.npy", rows)
    settings = {"token_ids": str(tmp_path / "ids.npy"), "batch_size": 2}
    result = analysed(tmp_path / "run", tmp_path / "model", **settings)
    check(result, torch_psi(torch, tmp_path / "model", rows))
    assert (result["tokens"], result["last"]["tokens"], result["windows"]) == (36, 3, 3)
    psi = np.array(result["before_final_norm"]["psi"])
    np.testing.assert_allclose(result["block_influence"], 2 * psi)
    assert result["least_influential"] == np.argsort(psi).tolist()
    assert result["before_final_norm"]["psi"][:-1] == result["after_final_norm"]["psi"][:-1]
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert written["last"] == result["last"]
    assert (tmp_path / "run" / "displacement.png").stat().st_size > 5000


LINES = ["a word", "the quick brown fox jumps over the lazy dog", "é", "so it was"]


def write_lines(path, texts, field="text"):
    path.write_text("\n".join(json.dumps({field: text, "n": 1}) for text in texts) + "\n\n")
    return str(path)


@quickly
@pytest.mark.parametrize("bos", ["segment", "none", "auto"])
def test_documents_of_unequal_length_equal_torch(torch, tmp_path, capsys, bos):
    """Torch gets one document at a time, we pad; one is cut, one is beyond `max_documents`."""
    model = load_model(save_tiny(tmp_path / "model"))
    path = write_lines(tmp_path / "documents.jsonl", [*LINES, "left out"], field="body")
    settings = {"batch_size": 3, "max_documents": 4, "window": 20, "text_field": "body", "bos": bos}
    result = analysed(tmp_path / "run", tmp_path / "model", jsonl=path, **settings)
    first = [0] if bos == "segment" else []  # this tokenizer puts no bos before a text
    ids = [first + model.tokenizer.encode(text)[:20] for text in LINES]
    expected = torch_psi(torch, tmp_path / "model", [np.array(row) for row in ids])
    check(result, expected)
    tokens = sum(map(len, ids))
    assert (result["documents"], result["cut"], result["tokens"]) == (4, 1, tokens)
    shown, notes = capsys.readouterr()
    assert "1 of 4 documents cut to window=20" in notes
    last = result["last"]["after_final_norm"]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()]
    wanted = {"layer": "after, last", "3": f"{last['psi'][2]:.5f}", "tokens": "4"}
    wanted["zeta_L"] = f"{last['zeta_L']:.2f}%"
    assert {row[0]: row[4] for row in table if row and row[0] in wanted} == wanted


@quickly
def test_padding_changes_nothing():
    """Batches of any size give the values of single documents, also with attention windows."""
    config = tiny_of("gemma3", layers=7)
    params, rng = random_params(config), np.random.default_rng(1)
    documents = [rng.integers(0, config.vocab_size, length) for length in (9, 2, 1, 14, 5)]
    alone = [displacements(config, params, [ids], progress=None) for ids in documents]
    weights = {"all": [len(ids) for ids in documents], "last": None}
    for size in (2, 8):
        together = displacements(config, params, documents, batch_size=size, progress=None)
        for positions, readings in together.items():
            for name, psi in readings.items():
                each = [one[positions][name] for one in alone]
                mean = np.average(each, axis=0, weights=weights[positions])
                np.testing.assert_allclose(psi, mean, atol=3e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_table_1_of_real_models_equals_torch(torch, request, shared_data, tmp_path, name):
    """The paper's protocol on documents of LAMBADA: Psi within 1e-6 of torch's in float64."""
    gguf = request.getfixturevalue(f"{name}_gguf")
    path = shared_data / "lambada" / "test.jsonl"
    result = analysed(tmp_path / "run", gguf, jsonl=str(path), max_documents=12)
    model = load_model(gguf)
    save_pretrained(model.config, model.params, tmp_path / "model", dtype="float32")
    texts, bos = [row["text"] for row in read_rows(path)[:12]], model.tokenizer.bos_token_id
    ids = [model.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    documents = [np.array([bos, *row]) for row in ids]
    error = check(result, torch_psi(torch, tmp_path / "model", documents))
    assert result["tokens"] == sum(map(len, documents)) and result["cut"] == 0
    print(name, {rate: result["before_final_norm"][rate] for rate in RATES}, error)


@quickly
def test_checkpoints_of_a_run_give_a_curve(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 20)
    for step in (100, 20, 3):
        save_tiny(tmp_path / "run" / f"step_{step}", LLAMA, random_params(LLAMA, seed=step))
    (tmp_path / "run" / "notes").mkdir()
    settings = {"text": str(text), "window": 20, "max_windows": 2}
    checkpoints = analysed(tmp_path / "out", tmp_path / "run", **settings)["checkpoints"]
    assert [row["step"] for row in checkpoints] == [3, 20, 100]
    alone = analysed(tmp_path / "alone", tmp_path / "run" / "step_20", **settings)
    assert alone["after_final_norm"] == checkpoints[1]["after_final_norm"]
    for figure in ("displacement.png", "jump_rates.png"):
        assert (tmp_path / "out" / figure).stat().st_size > 5000
    assert alone["last"]["before_final_norm"] != alone["before_final_norm"]
    assert (alone["tokens"], alone["last"]["tokens"]) == (42, 2), "those that are averaged"


@quickly
def test_a_stopped_series_goes_on(tmp_path, capsys):
    """Finished measurements are read again; their checkpoints may be deleted."""
    np.save(tmp_path / "ids.npy", np.arange(12).reshape(2, 6))
    for step in (3, 20):
        save_tiny(tmp_path / "run" / f"step_{step}", LLAMA, random_params(LLAMA, seed=step))
    settings = {"token_ids": str(tmp_path / "ids.npy")}
    weights = tmp_path / "run" / "step_20" / "model.safetensors"
    hidden = weights.rename(tmp_path / "away")
    refused("step_20", analysed, tmp_path / "out", tmp_path / "run", **settings)
    assert not (tmp_path / "out" / "results.json").exists()
    hidden.rename(weights)
    (tmp_path / "run" / "step_3" / "model.safetensors").unlink()
    capsys.readouterr()
    checkpoints = analysed(tmp_path / "out", tmp_path / "run", **settings)["checkpoints"]
    assert [row["step"] for row in checkpoints] == [3, 20]
    shown = capsys.readouterr().out
    assert all(f"{name}: angular" in shown for name in ("step_3", "step_20")), "of those read, too"
    alone = analysed(tmp_path / "alone", weights.parent, **settings)
    assert alone["after_final_norm"] == checkpoints[1]["after_final_norm"]


@quickly
def test_bad_input_is_named(tmp_path):
    save_pretrained(LLAMA, random_params(LLAMA), tmp_path / "model")
    np.save(tmp_path / "flat.npy", np.array([1, 2]))
    lines = write_lines(tmp_path / "lines.jsonl", ["one", "", "NaN"])
    (tmp_path / "nan.jsonl").write_text('{"text": "one"}\n\n{"text": NaN}\n')
    flags = [f"--config.model={tmp_path / 'model'}", f"--workdir={tmp_path / 'run'}"]
    for extra, message in (
        ([], "exactly one of --config.text=<file> and --config.jsonl=<file> and --config.token_id"),
        ([f"--config.text={lines}", f"--config.jsonl={lines}"], "exactly one of"),
        (
            [f"--config.token_ids={tmp_path / 'flat.npy'}"],
            r"shape (2,); expected [windows, length >= 2]",
        ),
        ([f"--config.text={__file__}"], "has no tokenizer"),
        ([f"--config.jsonl={lines}"], "lines.jsonl, line 2: no text in field 'text'"),
        ([f"--config.jsonl={lines}", "--config.text_field=body"], "no field 'body'; fields seen"),
        ([f"--config.jsonl={tmp_path / 'nan.jsonl'}"], "line 3: field 'text' is float (nan)"),
        ([f"--config.jsonl={lines}", "--config.max_documents=-1"], "max_documents=-1"),
        ([f"--config.jsonl={lines}", "--config.max_documents=1"], "has no tokenizer"),
    ):
        config = "--config=configs/analyze.py:displacement"
        done = run_script("analyze", config, *flags, *extra)
        assert message in done.error, done.error
        assert not (tmp_path / "run" / "results.json").exists()
    tree = unstack(random_params(LLAMA))
    tree["layers"][2]["ffn"]["down"]["kernel"][0] = np.nan
    rows = np.ones((1, 4), np.int32)
    with pytest.raises(ValueError, match="before_final_norm of layer 2 is nan"):
        displacements(LLAMA, restack(LLAMA, tree), rows, progress=None)
