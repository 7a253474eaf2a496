"""Sweeps: their combinators, those of every config file, and keys outside of the program."""

import dataclasses
import itertools
import json
import re
import runpy
import shlex

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from tiny_models import LLAMA, REPOSITORY, config_of
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.launch import cli, sweep_run
from ffn_heterogeneity.launch.commands import COMMANDS
from ffn_heterogeneity.launch.experiment import _with_seed as with_seed
from ffn_heterogeneity.launch.sweep import Point, chain, check_sweep, point, product
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.train.plan import plan, static_key
from ffn_heterogeneity.train.settings import read

pytestmark = pytest.mark.usefixtures("compiled_quickly")


# ---- combinators


def pairs_of(points):
    return [(one.name, dict(one.settings)) for one in points]


def test_product_is_every_combination_the_last_fastest():
    values = {"a.x": (1, 2), "b": ("u", "v", "w"), "c": (0.5,)}
    points = product({"a.x": values["a.x"], "b": values["b"]}, {"c": values["c"]})
    expected = [
        (f"x={x},b={b},c={c}", {"a.x": x, "b": b, "c": c})
        for x, b, c in itertools.product(*values.values())
    ]
    assert pairs_of(points) == expected
    nested = product(product({"a.x": (1, 2)}, {"b": ("u", "v", "w")}), {"c": (0.5,)})
    assert nested == points


def test_chain_goes_one_after_the_other():
    points = chain({"a": (1, 2), "b": (3,)}, point("plain"), product({"a": (4,)}))
    first = [("a=1", {"a": 1}), ("a=2", {"a": 2}), ("b=3", {"b": 3})]
    assert pairs_of(points) == [*first, ("plain", {}), ("a=4", {"a": 4})]
    rows = product(point("random", {"criterion": "random"}), {"seed": (0, 1)})
    assert [one.name for one in rows] == ["random,seed=0", "random,seed=1"]


NAMED = [("losses.nucl.weight", 1000.0, "weight=1000"), ("x", 0.1234567, None)]
NAMED += [("lr", 1e-6, "lr=1e-06"), ("path", "/data/a b:c", "path=_data_a_b_c")]
NAMED += [("t", ("ffn_out", "attention_out"), "t=ffn_out+attention_out"), ("t", (), "t=none")]
NAMED += [("on", True, "on=True")]


@pytest.mark.parametrize(("key", "value", "name"), NAMED)
def test_names_are_directory_names(key, value, name):
    (one,) = product({key: (value,)})
    check_sweep([one])
    assert one.name == (name or f"{key}={value!r}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: product({"a": "mstd"}), "sweep over a='mstd': give a tuple"),
        (lambda: product({"a": ()}), "give a tuple of values"),
        (lambda: chain({"a": 3}), "give a tuple of values"),
        (lambda: product({"a": (1,)}, {"a": (2,)}), "two parts of a sweep set 'a'"),
        (lambda: check_sweep(()), "no point"),
        (lambda: check_sweep(chain({"a.x": (1,), "b.x": (1,)})), "two points are named 'x=1'"),
        (lambda: check_sweep(point("a/b")), "point 'a/b': a name"),
        (lambda: check_sweep(point(".hidden")), "a name is made of"),
        (lambda: check_sweep(point("")), "a name is made of"),
    ],
)
def test_what_is_no_sweep_is_said(make, message):
    refused(message, make)


# ---- what configs define


def swept_configs():
    pairs = []
    for path in sorted((REPOSITORY / "configs").glob("*.py")):
        text = path.read_text()
        names = re.findall(r'^    "(\w+)":', text[text.find("\nSWEEPS") :], re.M)
        pairs += [(path.stem, name) for name in names if "\nSWEEPS" in text]
    return pairs


def parsed(*arguments):
    """The config of a command line."""
    values = flags.FlagValues()
    argv, _ = cli.prepare(["x", *(x for x in arguments if x.startswith("--config"))], "", values)
    values(argv)
    return values["config"].value


