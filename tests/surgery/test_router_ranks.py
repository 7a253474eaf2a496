"""docs/router_ranks.py: where a dense model's neurons went, and what the router does with bos."""

import subprocess
import sys

import numpy as np
import pytest
from tiny_models import LLAMA, REPOSITORY, config_of, random_params, save_tiny

import ffn_heterogeneity as fh
from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe


def test_the_table_says_what_the_analysis_and_the_weights_say(tmp_path):
    dense = save_tiny(tmp_path / "dense" / "model", LLAMA, random_params(LLAMA))
    made = {"experts": 4, "top_k": 2, "router": "means"}
    divided, _ = fh.partition(fh.load_model(str(dense)), **made)
    path = tmp_path / "divided" / "model"
    fh.save_model(divided, path)
    script = [sys.executable, str(REPOSITORY / "docs/router_ranks.py"), str(dense), str(path)]
    out = tmp_path / "ranks.md"
    neurons = range(LLAMA.ffn_widths[1])
    options = ["--layer=1", f"--neurons={','.join(map(str, neurons))}", f"--out={out}"]
    subprocess.run([*script, *options], check=True, capture_output=True)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in out.read_text().splitlines()
        if line.startswith("| divided")
    ]
    config = config_of("analyze", "massive", model=str(path), layer=1)
    shares = np.array(evaluation.run(config, tmp_path / "massive")["router"][1])
    gate = unstack(random_params(LLAMA))["layers"][1]["ffn"]["gate"]["kernel"]
    experts = unstack(divided.params)["layers"][1]["ffn"]["gate"]["kernel"]
    for neuron, row in zip(neurons, rows, strict=True):
        ((expert, _),) = np.argwhere((experts == gate[:, neuron][None, :, None]).all(1))
        rank = 1 + (shares > shares[expert]).sum()
        assert row[1:4] == [str(neuron), str(expert), str(rank)]
        np.testing.assert_allclose(
            [float(row[4]), float(row[5])], [shares[expert], shares.max()], rtol=1e-3
        )
    # In every division each rank is taken by a quarter of the neurons, and the mean of an expert
    # rises with each of its neurons' states.
    means = np.array([float(row[7]) for row in rows])
    assert means.mean() == pytest.approx(2.5, abs=1e-3)
    assert np.mean([float(row[8].rstrip("%")) for row in rows]) == pytest.approx(25, abs=0.1)
    probe = Probe("read", lambda seen, batch, per_layer: seen.ffn_input, kind="example")
    bos = [{"tokens": np.array([[LLAMA.bos_id]], np.int32)}]
    states = observe(divided.config, divided.params, bos, probe)["read"][1, 0, 0] @ gate
    assert np.corrcoef(states, means)[0, 1] < -0.95
