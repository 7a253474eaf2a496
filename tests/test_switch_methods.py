"""MLP Fusion's experiments on Switch: methods in both stacks, tuning, LoRA, frozen routers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_models import REPOSITORY, byte_tokenizer, config_of, random_params, tiny_of
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity import papers
from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.workdir import prepare_workdir
from ffn_heterogeneity.launch import experiment
from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.context import with_both_sides
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.report.paper import draw_all, gather
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.fuse import METHODS
from ffn_heterogeneity.tree import flatten, unflatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
SPARSE = "encoder:sparse:all+decoder:sparse:all"
LENGTH = 24


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("switch")
    config = dataclasses.replace(tiny_of("switch", 4), vocab_size=258, pad_id=0)
    save_pretrained(config, random_params(config), root / "m", tokenizer=byte_tokenizer())
    spans = dataclasses.replace(config, vocab_size=360)  # with sentinels
    save_pretrained(spans, random_params(spans), root / "spans", tokenizer=byte_tokenizer())
    rows = [{"sentence": "pq"[i % 2] * (3 + i % 3), "label": i % 2} for i in range(24)]
    for name in ("rows.jsonl", "held_out.jsonl"):  # one file is not read for both
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "text.txt").write_text("some words of a text, again and again. " * 60)
    return root


@pytest.fixture(scope="module")
def jobs(files):
    """{method: ([the models after the stages], their folders)} of `configs/switch.py`."""
    settings = {"fusion,tuned": {}, "lora": {}, "m_smoe": {"compress": {"ratio": 0.5}}}
    return {method: ran(files, method, **changes) for method, changes in settings.items()}


def test_the_errors_of_one_expert(files, tmp_path):
    """Merged neurons are the same function with another tangent kernel."""
    given = {"model": str(files / "m"), "data__path": str(files / "rows.jsonl"), "layer": 1}
    config = config_of("analyze", "ntk", **given, expert=2, methods=("fusion", "merged"))
    errors = evaluation.run(config, tmp_path / "w")["errors"]
    assert errors["merged"]["output_error"] == pytest.approx(
        errors["fusion"]["output_error"], rel=1e-4
    )
    assert errors["merged"]["ntk_error"] != pytest.approx(errors["fusion"]["ntk_error"], rel=1e-2)
    assert errors["fusion"]["ntk_norm_ratio"] > 0 and errors["random"]["ntk_error"] > 0
    for expert in (None, 4):
        config = config_of("analyze", "ntk", **given, expert=expert)
        refused("has experts 0 to 3", evaluation.run, config, tmp_path / "none")
    model = fh.load_model(files / "m")
    level = {p: x * 0 if "/router/" in p else x for p, x in flatten(model.params).items()}
    save_pretrained(model.config, unflatten(level), tmp_path / "one", tokenizer=model.tokenizer)
    given["model"] = str(tmp_path / "one")  # whose first experts get all tokens
    config = config_of("analyze", "ntk", **given, expert=2, methods=("fusion",))
    words = "expert=2: layer 1 .* sends it none of the tokens of these 24 rows"
    refused(words, evaluation.run, config, tmp_path / "none")


def ran(files, method, **changes):
    """Run a job on a tiny model, four epochs of each training."""
    workdir = files / "runs" / method
    config = config_of("switch", f"{files / 'm'},sst2,{method}", layers=SPARSE)
    with config.unlocked():
        config.data.path = str(files / "rows.jsonl")
        config.data.validation_path = str(files / "held_out.jsonl")
        config.lengths, config.calibration = (LENGTH,), str(files / "text.txt")
        for name in config.stages:
            if config[name].kind == "train":
                config[name].epochs, config[name].batch_size = 4.0, 8
                config[name].compute_dtype, config[name].tensorboard = "float32", False
                config[name].optimizer.learning_rate = 2e-2
                config[name].export = {"weights": "last"}
            config[name].update(changes.get(name, {}))
    prepare_workdir(workdir, config.to_dict())
    experiment.run(config, workdir)
    folders = sorted(path for path in workdir.iterdir() if path.is_dir())
    return [fh.load_model(folder / "model") for folder in folders], folders


def leaves_of(model):
    return flatten(unstack(model.params))


def moved(before, after):
    before, after = leaves_of(before), leaves_of(after)
    return {p for p, x in before.items() if p not in after or not np.array_equal(x, after[p])}


def states(model, ids):
    """The residual stream after every block, by stack, of rows that both stacks read."""
    probe = Probe("seen", lambda seen, batch, _: seen.block_output, kind="example")
    tokens, real = np.zeros((2, len(ids), LENGTH), np.int32)
    for i, row in enumerate(ids):
        tokens[i, : len(row)], real[i, : len(row)] = row, 1
    config = dataclasses.replace(model.config, head=None)
    batch = with_both_sides(config, {"tokens": tokens, "segment_ids": real})
    run = jax.jit(lambda params: forward(config, params, batch, probes=(probe,))["probes"]["seen"])
    return run(model.params), real


def test_tuning_reaches_both_stacks_and_begins_above_zero(files, jobs):
    """The teacher is the model before compression (the authors' is the compressed one: loss 0)."""
    (few, tuned, final), folders = jobs["fusion,tuned"]
    results = json.loads((folders[1] / "results.json").read_text())
    first, last = (results[end]["validation/layerwise"] for end in ("first", "final"))
    prompts = [
        f"sentence: {json.loads(line)['sentence']}"
        for line in (files / "rows.jsonl").read_text().splitlines()
    ]
    ids = [[*few.tokenizer(x, add_special_tokens=False)["input_ids"], 1] for x in prompts]
    dense, _ = states(fh.load_model(files / "m"), ids)
    fewer, real = states(few, ids)
    layers = [
        ((np.float64(a) - np.float64(b)) ** 2)[:, real > 0].mean((1, 2))
        for a, b in zip(jax.tree.leaves(dense), jax.tree.leaves(fewer), strict=True)
    ]
    assert first == pytest.approx(np.concatenate(layers).mean(), rel=1e-5)
    assert 0 < last < first
    sparse = few.config.groups["sparse"]
    assert {i in few.config.groups["encoder"] for i in sparse} == {True, False}
    parts = {f"layers/{i}/ffn/{name}/kernel" for i in sparse for name in ("up", "down")}
    assert moved(few, tuned) == parts
    # Then everything trains but P and the routers.
    fixed = set(leaves_of(tuned)) - moved(tuned, final)
    routers = {f"layers/{i}/ffn/router/kernel" for i in sparse}
    assert fixed == routers | {f"layers/{i}/ffn/neuron_scale" for i in sparse}


def test_lora_on_all_mlps_and_everything_else_trains(files, jobs):
    (final,), _ = jobs["lora"]
    dense = fh.load_model(files / "m")
    before, after = leaves_of(dense), leaves_of(final)
    fixed = {path for path in before if path in after and np.array_equal(before[path], after[path])}
    wide = {path for path in before if "/ffn/" in path}
    assert fixed == wide  # the routers, too
    adapted = {path.rpartition("/")[0] for path in after if path.endswith("/lora_b")}
    assert adapted == {path.rpartition("/")[0] for path in wide if "/router/" not in path}
    assert all(np.any(after[f"{path}/lora_b"]) for path in adapted)
    rank = {after[f"{path}/lora_a"].shape[-1] for path in adapted}
    assert rank == {8}


def test_merged_experts_train_with_routers_of_all_columns(jobs):
    """M-SMoE by both stacks' routers; the model is written and read with `expert_of`."""
    (few, final), folders = jobs["m_smoe"]
    report = json.loads((folders[0] / "results.json").read_text())
    assert [(x["layer"], len(x["groups"])) for x in report["merged"]] == [(1, 2), (3, 2)]
    assert [layer.experts for layer in final.config.layers] == [None, 2, None, 2]
    assert [layer.columns for layer in final.config.layers] == [0, 4, 0, 4]
    # Usage counts tokens beyond the capacity too: both stacks read rows of 512 tokens and an eos.
    assert [sum(x["usage"]) for x in report["merged"]] == [2048 + 4] * 2
    assert not {path for path in moved(few, final) if "/router/" in path}


def test_the_report_draws_the_jobs_by_method(files, jobs):
    """Table III has a row for each, Table VI none of them; no table of dense models has any."""
    paper = papers.load("mlp_fusion")
    drawn = {one.key: one for one in draw_all(paper, gather(paper, [str(files / "runs")])[1])}
    rows = [row for row in drawn["table_3"].rows if str(row[1]).startswith("here:")]
    assert {row[0] for row in rows} == {"+Task-specific Tuning", "LoRA", "M-SMoE"}
    results = json.loads((jobs["lora"][1][-1] / "results.json").read_text())
    (lora,) = (row for row in rows if row[0] == "LoRA")
    score = lora[2].mean
    assert score == pytest.approx(100 * results["final"]["validation/accuracy"])
    assert lora[1] == "here: m, epochs 4" + ", the majority answer" * (abs(score - 50.9174) <= 0.5)
    dense = (*drawn["table_6"].rows, *drawn["table_2"].rows, *drawn["paired"].rows)
    assert not [row for row in dense if "here: " in str(row)]


@pytest.mark.parametrize("method", [*METHODS, "svd", "unstructured"])
def test_methods_in_the_experts_of_both_stacks(files, method):
    """Dense layers stay bit for bit; each expert is compressed as it is alone."""
    dense = fh.load_model(files / "m")
    asked = {"method": method, "ratio": 0.5, "steps": 2, "layers": SPARSE}
    few, _ = SURGERIES["fuse"](dense, asked)
    before, after = leaves_of(dense), leaves_of(few)
    sparse = [f"layers/{i}/ffn/" for i in dense.config.groups["sparse"]]
    for path, leaf in before.items():
        if not path.startswith(tuple(sparse)) or "/router/" in path:
            assert np.array_equal(leaf, after[path]), path
    assert {path.rpartition("/ffn/")[0] + "/ffn/" for path in after.keys() - before.keys()} <= {
        *sparse
    }
    batch = dict.fromkeys(("tokens", "encoder_tokens"), np.array([[5, 6]]))
    logits = forward(few.config, few.params, batch)
    assert np.isfinite(logits["hidden"]).all()


def test_recovery_by_span_corruption(files, tmp_path):
    """The first evaluation is of the compressed model; tuning lowers the difference of states."""
    config = config_of("t5_recover", str(files / "spans"))
    text = str(files / "text.txt")
    with config.unlocked():
        config.stages, config.calibration = ("compress", "tune", "recover"), text
        for name in ("tune", "recover"):
            config[name].update({"steps": 6, "batch_size": 4, "seq_len": 16})
            config[name].update(
                {"compute_dtype": "float32", "data": {"path": text, "task": "text"}}
            )
            config[name].data.update({"passage_chars": 100, "validation_fraction": 0.2})
            config[name].eval.every, config[name].optimizer.warmup_steps = 6, 1
    prepare_workdir(tmp_path, config.to_dict())
    experiment.run(config, tmp_path)
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/results.json"))]
    tuned = [results[1][end]["validation/layerwise"] for end in ("first", "final")]
    assert 0 < tuned[1] < tuned[0]
    assert results[2]["first"]["validation/nll"] > results[2]["final"]["validation/nll"]
    few, final = (
        fh.load_model(tmp_path / name / "model") for name in ("00_compress", "02_recover")
    )
    assert not {path for path in moved(few, final) if "/router/" in path}
    study = papers.load(str(REPOSITORY / "docs/studies/switch.py"))
    drawn = {one.key: one for one in draw_all(study, gather(study, [str(tmp_path)])[1])}
    ((name, place, *losses),) = drawn["recovery"].rows
    ends = [results[2][end]["validation/nll"] for end in ("first", "final")]
    assert (name, place) == ("fusion, tuned", "here") and losses == pytest.approx(ends)


def test_published_mmd_points_do_not_move(torch):
    """The authors' Switch form wraps the loss in a new Parameter, which cuts its gradient."""
    points = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
    before, optimizer = points.detach().clone(), torch.optim.AdamW([points], lr=1e-2)
    for _ in range(3):
        loss = torch.nn.Parameter(torch.cdist(points, torch.zeros(1, 2)).mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(points, before)


def test_config_arguments_are_checked():
    for argument, words in (
        ("m,sst2,whole,tuned", "whole compresses nothing"),
        ("m,sst2,lth", "a method of"),
        ("m,sst2", "a method of"),
    ):
        refused(words, config_of, "switch", argument)


def test_routers_of_lora_train_as_the_config_says():
    """Table VII's 122.93M include the routers."""
    for freeze in (("/ffn/router/",), ()):
        config = config_of("switch", "m,sst2,lora", freeze=freeze)
        assert config.finetune.freeze == (*freeze, "ffn/(gate|up|down)/kernel$")