def printed_is_read(one, config, spec, sweep, kind):
    """A point's printed command is parsed to its config."""
    task = sweep_run.PointRun(one, sweep_run.apply(config, one), REPOSITORY)
    line = shlex.split(sweep_run.command(task, REPOSITORY, spec, sweep, kind))
    got = parsed(*line)
    got = sweep_run.apply(got, one) if f"--only={one.name}" in line else got
    assert repr(got.to_dict()) == repr(task.config.to_dict())
    return got


COUNTS = {"nucl_finetune": {"alpha": 10, "targets": 5}}
COUNTS["prune_table"] = {"criteria": 12, "pairs": 30, "halves": 6}
COUNTS["jreg_pretrain"] = {"alpha": 7, "lambda": 5, "steps": 4, "controls": 4}


@pytest.mark.parametrize(("name", "sweep"), swept_configs())
def test_every_point_of_every_sweep_is_a_config(name, sweep):
    argument = {"nucl": "170m,nucl", "controls": "170m,rescale"}.get(sweep)
    argument = argument if name == "jreg_pretrain" else None
    config = config_of(name, argument, model="smollm2_135m")
    spec = str(REPOSITORY / f"configs/{name}.py")
    kind, points = sweep_run.points_of(spec, sweep, config)
    assert kind in COMMANDS
    for one in points:
        printed_is_read(one, config, f"{spec}:{argument}" if argument else spec, sweep, kind)
    values = [json.dumps(sweep_run.apply(config, one).to_dict(), sort_keys=True) for one in points]
    assert len(set(values)) == len(values), "two points are the same run"
    assert len(points) == COUNTS.get(name, {}).get(sweep, len(points))


def test_none_and_the_home_on_command_lines(monkeypatch):
    """None for a placeholder, a loss's weight, a stage's key, and a key without a flag for None."""
    monkeypatch.setenv("HOME", "/home/me")
    both = {"lambda_rate": None, "losses.classification.weight": None, "lengths": (8, 16)}
    both |= {"optimizer.clip_norm": 2, "data.path": "None", "model": "~/x"}
    for settings in (both, both | {"dropout": None}):
        read = printed_is_read(
            Point("p", settings), config_of("p32_glue"), "p32_glue", "s", "train"
        )
        assert read.model == "/home/me/x"
    tuned = "mlp_fusion:minilm_l6,sst2,fusion,tuned"
    for spec, wanted, *given in (
        ("p32_glue", 2, "lambda_rate=None", "lambda_rate=2"),
        (tuned, None, "tune.lambda_rate=2", "tune.lambda_rate=None"),
        (tuned, 2, "tune.losses.classification.weight=2"),
        ("p32_glue", "/home/me/x", "data.path=~/x"),
    ):
        read = parsed(f"--config={spec}", *(f"--config.{one}" for one in given))
        assert read[given[-1].partition("=")[0]] == wanted
    for given in ("steps", "seed", "together"):
        refused("None", parsed, "--config=five", f"--config.{given}=None", error=flags.Error)


def test_what_the_config_file_lacks_is_said(tmp_path):
    config = config_of("prune_table")
    spec = str(REPOSITORY / "configs/prune_table.py")
    for sweep, message in (("criterion", "did you mean 'criteria'"), ("", "Known: criteria")):
        refused(message, sweep_run.points_of, spec, sweep, config)
    with pytest.raises(ValueError, match="defines no sweep"):
        sweep_run.points_of(str(REPOSITORY / "configs/perplexity.py"), "x", config)
    for settings, message in (
        ({"criterio": "gini"}, "point 'p', the config: unknown key 'criterio', did you mean"),
        ({"window": "wide"}, "point 'p', key 'window'"),
    ):
        refused(message, sweep_run.apply, config, Point("p", settings))


