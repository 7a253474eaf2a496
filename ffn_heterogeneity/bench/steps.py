"""Training steps of configs, interleaved: the cost of a piece, tokens per second and MFU."""

import ast
import contextlib
import re
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ffn_heterogeneity.bench import timing
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import cut, place_batch, place_scalars
from ffn_heterogeneity.report.tables import UNKNOWN
from ffn_heterogeneity.train.dry_run import step_flops
from ffn_heterogeneity.train.fit import compile_step
from ffn_heterogeneity.train.hardware import CHIPS, measure, memory_of
from ffn_heterogeneity.train.plan import Plan, plan
from ffn_heterogeneity.train.settings import TrainConfig, read
from ffn_heterogeneity.train.source import starting_model
from ffn_heterogeneity.train.state import TrainState, create_state, split_params
from ffn_heterogeneity.wording import naming


def benchmark_steps(config: ConfigDict, load: Callable[[str], ConfigDict]) -> dict:
    """Times the training steps that `config.configs` describe, on random rows [batch, seq_len].

    An entry is a config file with its argument and the settings that differ from it:
    "configs/five.py:<model>,mrpc", "configs/jreg_pretrain.py:134m remat=none batch_size=64". A
    config with a `shape` starts from random weights and needs no tokenizer. Steps whose states have
    equal shapes share one state, which they update one after another.

    Args:
      load: reads a config of that form, without the settings.

    Returns:
      As `timing.compare`; for each program also "bytes" (of the whole step), "tokens", "gflop"
      (`dry_run.step_flops`, without rematerialization), "compile_seconds", "tokens_per_second" and
      "mfu". "machine" also has the device's FLOP/s: "peak_flops" (by its data sheet, the divisor of
      "mfu"; as measured for a device without one) and "product_flops" (measured, one large
      product). "left_out" is {name: why the step was not timed}.

    Raises:
      ValueError: fewer than two configs, fewer than two that fit, a wrong setting; or as
        `starting_model` and `plan`.
    """
    specs = tuple(map(str, config["configs"]))
    if len(set(specs)) < 2:
        raise ValueError(f"configs={specs}: name two training configs or more")
    dtype, within, start = str(config["compute_dtype"]), float(config["compile_limit"]), time.time()
    rates, states = _rates(dtype), {}
    programs, facts, left_out = {}, {}, {}
    for spec in specs:
        name = re.sub(r"[^:,\s=]*/", "", spec)  # without directories
        late = 0 < within < time.time() - start
        step, details = _step(_settings(config, spec, load), states) if not late else (None, {})
        if step is None:
            left_out[name] = details or f"not compiled within compile_limit={within:g} s"
            continue
        programs[name], facts[name] = step, details
        print(
            f"{name}: compiled in {details['compile_seconds']:.1f} s", file=sys.stderr, flush=True
        )
    if len(programs) < 2:
        raise ValueError(f"fewer than two steps to compare; left out: {left_out}")
    *others, base = programs
    title = f"{base}, {config['batch']} x {config['seq_len']} tokens; {dtype}"
    ratios = timing.ratios_of([(name, base) for name in others])
    timings = timing.compare(title, programs, int(config["repetitions"]), ratios)
    rows = [(name, why, UNKNOWN) for name, why in left_out.items()]
    for name, row in timings["programs"].items():
        each = 1e3 / row["median_ms"]
        speed = facts[name]["tokens"] * each
        mfu = 1e9 * facts[name]["gflop"] * each / rates["peak_flops"]
        row |= facts[name] | {"tokens_per_second": speed, "mfu": mfu}
        rows.append((name, f"{speed:,.0f}", f"{mfu:.1%}"))
    of = "MFU, of {peak_flops:.3g} FLOP/s (a product: {product_flops:.3g})".format(**rates)
    timings["tables"].append(timing.table("speed", ("program", "tokens per second", of), rows))
    return timings | {"machine": timing.machine() | rates, "left_out": left_out}


def _settings(config: ConfigDict, spec: str, load: Callable[[str], ConfigDict]) -> TrainConfig:
    """The experiment of one entry of `config.configs`."""
    file, *changes = re.split(r"\s+(?=[\w.]+=)", spec.strip())
    entry, length = load(file).lock(), int(config["seq_len"])
    entry.batch_size, entry.compute_dtype = int(config["batch"]), config["compute_dtype"]
    entry.update(
        {"lengths": (length,), "together": 1} if "lengths" in entry else {"seq_len": length}
    )
    for key, value in (one.split("=", 1) for one in changes):
        with contextlib.suppress(ValueError, SyntaxError):  # a word is itself
            value = ast.literal_eval(value)
        with naming(f"configs: {spec!r}", (KeyError, TypeError)):
            entry.update_from_flattened_dict({key: value})
    return read(entry)


def _step(config: TrainConfig, states: dict[str, list[TrainState]]) -> tuple:
    """((the compiled step, a list with its state, its batch, hyper), facts of it); (None, why) for
    a step that needs more memory than there is.

    Args:
      states: by their shapes; a state that is not there is made.
    """
    mesh = partition.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    built, model = plan(config, mesh), None
    if not config.source.is_fresh:
        model = starting_model(config.source, built.objective.head)
        built = plan(config, mesh, model) if built.differs(model) else built
    start, room = time.perf_counter(), memory_of(jax.devices()[:1])
    compiled, sizes = compile_step(built)
    facts = {"bytes": sizes["together"], "compile_seconds": time.perf_counter() - start}
    if compiled is None or facts["bytes"] > room:
        return None, f"needs {facts['bytes'] / 1e9:.1f} of {room / 1e9:.1f} GB"
    facts |= {"tokens": built.tokens, "gflop": step_flops(built)["model"] / 1e9}
    rng, batch = np.random.default_rng(0), {}
    for name, leaf in built.objective.shapes(config.batch_size, built.objective.longest).items():
        most = built.model.vocab_size if name == "tokens" else 2  # all ones, except the tokens
        batch[name] = rng.integers(1, most, leaf.shape).astype(leaf.dtype)
    batch = place_batch(cut(batch, config.accumulation), built.shardings[1])
    hyper = {k: np.float32(x) for k, x in built.hyper(0).items()}
    hyper = place_scalars(hyper, built.shardings[2])
    shapes, given = repr(built.state), (built.optimizer, built.trainable)
    if shapes not in states:
        loaded = model and create_state(model.params, *given, shardings=built.shardings[0])
        states[shapes] = [loaded or _random(built)]
    return (compiled, states[shapes], batch, hyper), facts


def _random(built: Plan) -> TrainState:
    """A state of random weights, made on the device: no copy of them on the host."""

    def make() -> TrainState:
        params = causal_lm.init(built.model, jax.random.key(0))
        moments = built.optimizer.init(split_params(params, built.trainable)[0])
        return TrainState(jnp.int32(0), params, moments, jnp.zeros(2, jnp.uint32))

    return jax.jit(make, out_shardings=built.shardings[0])()


def _rates(dtype: str) -> dict[str, float]:
    """FLOP/s of one device: its data sheet's, as measured without one; and as measured."""
    device = jax.devices()[0]
    kind, measured = device.device_kind.lower(), measure(device, dtype).flops
    peak = next((chip.flops for name, chip in CHIPS.items() if name in kind), measured)
    return {"peak_flops": peak, "product_flops": measured}
