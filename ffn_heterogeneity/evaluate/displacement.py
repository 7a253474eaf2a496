"""How far each block turns the residual stream, in any model (JREG, section 3)."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate.inputs import check_rows, input_rows
from ffn_heterogeneity.io.files import once
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.models.causal_lm import RunOptions, forward
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.probes.displacement import displacement_probe, jump_rates
from ffn_heterogeneity.report.figures import displacement_figure, training_figure

READINGS = {"before_final_norm": False, "after_final_norm": True}
RATES = ("zeta_L", "zeta_L-1", "zeta_L-2")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sums(config: ModelConfig, options: RunOptions, positions: str, params: dict, rows: jax.Array):
    """{reading: {"sum": [L], "count": [L]}} over rows int32 [B, T]; a row of -1 counts nothing."""
    probes = {name: displacement_probe(norm, positions) for name, norm in READINGS.items()}
    segments = (rows >= 0).astype(np.int32)
    batch = {"tokens": jax.numpy.maximum(rows, 0), "segment_ids": segments}
    seen = forward(config, params, batch, options=options, probes=tuple(probes.values()))["probes"]
    return {name: seen[probe.name] for name, probe in probes.items()}


def displacements(
    config: ModelConfig,
    params: dict,
    rows: np.ndarray,
    *,
    batch_size: int = 4,
    positions: str = "all",
    options: RunOptions = RunOptions(),
    progress: str | None = "displacement",
) -> dict[str, np.ndarray]:
    """Psi_1 .. Psi_L averaged over the tokens of all rows: {reading: float64 [L]}.

    Both readings of Psi_L, before and after the final norm, from one pass; the others agree.

    Args:
      params: stacked tree; numpy leaves are put on the device once.
      rows: int [windows, length]; every position counts (or the last of each row: `positions`).

    Raises:
      ValueError: rows that do not fit (`check_rows`), or a displacement that is not finite.
    """
    from tqdm import tqdm

    rows = np.asarray(rows)
    check_rows(rows, config.vocab_size)
    params, batch_size = jax.device_put(params), min(batch_size, len(rows))
    total: Any = None
    starts = range(0, len(rows), batch_size)
    for start in tqdm(starts, desc=progress, disable=None if progress else True, file=sys.stderr):
        batch = np.full((batch_size, rows.shape[1]), -1, np.int32)
        part = rows[start : start + batch_size]
        batch[: len(part)] = part
        sums = jax.device_get(_sums(config, options, positions, params, batch))
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
        total = sums if total is None else jax.tree.map(np.add, total, sums)
    found = {name: total[name]["sum"] / total[name]["count"] for name in READINGS}
    for name, psi in found.items():
        if not np.isfinite(psi).all():
            layer = int(np.flatnonzero(~np.isfinite(psi))[0])
            raise ValueError(
                f"the displacement {name} of layer {layer} is {psi[layer]}: the weights or the "
                "computation overflow; try compute_dtype=float32, or check the checkpoint"
            )
    return found


def describe(psi: dict[str, np.ndarray]) -> dict[str, Any]:
    """Of `displacements`: each reading with its jump rates, block influence and its ranking.

    Block influence is E[1 - cos] = 2 Psi (before the final norm); "least_influential" lists layers,
    counted from 0, in the order in which that criterion removes them.
    """
    result: dict[str, Any] = {}
    for name, values in psi.items():
        rates = {rate: float(value) for rate, value in jump_rates(values).items()}
        result[name] = {"psi": values.tolist(), **rates}
    influence = 2 * psi["before_final_norm"]
    result["block_influence"] = influence.tolist()
    result["least_influential"] = np.argsort(influence, kind="stable").tolist()
    return result


def displacement(config: ConfigDict, workdir: epath.Path) -> dict:
    """The analysis "displacement"; of every checkpoint where the model is a directory of them.

    The row of each checkpoint is kept in `<workdir>/series` as soon as it is there.

    Raises:
      ValueError: as `load_model` and `displacements`.
    """
    checkpoints = checkpoints_in(config.model)
    if not checkpoints and not config.revisions:
        model = load_model(config.model, revision=config.revision)
        found = _of_model(config, model)
        readings = {name: found[name] for name in READINGS}
        displacement_figure(readings, workdir / "displacement.png", model.source)
        return found
    series = [(name, {"spec": spec}) for name, spec in checkpoints] or [
        (revision, {"spec": config.model, "revision": revision}) for revision in config.revisions
    ]
    rows = []
    for name, source in series:
        measure = functools.partial(_row, config, name, source)
        rows.append(once(workdir / "series", name, measure))
    _curve(rows, workdir / "displacement.png")
    return {"checkpoints": rows}


def _row(config: ConfigDict, name: str, source: dict[str, str]) -> dict:
    model = load_model(source["spec"], revision=source.get("revision"))
    return {"checkpoint": name, "step": _step(name), **_of_model(config, model)}


def _of_model(config: ConfigDict, model: Model) -> dict:
    rows = input_rows(config, model)
    options = RunOptions(compute_dtype=np.dtype(config.compute_dtype))
    psi = displacements(
        model.config, model.params, rows,
        batch_size=config.batch_size, positions=config.positions, options=options,
    )  # fmt: skip
    # Every window is one document.
    tokens = len(rows) if config.positions == "last" else int(rows.size)
    found = describe(psi) | {"tokens": tokens, "windows": len(rows)}
    for name in READINGS:
        values = [f"{rate} {found[name][rate]:.2f}%" for rate in RATES if rate in found[name]]
        print(f"{model.source}, {name}: {', '.join(values)}", file=sys.stderr)
    return found


def _curve(rows: list[dict], path: epath.Path) -> None:
    """zeta against training steps, one line a rate and reading (JREG, Figure 4)."""
    lines = {
        f"{rate} {name.replace('_', ' ')}": [
            {"step": row["step"], "zeta": row[name][rate]} for row in rows if rate in row[name]
        ]
        for name in READINGS
        for rate in RATES
    }
    training_figure(lines, {"zeta": "jump rate (%)"}, path)


def checkpoints_in(model: str) -> list[tuple[str, str]]:
    """(name, directory) of every model in a directory that is no model itself, by step."""
    # What is no local directory (a hub id, a preset) has none.
    root = epath.Path(model)
    if not model or not root.is_dir() or (root / "config.json").exists():
        return []
    found = [path for path in root.iterdir() if (path / "config.json").exists()]
    return [(path.name, str(path)) for path in sorted(found, key=lambda p: (_step(p.name), p.name))]


def _step(name: str) -> int:
    """The last number in a checkpoint's name; 0 without one."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else 0
