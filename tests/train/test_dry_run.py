"""A dry run's numbers against arithmetic from the paper's shapes and against the compiler."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TEXT, config_of, save_tiny
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model, load_config, load_model
from ffn_heterogeneity.launch import train as run
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import PRESETS
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery.adapt import insert_lora
from ffn_heterogeneity.train import dry_run, fit, hardware, hlo
from ffn_heterogeneity.train.build import AUTO_REMAT
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def make_config(model, **changes):
    config = config_of("nucl_finetune", f"{model},text")
    for key, value in changes.items():
        config.update_from_flattened_dict({key: value})
    return config


def planned(tmp_path, model, **changes):
    return dry_run.dry_run(read(make_config(model, **changes)), tmp_path)


def test_gemma2_2b_on_eight_h100s_is_the_papers_arithmetic(tmp_path, capsys):
    changes = {"dry_run": "h100:8", "seq_len": 1024, "steps": 3600}
    report = planned(tmp_path, "gemma2_2b", **changes)
    d, m, layers, vocab, q, kv = 2304, 9216, 26, 256_000, 8 * 256, 4 * 256
    kernels = layers * (d * (2 * q + 2 * kv) + 3 * d * m)
    norms = (4 * layers + 1) * d
    assert report["parameters"] == report["trainable_parameters"] == kernels + vocab * d + norms
    held, cut = report["bytes_per_device"], (kernels + vocab * d) // 8 + norms
    assert held["trainable parameters (float32)"] == held["gradients"] == 4 * cut
    assert held["frozen parameters"] == 0
    assert abs(held["optimiser state"] - 8 * cut) < 100  # two moments, and counters
    assert report["tokens_per_step"] == 16 * 1024
    seen = 1024 * 1025 / 2  # no window is shorter than the row
    attention = 16 * layers * 4 * seen * q
    products = 6 * 16 * 1024 * (kernels + vocab * d) + 3 * attention
    np.testing.assert_allclose(report["flops_per_step"]["model"], products, rtol=1e-12)
    again = 2 * 16 * 1024 * kernels + attention if jax.default_backend() != "cpu" else 0
    np.testing.assert_allclose(report["flops_per_step"]["recomputed"], again)
    seconds, hours = report["seconds_per_step"], report["hours"]
    np.testing.assert_allclose(seconds["products"], (products + again) / 8 / 989e12)
    assert seconds["roofline"] == max(seconds[k] for k in ("products", "memory", "links"))
    assert seconds["expected"] >= seconds["roofline"] and hours["expected"] == seconds["expected"]
    assert report["compiled"] is None and json.loads((tmp_path / "plan.json").read_text()) == report
    printed = capsys.readouterr().out
    assert "2,614,341,888 parameters" in printed and "no compiler for GPUs" in printed


def test_the_least_rematerialisation_that_fits(tmp_path):
    config = make_config(save_tiny(tmp_path / "tiny"), batch_size=16, seq_len=64)
    mesh = partition.make_mesh()
    sizes = {}
    for remat in AUTO_REMAT:
        config.remat = remat
        settings = read(config)
        sizes[remat] = fit.compile_step(plan(settings, mesh))[1]["together"]
    assert sizes["dots"] > sizes["full"]
    config.remat = "auto"
    settings = read(config)
    built = plan(settings, mesh)
    for room in (1.0, *sizes.values()):
        fits = [remat for remat in AUTO_REMAT if sizes[remat] <= room]
        chosen, _, held = fit.compile_plan(built, room)
        assert chosen.options.remat == (fits or ["full"])[0]
        assert held["together"] == sizes[chosen.options.remat]


def test_windows_frozen_leaves_and_remat_count():
    layers = (LayerConfig(64, window=8), LayerConfig(64))
    model = ModelConfig("llama", 50, 32, 4, 2, 8, layers, tied=False)
    mesh = partition.abstract_mesh(1, 1, 1)

    def flops(rank=0, **changes):
        config = read(make_config("x", batch_size=2, seq_len=20, **changes))
        params = causal_lm.abstract_params(model)
        if rank:
            add = {"rank": rank, "targets": "ffn/down"}
            given = functools.partial(Model, model, tokenizer=None, source="")
            params = jax.eval_shape(lambda x: insert_lora(given(x), add)[0].params, params)
        shapes = Model(model, params, None, "")
        return dry_run.step_flops(plan(config, mesh, shapes))

    tokens, ffn, attention = 40, 3 * 32 * 64, 32 * (2 * 32 + 2 * 16)
    seen = 2 * (sum(min(t + 1, 8) for t in range(20)) + sum(range(1, 21)))
    full = flops(remat="full")
    forward = 2 * tokens * 2 * (ffn + attention) + 4 * seen * 32
    head = 2 * tokens * 32 * 50
    assert full["model"] == 3 * (forward + head) and full["recomputed"] == forward
    frozen = flops(train_only=("ffn/down/kernel",), remat="none")
    less = 2 * tokens * 2 * (attention + ffn - 32 * 64) + head
    assert frozen["model"] == full["model"] - less and frozen["recomputed"] == 0
    adapted = flops(rank=4, train_only=("lora_[ab]$",), remat="none")
    less += 2 * tokens * 2 * 32 * 64  # the kernel itself is frozen, too
    assert adapted["model"] == full["model"] - less + 3 * 2 * tokens * 2 * 4 * (32 + 64)


def test_products_are_those_the_compiler_counts():
    """XLA's count for an unrolled step, which includes element-wise work.

    It counts a program once, however often it runs: so few rows that the head's chunks are one.
    """
    model = ModelConfig("llama", 2048, 256, 4, 4, 64, (LayerConfig(1024),) * 2, tied=False)
    changes = {"batch_size": 4, "seq_len": 31, "unroll": 0, "remat": "none", "dropout": 0.0}
    config = make_config("x", **changes, **{"losses.nucl.weight": None})
    mesh = partition.make_mesh()
    config = read(config)
    built = plan(config, mesh, Model(model, causal_lm.abstract_params(model), None, ""))
    batch = built.objective.shapes(4, {"T": 31})
    batch = {k: jax.ShapeDtypeStruct((1, *v.shape), v.dtype) for k, v in batch.items()}
    rates = config.hyper(built.objective.terms)(0)
    hyper = dict.fromkeys(rates, jax.ShapeDtypeStruct((), jnp.float32))
    cost = built.train_step.lower(built.state, batch, hyper).compile().cost_analysis()
    ours = dry_run.step_flops(built)["model"]
    assert 1 <= cost["flops"] / ours < 1.1


def test_each_stacks_operations_are_those_the_compiler_counts():
    """An encoder-decoder's: XLA's count of two more layers of one stack, in unrolled steps."""
    shape = {"d_model": 256, "ffn_width": 1024, "n_heads": 4, "vocab_size": 512, "tied": True}

    def counted(**layers):
        keys = {f"shape__{key}": value for key, value in (shape | layers).items()}
        keys |= {"batch_size": 2, "seq_len": 256, "remat": "none", "unroll": 0}
        keys |= {"optimizer__name": "adamw"}
        built = plan(read(config_of("t5_pretrain", "local", **keys)), partition.make_mesh())
        batch = built.objective.shapes(2, built.objective.longest)
        batch = {k: jax.ShapeDtypeStruct((1, *v.shape), v.dtype) for k, v in batch.items()}
        hyper = dict.fromkeys(built.hyper(0), jax.ShapeDtypeStruct((), jnp.float32))
        step = built.train_step.lower(built.state, batch, hyper).compile()
        return step.cost_analysis()["flops"], dry_run.step_flops(built), built

    base, ours, built = counted(encoder_layers=1, layers=1)
    assert built.objective.longest == {"S": 256, "T": 58}
    assert ours["model"] == pytest.approx(base, rel=0.1)
    for stack, more in (("encoder", "encoder_layers"), ("decoder", "layers")):
        flops, other, _ = counted(**{"encoder_layers": 1, "layers": 1, more: 3})
        assert (flops - base) / 2 == pytest.approx(ours[stack], rel=0.1)
        assert other[stack] == pytest.approx(3 * ours[stack], rel=1e-9)
    rows = dry_run.by_stack(built, ours)
    state = fit.state_bytes(built)
    assert 0 < sum(row["bytes_per_device"] for row in rows.values()) < sum(state.values())
    # Three kernels of the FFN, four and eight of attention, and the norms: master, two moments and
    # a gradient of each number, 4 bytes.
    kernels = {"encoder": 4, "decoder": 8}
    for stack, row in rows.items():
        norms = 256 * (2 if stack == "encoder" else 3)
        numbers = 3 * 256 * 1024 + kernels[stack] * 256 * 256 + norms
        assert row["parameters"] == numbers and row["bytes_per_device"] == 16 * numbers


def test_layers_of_macdrop_are_checked_without_weights():
    for layer in (26, -1):
        config = config_of("macdrop_sft", "gemma2_2b,lora,macdrop")
        config.macdrop.layer = layer
        refused(f"layer={layer}: the model has layers 0 to 25", plan, read(config))


def test_evaluation_sees_nothing_of_macdrop():
    """Nor does export: MacDrop's leaves are removed from the tree before."""
    config = read(config_of("macdrop_sft", "gemma2_2b,lora,macdrop"))
    built = plan(config, partition.make_mesh(devices=jax.devices()[:1]))
    params, hyper = built.state.params, {"macdrop": jnp.float32(0.5)}
    gone = set(flatten(params)) - set(flatten(jax.eval_shape(built.settled, params, 0, hyper)))
    assert {path.rpartition("/")[2] for path in gone} == {"macdrop_rows", "macdrop_keep"}


