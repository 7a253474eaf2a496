"""docs/studies/switch.py on runs with known numbers: losses, errors of a kernel, sentences."""

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
WHOLE = (4.5, 3.75)  # NLL of the uncompressed model
# Method -> (rate, whether routers train), and of each seed the sentences that are right, of six.
ANSWERS = {
    "whole": (1e-3, False, [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]),
    "fusion": (3e-4, False, [1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]),
    "whole, router trained": (1e-3, True, [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]),
}


def answered(root):
    """Jobs of configs/switch.py and the answers of configs/classify.py."""
    for name, (rate, routed, *seeds) in ANSWERS.items():
        for seed, right in enumerate(seeds):
            job = root / "sst2" / f"{name}_{seed}"
            config = {"stages": ["finetune"], "seed": seed, "task": "sst2"}
            if name == "fusion":
                config |= {"compress": {"method": name, "ratio": 0.75, "layers": "sparse:last4"}}
            freeze = [] if routed else ["/ffn/router/"]
            config["finetune"] = {"base": "p32_glue:runs/switch/model,sst2", "freeze": freeze}
            write_run(job, config)
            config |= {"objective": "labels", "data": {"task": "sst2"}, "epochs": 2.0}
            config |= {"optimizer": {"learning_rate": rate}, "freeze": freeze}
            write_run(job / "01_finetune", config, {"steps": 2})
            share = float(np.mean(right))
            found = {"accuracy": share, "accuracy_low": 0.0, "accuracy_high": 1.0, "n": 6}
            model = {"model": str(job / "01_finetune/model"), "input": "both.jsonl"}
            found |= {"accuracy_rows": right, "interval": "bootstrap"}
            said = root / "answers" / f"{name}_{seed}"
            write_run(said, {"evaluation": "classify"} | model, found)


def trained(root):
    """The model's own training, two evaluations; the second layer of each stack has experts."""
    shape = {"experts": 8, "layers": 2, "encoder_layers": 2}
    loads = {"max_load": [0, 1.5, 0, 2.5], "dropped": [0, 0.125, 0, 0], "unused": [0, 0, 0, 0.25]}
    row = {f"validation/load_balance/{name}": values for name, values in loads.items()}
    rows = [row | {"step": step, "validation/nll": 9.0 - step / 2} for step in (0, 6)]
    config = {"shape": shape, "objective": "span_corruption"}
    write_run(root / "switch", config, {"steps": 6}, rows)


def recovered(job, losses, compress):
    """A job of configs/t5_recover.py: the losses after its compression, and after its training."""
    stages = ["compress", "recover"] if compress else ["recover"]
    config = {"stages": stages, "recover": {"kind": "train"}, "model": "runs/switch/model"}
    config |= {"compress": compress} if compress else {}
    write_run(job, config)
    last = job / f"{len(stages) - 1:02d}_recover"
    write_run(last, config | {"objective": "span_corruption", "steps": 100}, {"steps": 100})
    row = {"what": "nll", "split": "validation"}
    rows = [row | {"step": 100 * i, "value": nll} for i, nll in enumerate(losses)]
    write_rows(last / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    root = tmp_path_factory.mktemp("switch")
    answered(root)
    trained(root)
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
        recovered(root / "recover" / name, losses, {"method": name})
    recovered(root / "recover" / "control", (9.0, 8.0), {"method": "structured", "ratio": 0.99})
    recovered(root / "recover" / "whole", WHOLE, {})
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


def test_losses_are_compared_with_the_uncompressed_models(drawn):
    found = {key[0]: cells for key, cells in cells_of(drawn["recovery"]).items()}
    expected = {name: of[3] for name, of in RUNS.items()} | {"structured, 99%": (9.0, 8.0)}
    assert found.keys() == {*expected, "whole"}
    for name, losses in expected.items():
        for column, value, whole in zip(("", ", trained"), losses, WHOLE, strict=True):
            assert found[name][f"Δ vs whole{column}"] == pytest.approx(value - whole)


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


def cells_of(table):
    width = table.header.index("from") + 1
    return {
        row[:width]: dict(zip(table.header[width:], row[width:], strict=True)) for row in table.rows
    }


def test_accuracies_are_paired_by_sentence(drawn):
    """The mean over seeds of each sentence, minus the uncompressed model's."""
    found = {key[1]: cells for key, cells in cells_of(drawn["labelled"]).items()}
    whole = np.mean(ANSWERS["whole"][2:], 0)
    for name, (_rate, _routed, *seeds) in ANSWERS.items():
        label = "MLP Fusion (Ours)" if name == "fusion" else name
        assert found[label]["accuracy"].mean == pytest.approx(100 * np.mean(seeds))
        if name != "whole":
            apart = found[label]["Δ vs whole, by sentence"]
            assert apart.mean == pytest.approx(100 * np.mean(np.mean(seeds, 0) - whole))
            assert apart.n == 6 and apart.low < apart.mean < apart.high


def test_loads_are_of_the_layers_with_experts(drawn):
    found = {key[0]: cells for key, cells in cells_of(drawn["training"]).items()}
    assert found["both"]["NLL"] == 6.0
    assert (found["encoder"]["dropped tokens"], found["decoder"]["dropped tokens"]) == (0.125, 0)
    assert (found["encoder"]["largest load / mean"], found["decoder"]["unused"]) == (1.5, 0.25)
