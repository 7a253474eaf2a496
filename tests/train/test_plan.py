"""A run is planned once, from headers only: the plan agrees with the files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_adapted import config_for
from tiny_models import (
    LLAMA,
    byte_tokenizer,
    config_of,
    random_params,
    save_tiny,
    starting_from,
    structured,
    tiny_of,
)
from tiny_runs import small_run

from ffn_heterogeneity.io.gguf.export import save_gguf
from ffn_heterogeneity.io.gguf.read import read_gguf, read_gguf_shapes
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.peft import save_adapters
from ffn_heterogeneity.io.load import load_model, load_shapes
from ffn_heterogeneity.launch import experiment, sweep_run
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.families import FAMILIES
from ffn_heterogeneity.surgery.adapt import insert_lora
from ffn_heterogeneity.train import build, fit, plan, shared
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def kinds(params) -> dict:
    return {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(params).items()}


def agree(path) -> None:
    """Headers give the shapes and dtypes that are read."""
    shapes, assumed = load_shapes(path)
    model = load_model(path)
    assert shapes.config == model.config and kinds(shapes.params) == kinds(model.params)
    assert not assumed


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_headers_tell_what_is_read(family, dtype, tmp_path):
    config = tiny_of(family)
    save_pretrained(config, random_params(config, dtype=dtype), tmp_path / "model")
    agree(tmp_path / "model")


def test_headers_of_tensors_of_unlike_dtypes(tmp_path):
    """Layers with different dtypes are not stacked: the tree also depends on dtypes."""
    save_pretrained(LLAMA, random_params(LLAMA), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "layers.1." in name or "norm" in name:
            tensors[name] = tensors[name].astype(jnp.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    agree(tmp_path / "model")
    dtypes = {dtype for _, dtype in kinds(load_shapes(tmp_path / "model")[0].params).values()}
    assert len(dtypes) == 2


def test_headers_of_structure_adapters_and_gguf(tmp_path):
    params = structured(LLAMA, random_params(LLAMA, dtype=jnp.bfloat16))
    save_pretrained(LLAMA, params, tmp_path / "kept", structure="keep")
    agree(tmp_path / "kept")
    path = save_gguf(LLAMA, random_params(LLAMA), tmp_path / "m.gguf")
    (config, shapes), (same, params) = read_gguf_shapes(path), read_gguf(path)
    assert config == same and kinds(shapes) == kinds(params)
    base = load_model(save_tiny(tmp_path / "base"))
    added, _ = insert_lora(base, {"rank": 2}, key=jax.random.key(0))
    save_adapters(added.config, added.params, tmp_path / "adapters", base=str(tmp_path / "base"))
    agree(tmp_path / "adapters")


def test_what_is_not_here_is_assumed_and_said(tmp_path):
    save_pretrained(LLAMA, random_params(LLAMA), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    shapes, assumed = load_shapes(tmp_path / "model")
    assert "weights are not here: taken for bfloat16" in assumed
    assert {dtype for _, dtype in kinds(shapes.params).values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.fixture
def made(monkeypatch):
    """The list of plans that were built."""
    plans, inner = [], plan._build

    def counted(*given):
        plans.append(inner(*given))
        return plans[-1]

    monkeypatch.setattr(plan, "_build", counted)
    return plans


PLANNED = [("", "float32"), ("", "bfloat16"), (",lora", "bfloat16"), (",truncate", "float32")]
PLANNED += [(",nf4,lora", "float32"), (",nf4,lora", "bfloat16")]


@pytest.mark.parametrize(("parts", "dtype"), PLANNED)
def test_a_run_is_planned_once(files, tmp_path, made, parts, dtype, capsys):
    _, text = files
    wide = dataclasses.replace(LLAMA, d_model=64, head_dim=16, layers=(LayerConfig(64),) * 2)
    options = {"dtype": dtype, "tokenizer": byte_tokenizer()}
    model = save_pretrained(wide, random_params(wide), tmp_path / "model", **options)
    config = config_for(model, text, "text" + parts, steps=1)
    training.run(config, tmp_path / "run")
    assert len(made) == 1 and "planned again" not in capsys.readouterr().err


def test_a_file_of_another_dtype_than_its_header_said(files, tmp_path, made, capsys, monkeypatch):
    """If a file's dtypes differ from its header, the run is planned again, and reports it."""
    shapes, _ = load_shapes(files[0])
    wrong = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes.params)
    wrong = dataclasses.replace(shapes, params=wrong), ""
    monkeypatch.setattr("ffn_heterogeneity.train.source.load_shapes", lambda *_, **__: wrong)
    training.run(config_for(*files, steps=1), tmp_path / "run")
    assert len(made) == 2
    assert "planned again: embed/embedding differs from its header" in capsys.readouterr().err


