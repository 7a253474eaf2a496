"""LoRA and DoRA in PEFT's files: adapter_config.json and adapter_model.safetensors.

A directory of such files represents its base model with the adapters added. PEFT stores
A [rank, in] and B [out, rank] for PyTorch's modules. If a module holds several of our kernels
(Phi-3's qkv_proj), A is copied to each of them and B is split like the kernel. PEFT's shapes are
the same for a base of Conv1D modules (GPT-2's kernels are stored [in, out]); `fan_in_fan_out` only
describes the base: in PEFT, too, the module's class decides.
"""

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.adapters import FFN_LEAVES, adapter_leaves
from ffn_heterogeneity.io.assemble import all_finite
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.files import atomic_path, reject_bucket, write_json
from ffn_heterogeneity.io.pieces import Spec, open_pieces
from ffn_heterogeneity.io.read import read_object
from ffn_heterogeneity.io.safetensors import SINGLE, open_file
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import family_by_name
from ffn_heterogeneity.models.families.rules import Rule
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.tree import flatten, unflatten
from ffn_heterogeneity.wording import naming, some

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, MAGNITUDE = "base_model.model.", "lora_magnitude_vector"
# Settings that change the function of the same tensors: an error unless they are off.
OFF = (
    "modules_to_save",
    "layer_replication",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "target_parameters",
    "trainable_token_indices",
)
# Initializations that subtract from the base's weights; save_pretrained's
# path_initial_model_for_weight_conversion converts them to plain LoRA.
OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Limits on patterns: length, number, and seconds to match all of them with a module.
LONGEST, PATTERNS, SECONDS = 200, 10_000, 2.0
LARGEST_ALPHA = 1e6


def is_adapter(path: Path) -> bool:
    """True if a directory contains only adapters."""
    return (path / CONFIG).is_file() and not (path / "config.json").exists()


def base_of(directory: Path) -> tuple[str, str | None]:
    """Return the adapters' base model and, of a hub id, its revision.

    The base is a path (absolute or relative to the directory) or a hub id.

    Raises:
      CheckpointError: no base is named, or the base is itself an adapter.
    """
    settings = read_object(directory / CONFIG)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{directory / CONFIG}: base_model_name_or_path names no model")
    near = directory / base
    try:
        path = near if near.exists() else Path(base).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # not a valid file name
        raise CheckpointError(
            f"{directory / CONFIG}: base_model_name_or_path={base!r:.60} names no model"
        ) from None
    if path.is_dir() and is_adapter(path):
        raise CheckpointError(f"{directory / CONFIG}: the base {base!r} is an adapter itself")
    return (str(path), None) if path.exists() else (base, str(revision) if revision else None)


def read_adapters(directory: Path, config: ModelConfig, params: dict) -> dict:
    """Return the stacked tree of the base with the leaves of LoRA or DoRA added to its kernels.

    Raises:
      CheckpointError: settings or tensors that are not LoRA's or do not fit the base; the message
        names them.
    """
    settings, leaves = read_object(directory / CONFIG), flatten(unstack(params))
    kind = str(settings.get("peft_type")).upper()
    on = [key for key in OFF if settings.get(key)]
    if str(settings.get("init_lora_weights")).partition("_niter")[0] in OTHER_BASE:
        on.append(f"init_lora_weights={settings['init_lora_weights']}, which changed the base,")
    if kind != "LORA" or on or settings.get("bias", "none") != "none":
        what = f"peft_type={kind}" if kind != "LORA" else ", ".join(on) or "bias"
        raise CheckpointError(f"{directory / CONFIG}: {what} is not read here: LoRA and DoRA are")
    if not (directory / WEIGHTS).is_file():
        raise CheckpointError(f"{directory} has no {WEIGHTS}: pickled adapters are not opened")
    tensors = {name: one.load() for name, one in open_file(directory / WEIGHTS).items()}
    added: dict[str, np.ndarray] = {}
    for rule, module in _modules(config):
        names = [f"{PREFIX}{module}.{end}" for end in ("lora_A.weight", "lora_B.weight", MAGNITUDE)]
        a, b, m = (tensors.pop(name, None) for name in names)
        if a is None and b is None and m is None:
            continue
        if a is None or b is None or (m is None) == bool(settings.get("use_dora")):
            raise CheckpointError(f"{directory / WEIGHTS}: {module} lacks one of {names}")
        with naming(f"{directory}: {module}", raised=CheckpointError):
            # A module in the file is [out, in]; Conv1D is [in, out].
            b = b.T if family_by_name(config.family).conv1d else b
            added |= _leaves(rule, a, b, m, settings)
    if tensors or not added:
        name = next(iter(tensors), "nothing")
        raise CheckpointError(
            f"{directory / WEIGHTS}: the base model, a {config.family}, has no "
            f"place for {name!r}: are these adapters for another?"
        )
    return restack(config, unflatten(_joined(directory, leaves, added)))