def test_a_quantised_base_is_counted_in_weights(tmp_path, capsys):
    """QLoRA with MacDrop: the same parameters and products as LoRA, a quarter of the kernels'
    bytes, with the same sharding; what depends on the weights is reported as unknown."""
    reports = {}
    for names in ("lora", "nf4,lora,macdrop"):
        config = config_of("macdrop_sft", f"gemma2_2b,{names}")
        config.dry_run = "h100:8"
        reports[names] = dry_run.dry_run(read(config), tmp_path)
        said = "".join(capsys.readouterr())
        assert ("massive layer is taken to be the first" in said) == ("macdrop" in names)
    plain, quantised = reports.values()
    assert plain["parameters"] == quantised["parameters"]
    assert plain["flops_per_step"] == quantised["flops_per_step"]
    held = [one["bytes_per_device"]["frozen parameters"] for one in reports.values()]
    into, out_of = 26 * (2 * 2304 * 9216 + 2304 * 4096), 26 * (2304 * 9216 + 2304 * 2048)
    kernels = into + out_of
    # 1/2 byte of code per weight, sharded as bf16's 2 bytes; scales are sharded as outputs.
    codes, scales = kernels / 2 / 8, into / 64 + out_of / 64 / 8 + 4 * kernels / 64 / 256
    assert held[0] - held[1] == pytest.approx(kernels * 2 / 8 - codes - scales, rel=1e-4)