FOLLOWING = [("mlp_fusion", "minilm_l6,sst2,fusion,tuned"), ("mlp_fusion", "minilm_l6,sst2,lth")]


@pytest.mark.parametrize(("name", "argument"), [*FOLLOWING, ("five", "minilm_l6,mrpc")])
def test_what_takes_its_value_from_another_key_follows(name, argument):
    """Every point and every run of `seeds` equals the config of the same command-line keys."""
    config = config_of(name, argument)
    sweeps = runpy.run_path(str(REPOSITORY / "configs" / f"{name}.py"))["SWEEPS"]
    for one in itertools.chain.from_iterable(sweeps.values()):
        wanted = config_of(name, argument)
        wanted.update_from_flattened_dict(dict(one.settings))
        assert sweep_run.apply(config, one).to_dict() == wanted.to_dict()
    config.seeds = (3, 4)
    for seeded in (sweep_run.apply(config, Point("p", {"seed": 3})), with_seed(config, 3)):
        groups = {"fuse", "compress", "tune", "finetune", "mask_2"} & {*seeded}
        assert groups and all(seeded[key].seed == 3 for key in groups)
    assert config.seed == 0 and config.seeds == (3, 4)


# ---- one program for many runs


def test_free_keys_are_in_no_program():
    """The text of the lowered step is the same for all values of these keys."""
    small = {"batch_size": 2, "seq_len": 8, "tensorboard": False}
    one = config_of("nucl_finetune", "smollm2_135m,text", **small)
    free = {"revision": "x", "seed": 7, "seeds": (1, 2), "steps": 5, "losses__nucl__weight": 0.0}
    free |= {"dropout": 0.3, "optimizer__learning_rate": 0.5, "optimizer__schedule": "linear"}
    free |= {"optimizer__warmup_steps": 1, "optimizer__final_fraction": 0.5, "eval__every": 1}
    free |= {"eval__max_batches": 3, "checkpoint__every": 1, "checkpoint__keep_best": False}
    free |= {"export__form": "native", "profile": "1:2", "dry_run": "here"}
    other = config_of("nucl_finetune", "gemma2_2b,text", **small, **free)
    params = jax.eval_shape(lambda: causal_lm.init(LLAMA, jax.random.key(0)))
    model = Model(LLAMA, params, None, "")
    mesh = partition.make_mesh(data=1, fsdp=1, tensor=1)

    def key_of(config, model=model):
        settings = read(config)
        return static_key(settings.static, settings.optimizer_with(()), model, mesh)

    keys = [key_of(config) for config in (one, other)]
    assert keys[0] == keys[1] and hash(keys[0]) == hash(keys[1])

    def text(config):
        built = plan(read(config), mesh, model)
        batch = built.objective.shapes(2, {"T": 8})
        batch = {k: jax.ShapeDtypeStruct((1, *v.shape), v.dtype) for k, v in batch.items()}
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        hyper = dict.fromkeys(read(config).hyper(built.objective.terms)(0), scalar)
        return built.train_step.lower(built.state, batch, hyper).as_text()

    assert text(one) == text(other)
    fixed = {"losses__nucl__variant": "gini", "losses__nucl__weight": None, "dropout": 0.0}
    fixed |= {"losses__nucl__targets": ("attention_out",), "monitors__entropy__variant": "gini"}
    fixed |= {"optimizer__b1": 0.8, "batch_size": 4, "freeze": ("^embed/",), "remat": "full"}
    fixed |= {"data__packing": False, "losses__nll__reduction": "sum", "compute_dtype": "bfloat16"}
    for key, value in fixed.items():
        changed = config_of("nucl_finetune", "smollm2_135m,text", **small | {key: value})
        assert key_of(changed) != keys[0], key
    narrower = dataclasses.replace(model, config=LLAMA.with_widths([24, 24, 24, 23]))
    assert key_of(one, narrower) != keys[0]
