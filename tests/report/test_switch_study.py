"""docs/studies/switch.py on runs with known numbers: errors of a kernel next to the losses."""

import numpy as np
import pytest
from builders import write_run
from scipy.stats import spearmanr
from tiny_models import REPOSITORY
from tiny_runs import write_rows

from ffn_heterogeneity import papers
from ffn_heterogeneity.report.paper import draw_all, gather

# Method -> (kernel errors under two heads, cosine, output error, NLL before and after training).
RUNS = {
    "fusion": ([1.0, 3.0], 0.9, 0.5, (5.0, 4.0)),
    "sqrt": ([4.0, 4.0], 0.7, 0.4, (5.5, 3.5)),
    "svd": ([9.0, 7.0], 0.8, 0.6, (6.0, 4.5)),
    "structured": ([6.0, 8.0], 0.4, 0.9, (7.0, 4.2)),
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    root = tmp_path_factory.mktemp("switch")
    for seed in range(2):
        config = {"analysis": "ntk", "model": "runs/switch/model", "layer": 3, "expert": 1}
        config |= {"ratio": 0.75, "seed": seed, "methods": list(RUNS)}
        errors = {
            name: {"ntk_error": of[0][seed], "ntk_cosine": of[1], "output_error": of[2]}
            for name, of in RUNS.items()
        }
        results = {"layer": 4, "expert": 2, "kernel_norm": 10.0, "errors": errors}
        write_run(root / f"ntk_{seed}", config, results)
    for name, (*_, losses) in RUNS.items():
        stages = {"stages": ["compress", "recover"], "compress": {"method": name}}
        config = stages | {"recover": {"kind": "train"}, "model": "runs/switch/model"}
        job = root / "recover" / name
        write_run(job, config)
        config |= {"objective": "span_corruption", "steps": 100}
        write_run(job / "01_recover", config, {"steps": 100})
        row = {"what": "nll", "split": "validation"}
        rows = [row | {"step": 100 * i, "value": nll} for i, nll in enumerate(losses)]
        write_rows(job / "01_recover/rows.jsonl", rows)
    study = papers.load(str(REPOSITORY / "docs/studies/switch.py"))
    return {one.key: one for one in draw_all(study, gather(study, [str(root)])[1])}


def test_errors_stand_next_to_the_losses(drawn):
    header, rows = list(drawn["kernels"].header), drawn["kernels"].rows
    found = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    for name, (errors, cosine, output, losses) in RUNS.items():
        cells = found[name]
        assert cells["|K - K'|"] == pytest.approx(np.mean(errors))
        assert (cells["cosine of K and K'"], cells["|y - y'|"]) == (cosine, output)
        assert (cells["NLL after compression"], cells["NLL after training"]) == losses


def test_the_correlation_is_spearmans(drawn):
    header, rows = list(drawn["predictions"].header), drawn["predictions"].rows
    found = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    columns = {"|K - K'|": [np.mean(of[0]) for of in RUNS.values()]}
    columns |= {"cosine of K and K'": [of[1] for of in RUNS.values()]}
    columns |= {"|y - y'|": [of[2] for of in RUNS.values()]}
    for error, values in columns.items():
        for i, when in enumerate(("after compression", "after training")):
            rho = spearmanr(values, [of[3][i] for of in RUNS.values()]).statistic
            assert found[error][f"NLL {when}"] == pytest.approx(rho)
        assert found[error]["methods"] == len(RUNS)