def test_a_dry_run_here_compiles_and_the_run_may_follow(tmp_path, capsys):
    model = save_tiny(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    changes = {"data.path": str(tmp_path / "text.txt"), "data.validation_fraction": 0.0}
    changes |= {"steps": 2, "batch_size": 2, "seq_len": 16, "tensorboard": False}
    config = make_config(model, dry_run="here", **changes)
    report = run.run(config, tmp_path / "run")
    held = report["compiled"]["bytes_per_device"]
    state = report["bytes_per_device"]
    assert held["arguments (state, batch)"] >= sum(state.values()) - state["gradients"]
    assert held["together"] > held["arguments (state, batch)"]
    assert report["rates"] == "measured" and not (tmp_path / "run" / "results.json").exists()
    assert "compiled: together" in capsys.readouterr().out
    config.dry_run = ""
    assert run.run(config, tmp_path / "run")["steps"] == 2


def test_only_the_config_is_read(tmp_path):
    model = save_tiny(tmp_path / "tiny")
    for path in model.glob("*.safetensors"):
        path.unlink()
    report = planned(tmp_path / "plan", model, dry_run="v4:2x2x2", batch_size=8)
    assert report["device_count"] == 8 and report["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    assert load_config("google/gemma-2-2b") is PRESETS["gemma2_2b"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dry_run": "tpu"}, "dry_run='tpu': write 'here' or <kind>:<number or shape>"),
        ({"dry_run": "v9:2x2"}, "kinds: v4, v5e"),
        ({"dry_run": "h100:0"}, "there must be a device"),
        ({"dry_run": "h100:32"}, "batch_size=16 .* cut over 32 devices .* multiple of 32"),
        ({"dry_run": "h100:8", "mesh.tensor": 3}, ": 3 does not divide 8"),
        ({"dry_run": "h100:4", "mesh.tensor": 8, "mesh.fsdp": 1}, "needs 8 devices, there are 4"),
        ({"dry_run": "h100:8", "freeze": ("ffn/dwn",)}, "decides nothing"),
        ({"dry_run": "h100:8", "model": "no/model.gguf"}, "no/model.gguf"),
    ],
)
def test_what_cannot_be_planned_is_named(tmp_path, changes, message):
    refused(message, planned, tmp_path, **{"model": "gemma2_2b"} | changes)
    assert not (tmp_path / "plan.json").exists()