def test_only_weights_tell_where_fusion_goes(files, tmp_path, made, capsys):
    config = config_for(*files, "text,fuse", steps=1)
    config.fuse.update(ratio=0.5, skip="massive")
    together = shared.Shared(keep_model=False)
    training.run(config, tmp_path / "run", together)
    assert (together.programs, together.compilations) == (1, 1)
    assert len(made) == 2 and "planned again" not in capsys.readouterr().err
    assert "no weights are read" in plan.plan(read(config)).assumed[0]


def test_seeds_share_a_program_and_not_their_data(files, tmp_path, made, monkeypatch):
    """Each run draws its rows with its seed; all use the programs of one plan."""
    seen, inner = {}, training.make_loop

    def noted(config, built, model, data, *rest):
        before = data.batches.get_state()
        seen[config.seed] = np.stack([next(data.batches)["tokens"] for _ in range(4)])
        data.batches.set_state(before)
        return inner(config, built, model, data, *rest)

    monkeypatch.setattr(training, "make_loop", noted)
    text = tmp_path / "many.txt"
    text.write_text("\n\n".join(f"passage {i} of {i * i} words" * 4 for i in range(60)))
    settings = small_run(text, steps=1, seeds=(0, 1))
    experiment.run(
        config_of("nucl_finetune", f"{files[0]},text", **settings), tmp_path / "together"
    )
    assert len(made) == 1 and (seen[0] != seen[1]).any()
    together, seen[1] = seen[1], None
    settings |= {"seeds": (), "seed": 1}
    experiment.run(config_of("nucl_finetune", f"{files[0]},text", **settings), tmp_path / "alone")
    np.testing.assert_array_equal(together, seen[1])


FREE = ({}, {"seed": 3}, {"optimizer__learning_rate": 3e-3}, {"losses__nucl__weight": 9.0})
STATIC = ({"seq_len": 24}, {"batch_size": 4}, {"freeze": ("^embed/",)}, {"dropout": 0.1})


def test_runs_of_equal_static_settings_share_programs(files, made):
    cache = {}
    one, *others = (
        plan.plan(
            read(config_of("nucl_finetune", f"{files[0]},text", **small_run(files[1], **changes))),
            cache=cache,
        )
        for changes in (*FREE, *STATIC)
    )
    shared_by = [other.train_step is one.train_step for other in others]
    assert shared_by == [True] * (len(FREE) - 1) + [False] * len(STATIC)
    assert len(made) == len(cache) == 1 + len(STATIC)


def test_a_plan_knows_what_prepare_does(files):
    config = config_for(*files, "text,lora")
    planned = plan.plan(read(config))
    assert any(path.endswith("/lora_a") for path in flatten(planned.params))
    assert not planned.differs(starting_from(read(config)))
    bare = load_model(files[0])
    assert planned.differs(bare).endswith("/lora_a")


def test_the_next_run_begins_with_what_fits(files, tmp_path, made, monkeypatch):
    """The last choice of remat="auto", the only one that fits in memory, is found once."""
    tried, inner = [], fit.compile_step

    def small(planned, *given):
        tried.append(planned.options.remat)
        compiled, memory = inner(planned, *given)
        return compiled, memory if tried[-1] == "full" else {"together": np.inf}

    monkeypatch.setattr(fit, "compile_step", small)
    settings = small_run(files[1], steps=1, seeds=(0, 1), remat="auto")
    experiment.run(config_of("nucl_finetune", f"{files[0]},text", **settings), tmp_path)
    assert tried == [*build.AUTO_REMAT, "full"] and len(made) == 1


def test_a_sweep_of_four_points_compiles_once(files, tmp_path, made, monkeypatch):
    points = [
        sweep_run.Point(f"p{i}", changes)
        for i, changes in enumerate(
            {key.replace("__", "."): value for key, value in changes.items()} for changes in FREE
        )
    ]
    config = config_of("nucl_finetune", f"{files[0]},text", **small_run(files[1]))
    monkeypatch.setattr(sweep_run, "points_of", lambda *_: ("train", tuple(points)))
    results = sweep_run.run(config, tmp_path, spec="x", sweep="four")
    assert (results["finished"], results["programs"], results["compilations"]) == (4, 1, 1)
