"""`scripts/analyze.py`: the connectivity of every layer against a float64 oracle."""

import json
import sys

import numpy as np
import pytest
from tiny_models import LLAMA, config_of, random_params, run_script, save_tiny, tiny_of

from ffn_heterogeneity.evaluate import connectivity
from ffn_heterogeneity.evaluate.run import run
from ffn_heterogeneity.models.stack import restack, unstack


def oracle(kernel_md) -> dict[str, float]:
    """Sums over rows, from the formulas (NUCL, section 3), in float64; a zero row is 0."""
    entropy = gini = mstd = 0.0
    for row in np.abs(np.asarray(kernel_md, np.float64)):
        if not row.any():
            continue
        r = row / row.sum()
        entropy -= sum(x * np.log(x) for x in r if x > 0)
        gini += 1 - (r**2).sum()
        mstd -= np.sqrt(((r - r.mean()) ** 2).mean())
    return {"entropy": entropy, "gini": gini, "mstd": mstd}


@pytest.mark.parametrize("config", [LLAMA, tiny_of("gemma3")], ids=["llama", "gemma3"])
def test_connectivity_equals_the_oracle(tmp_path, capsys, config):
    tree = unstack(random_params(config))
    tree["layers"][1]["ffn"]["down"]["kernel"][3] = 0  # a padded neuron
    tree["layers"][2]["ffn"]["down"]["kernel"][0, 1] = 0
    directory = save_tiny(tmp_path / "model", config, restack(config, tree))
    results = run(config_of("analyze", model=str(directory)), tmp_path / "run")
    assert len(results["layers"]) == config.n_layers
    for layer, measured in zip(tree["layers"], results["layers"], strict=True):
        for name, value in oracle(layer["ffn"]["down"]["kernel"]).items():
            assert abs(measured[name] - value) <= 1e-12 * max(1, abs(value)), name
    assert results["layers"][1]["entropy"] < 0.99 * results["layers"][0]["entropy"]
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    assert (tmp_path / "run" / "connectivity.png").read_bytes().startswith(b"\x89PNG")
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"results.json", "rows.jsonl", "connectivity.png"}, "no partial files"
    shown, notes = (text.splitlines() for text in capsys.readouterr())
    wanted = [str(tmp_path / "run" / name) for name in ("results.json", "connectivity.png")]
    assert notes[-2:] == wanted
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown if line[:1] == "|"]
    assert rows[0] == ["layer", "neurons", "entropy", "gini", "mstd"]
    assert [row[0] for row in rows[2:]] == [*map(str, range(config.n_layers)), "uniform"]
    layer = results["layers"][1]
    assert float(rows[3][2]) == pytest.approx(layer["entropy"] / layer["neurons"], rel=1e-4)


def test_connectivity_of_experts_is_over_all_their_neurons(tmp_path):
    config = tiny_of("mixtral", 2)
    params = random_params(config, dtype=np.float32)
    directory = save_tiny(tmp_path / "model", config, params)
    results = run(config_of("analyze", model=str(directory)), tmp_path / "run")
    for leaves, measured in zip(unstack(params)["layers"], results["layers"], strict=True):
        kernel = np.asarray(leaves["ffn"]["down"]["kernel"])
        assert kernel.ndim == 3
        rows = kernel.reshape(-1, kernel.shape[-1])
        assert measured["neurons"] == len(rows)
        for name, value in oracle(rows).items():
            assert abs(measured[name] - value) <= 1e-12 * max(1, abs(value)), name


def test_without_matplotlib_the_numbers_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config = config_of("analyze", model=str(save_tiny(tmp_path / "model")))
    assert run(config, tmp_path / "run")["layers"]
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"results.json", "rows.jsonl"}
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "drawn" in line]
    assert said.endswith("connectivity.png is not drawn: pip install 'ffn-heterogeneity[plots]'")


def test_an_interrupted_analysis_leaves_no_results(tmp_path, monkeypatch):
    directory = save_tiny(tmp_path / "model")

    def broken(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(connectivity, "curves_figure", broken)
    flags = [f"--config.model={directory}", f"--workdir={tmp_path / 'run'}"]
    assert "disk full" in run_script("analyze", *flags).error
    assert not (tmp_path / "run").exists()