def test_a_tpu_slice_is_compiled_for_without_a_tpu(tmp_path, libtpu):
    """The TPU's own compiler; 4 chips, fsdp 2 x tensor 2."""
    changes = {"dry_run": "v5e:2x2", "batch_size": 4, "seq_len": 128, "mesh.tensor": 2}
    report = planned(tmp_path, save_tiny(tmp_path / "tiny"), **changes)
    assert {kind for kind, *_ in report["compiled"]["collectives"]} & {"all-gather", "all-reduce"}
    with pytest.raises(ValueError, match="dry_run='v5e:3x5': libtpu rejects it"):
        planned(tmp_path, "gemma2_2b", dry_run="v5e:3x5")


@pytest.mark.parametrize("name, count", [("v4:2x2x1", 4), ("v5p:2x2x1", 4), ("v6e:2x2", 4)])
def test_a_chip_is_one_device(libtpu, name, count):
    assert len(hardware.find_target(name, np.float32).devices) == count


HLO = """HloModule step
%body (p: f32[4]) -> f32[4] {
  %ag = bf16[2,8]{1,0} all-gather(%x), channel_id=1, dimensions={1}, metadata={op_name="jit(s)/a"}
  %other = f32[2]{0} fusion(%ag), kind=kLoop, calls=%inner
}
%inner (p: f32[4]) -> f32[4] {
  %ar = (f32[3]{0}, pred[5]{0}) all-reduce-start(%x, %y), channel_id=2, to_apply=%add
}
%copy_of_inner (p: f32[4]) -> f32[4] {
  %ar2 = (f32[3]{0}, pred[5]{0}) all-reduce-start(%x, %y), channel_id=2, to_apply=%add
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %w = f32[4]{0} while(%p), condition=%cond, body=%body
  %rs = f32[] reduce-scatter(%w), channel_id=3, to_apply=%add
  %done = f32[2]{0} all-reduce-done(%ar)
}
"""


def test_collectives_are_counted_once_with_bytes_and_loops():
    collectives = hlo.collectives(HLO)
    assert [(x.kind, x.shapes, x.bytes, x.inside) for x in collectives] == [
        ("all-gather", ((2, 8),), 32, True),
        ("all-reduce", ((3,), (5,)), 17, True),
        ("reduce-scatter", ((),), 4, False),
    ]
    assert hlo.summary(collectives)[0] == ("all-gather", "in a loop", 1, 32)


def test_measured_rates_are_finite():
    chip = hardware.measure(jax.devices()[0], jnp.float32)
    assert chip.source == "measured" and 1e8 < chip.flops < 1e15 and chip.memory > 1e8
    assert 1e8 < chip.bandwidth < 1e14


def test_an_absent_accelerator_is_planned_as_one(tmp_path):
    """Its dtype, whatever this host is; and frozen layers of a stacked leaf do not train."""
    model = save_tiny(tmp_path / "tiny")
    whole = planned(tmp_path, model, dry_run="h100:1")
    assert whole["compute_dtype"] == "bfloat16"
    frozen = planned(tmp_path, model, dry_run="h100:1", freeze=("layers/0/",))
    first = sum(
        leaf.size
        for path, leaf in flatten(unstack(load_model(model).params)).items()
        if path.startswith("layers/0/")
    )
    assert whole["trainable_parameters"] - frozen["trainable_parameters"] == first


def test_rows_that_stand_together_must_fit_the_mesh(tmp_path):
    model = save_tiny(tmp_path / "tiny")
    config = config_of("p32_glue", f"{model},sst2", batch_size=32, together=4, lengths=(8,))
    config.dry_run = "h100:8"
    dry_run.dry_run(read(config), tmp_path)
    config.dry_run = "h100:16"
    refused("together=4 .*16 devices.*multiple of 64", dry_run.dry_run, read(config), tmp_path)


def test_a_loss_on_frozen_layers_of_a_stacked_leaf_is_refused(tmp_path):
    model = save_tiny(tmp_path / "tiny")
    config = make_config(model, freeze=("layers/0/",))
    with config.unlocked():
        config.losses.nucl.layers = (0, 1)
    plan(read(config))
    config.losses.nucl.layers = (0,)
    refused("'nucl' has no trainable leaf", plan, read(config))