def _modules(config: ModelConfig) -> Iterator[tuple[Rule, str]]:
    """(rule, PyTorch's name) of every module of a layer that has kernels."""
    for rule in family_by_name(config.family).rules(config):
        layer = re.match(r"layers/.*/kernel$", rule.paths[0])
        if layer and not _sparse(config, rule.paths[0]):
            yield rule, rule.names[0].removesuffix(".weight")


def _sparse(config: ModelConfig, path: str) -> bool:
    """True for leaves of experts and routers, which are not separate modules in PyTorch."""
    matched = re.match(r"layers/(\d+)/ffn/", path)
    return matched is not None and config.layers[int(matched[1])].experts is not None


def _leaves(rule: Rule, a, b, m, settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if a.ndim != 2 or b.ndim != 2 or (m is not None and m.ndim != 1):
        raise ValueError(f"A {a.shape} and B {b.shape} must be matrices, lengths a vector")
    scale, result = _scale(settings, rule.names[0].removesuffix(".weight"), len(a)), {}
    cut = [np.ascontiguousarray(x) for x in rule.load([b.astype(np.float32)])]
    lengths = rule.load([m.astype(np.float32)]) if m is not None else [None] * len(cut)
    for path, lora_b, length in zip(rule.paths, cut, lengths, strict=True):
        module = path.rpartition("/")[0]
        result[f"{module}/lora_a"] = np.ascontiguousarray(a.astype(np.float32).T)
        result[f"{module}/lora_b"] = lora_b
        result[f"{module}/lora_scale"] = np.full((1,), scale, np.float32)
        if length is not None:
            result[f"{module}/dora_m"] = np.ascontiguousarray(length)
    return result


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / r (rank-stabilized: alpha / sqrt(r)), with a module's values from patterns.

    Raises:
      ValueError: r is not A's rank or below 1, alpha is not a number, or a pattern is invalid.
    """
    until = time.monotonic() + SECONDS

    def own(key: str, pattern: str) -> Any:
        patterns = settings.get(pattern) or {}
        if not isinstance(patterns, dict) or len(patterns) > PATTERNS:
            raise ValueError(f"{pattern}={patterns!r:.60} must map names to numbers")
        for name, value in patterns.items():
            if _matches(name, module, until - time.monotonic(), pattern):
                return value
        return settings.get(key)

    stated, alpha = own("r", "rank_pattern"), own("lora_alpha", "alpha_pattern")
    if not isinstance(alpha, int | float) or not abs(alpha) <= LARGEST_ALPHA:
        raise ValueError(f"lora_alpha={alpha!r:.60} must be a number to {LARGEST_ALPHA:g}")
    if stated != rank or rank < 1:
        raise ValueError(f"r={stated!r:.60} must be A's rank, {rank}, and at least 1")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _matches(name: str, module: str, seconds: float, where: str) -> bool:
    """True if PEFT would match the (untrusted) pattern `name` with the module.

    Raises:
      ValueError: an invalid pattern, or a timeout. Counted repetitions (which the library unrolls)
        and (?...) are rejected: no module name needs them.
    """
    import regex  # unlike `re`, it supports a timeout

    try:
        if len(name) > LONGEST or "{" in name or re.search(r"\(\?(?!:)", name):
            raise ValueError("it is not one of names")
        if seconds <= 0:
            raise TimeoutError
        return regex.fullmatch(rf"(.*\.)?({name})", module, timeout=seconds) is not None
    except TimeoutError:
        raise ValueError(f"{where}: {name!r:.60} takes too long to match") from None
    except (ValueError, regex.error, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: {name!r:.60} is no pattern: {error}") from None


def _joined(directory: Path, leaves: dict[str, Any], added: dict[str, Any]) -> dict:
    """Join the base's leaves and the adapters' after checking the adapters' shapes."""
    for path, leaf in added.items():
        module, _, name = path.rpartition("/")
        fan_in, fan_out = leaves[f"{module}/kernel"].shape
        rank = added[f"{module}/lora_a"].shape[-1]
        due = {"lora_a": (fan_in, rank), "lora_b": (rank, fan_out), "dora_m": (fan_out,)}
        shape = due.get(name, (1,))  # lora_scale
        if leaf.shape != shape:
            raise CheckpointError(
                f"{directory / WEIGHTS}: {path} has shape {leaf.shape}; expected {shape}: are "
                "these adapters for another model?"
            )
        if not all_finite(leaf):
            raise CheckpointError(f"{directory / WEIGHTS}: {path} contains NaN or infinity")
    return leaves | added


def _check_form(config: ModelConfig, leaves: Mapping[str, Any]) -> None:
    """Reject leaves that PEFT's files have no form for."""
    if config.head is not None:
        raise CheckpointError(
            f"PEFT's file of adapters would lose the head ({config.head.name}): export all weights"
        )
    names = {path.split("/")[-1] for path in leaves}
    known = {*adapter_leaves(), *FFN_LEAVES} - {"lora_a", "lora_b", "lora_scale", "dora_m"}
    if other := names & known:
        raise CheckpointError(f"PEFT has no place for {sorted(other)}: export folded weights")
    sparse = [path for path in leaves if path.endswith("/lora_a") and _sparse(config, path)]
    if sparse:
        raise CheckpointError(
            f"PEFT has no form for adapters of experts and routers ({some(sparse)}): fold them "
            "(save_pretrained), or keep them with structure='keep'"
        )


def save_adapters(
    config: ModelConfig,
    params: dict,
    directory: str | os.PathLike,
    base: str,
    overwrite: bool = False,
) -> Path:
    """Save the adapters of a tree for PEFT on `base`, with the same logits.

    All other weights are taken to be the base's.

    Raises:
      CheckpointError: no adapters, adapters of experts, other structure besides adapters, a head,
        kernels of one PyTorch module with different A (fold those), an existing directory, or one
        in a bucket.
    """
    reject_bucket(directory)
    if Path(directory).exists() and not overwrite:
        raise CheckpointError(f"{directory} exists: use another, or overwrite")
    leaves, tensors, ranks, alphas = flatten(unstack(params)), {}, {}, {}
    conv1d = family_by_name(config.family).conv1d
    _check_form(config, leaves)

    def stored(modules: list[str], name: str) -> list[np.ndarray]:
        return [np.asarray(leaves[f"{module}/{name}"], np.float32) for module in modules]

    for rule, module in _modules(config):
        modules = [path.rpartition("/")[0] for path in rule.paths]
        adapted = [m for m in modules if f"{m}/lora_a" in leaves]
        if not adapted:
            continue
        a, *others = stored(adapted, "lora_a")
        if len(adapted) < len(modules) or not all(np.array_equal(a, other) for other in others):
            raise CheckpointError(
                f"torch's {module} holds {modules}, whose A differ: export folded weights"
            )
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.T
        b = rule.save(stored(adapted, "lora_b"))[0]
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.T if conv1d else b
        if f"{adapted[0]}/dora_m" in leaves:
            tensors[f"{PREFIX}{module}.{MAGNITUDE}"] = rule.save(stored(adapted, "dora_m"))[0]
        ranks[module] = a.shape[-1]
        alphas[module] = float(leaves[f"{adapted[0]}/lora_scale"][0]) * ranks[module]
    if not tensors:
        raise CheckpointError("the model has no LoRA adapters")
    lengths = {one for one in ranks if f"{PREFIX}{one}.{MAGNITUDE}" in tensors}
    if lengths and (plain := ranks.keys() - lengths):
        raise CheckpointError(f"{some(sorted(plain))} have LoRA, others DoRA: PEFT has one form")
    task = "CAUSAL_LM" if config.lm_head else "FEATURE_EXTRACTION"
    rank, alpha = max(ranks.values()), next(iter(alphas.values()))
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if config.kind == "encoder_decoder" else task,
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(ranks),
        "bias": "none",
        "use_dora": bool(lengths),
        "lora_dropout": 0.0,
        "rank_pattern": {re.escape(k): r for k, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(k): a for k, a in alphas.items() if a != alpha},
        "inference_mode": True,
        "fan_in_fan_out": conv1d,
    }
    with atomic_path(directory, directory=True) as folder:
        write_json(folder / CONFIG, settings)
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        specs = {name: Spec(array.shape, array.dtype) for name, array in arrays.items()}
        with open_pieces(folder, specs, 2**60) as pieces:
            for name, array in arrays.items():
                pieces.write(name, array)
        (folder / SINGLE).rename(folder / WEIGHTS)
    return Path(directory)
