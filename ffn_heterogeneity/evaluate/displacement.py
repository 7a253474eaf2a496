"""Angular displacement of the residual stream by each block, in any model (JREG, section 3)."""

import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from ffn_heterogeneity.data.packing import encode
from ffn_heterogeneity.data.sources import DataError, read_each, read_jsonl
from ffn_heterogeneity.data.tasks.base import text_of
from ffn_heterogeneity.data.windows import window_bos
from ffn_heterogeneity.evaluate.inputs import OVERFLOW, TextSettings, checked_rows, tokenizer_of
from ffn_heterogeneity.io.files import once
from ffn_heterogeneity.io.load import Load, Model, load_model
from ffn_heterogeneity.models.causal_lm import RunOptions
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.probes.displacement import (
    DISPLACEMENT,
    DISPLACEMENT_AFTER_NORM,
    POSITIONS,
    jump_rates,
)
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.report.figures import curves_figure
from ffn_heterogeneity.wording import check_number, markdown_table

READINGS = {"before_final_norm": DISPLACEMENT, "after_final_norm": DISPLACEMENT_AFTER_NORM}
RATES = ("zeta_L", "zeta_L-1", "zeta_L-2")


def displacements(
    config: ModelConfig,
    params: dict,
    documents: Sequence[np.ndarray],
    *,
    batch_size: int = 4,
    options: RunOptions = RunOptions(),
    progress: str | None = "displacement",
) -> dict[str, dict[str, np.ndarray]]:
    """Psi_1 .. Psi_L averaged over tokens: {positions: {reading: float64 [L]}}.

    Positions are all tokens of the documents, or the last token of each; readings are before and
    after the final norm. All are computed in one pass. Only Psi_L depends on the norm.

    Args:
      params: stacked tree; numpy leaves are put on the device once.
      documents: token ids, int [length] each; documents do not see each other, and padding is
        ignored.

    Raises:
      ValueError: invalid ids (`checked_rows`), or a non-finite displacement.
    """
    rows = checked_rows(documents, config.vocab_size)
    batches = token_batches(rows, batch_size, progress=progress)
    seen = observe(config, params, batches, *READINGS.values(), options=options)

    psi: dict[str, dict] = {positions: {} for positions in POSITIONS}
    for name, probe in READINGS.items():
        for positions, sums in seen[probe.name].items():
            psi[positions][name] = sums["sum"] / sums["count"]
    for name, values in psi["all"].items():
        if not np.isfinite(values).all():
            layer = int(np.flatnonzero(~np.isfinite(values))[0])
            what = f"the displacement {name} of layer {layer} is {values[layer]}"
            raise ValueError(f"{what}: {OVERFLOW}")
    return psi


def describe(psi: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Summarize `displacements`: the readings with jump rates, block influence and its ranking.

    The readings are over all tokens and, under "last", over last tokens. Block influence is
    E[1 - cos] = 2 Psi (before the final norm); "least_influential" lists layers, counted from 0, in
    the order in which that criterion removes them.
    """

    def described(values: np.ndarray) -> dict[str, Any]:
        rates = {rate: float(value) for rate, value in jump_rates(values).items()}
        return {"psi": values.tolist(), **rates}

    result: dict[str, Any] = jax.tree.map(described, psi["all"])
    influence = 2 * psi["all"]["before_final_norm"]
    result["block_influence"] = influence.tolist()
    result["least_influential"] = np.argsort(influence, kind="stable").tolist()
    return result | {"last": jax.tree.map(described, psi["last"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisplacementSettings(TextSettings):
    """Settings of a text, or of the documents in field `text_field` of a JSONL file.

    Attributes:
      max_documents: maximum number of documents, from the first; 0: all.
      revisions: revisions of a hub id, each a checkpoint.
    """

    jsonl: str
    text_field: str
    max_documents: int
    revisions: tuple[str, ...]

    def read(self) -> Any:
        if not self.jsonl or self.text or self.token_ids:
            return super().read()
        check_number("max_documents", self.max_documents, "[0, inf), 0 for all")
        texts = read_each(read_jsonl([self.jsonl]), functools.partial(_text, self.text_field))
        return list(itertools.islice(texts, self.max_documents or None))

    def documents(self, model: Model) -> tuple[list[np.ndarray], int]:
        """Return the documents' ids, and how many documents were cut to `window`.

        Unless `bos` is "none", or "auto" and the tokenizer puts none, each begins with a bos, which
        does not count as one of the window's tokens.

        Raises:
          ValueError: as `read`; the model has no tokenizer, or the tokenizer no bos.
        """
        tokenizer, window = tokenizer_of(model), self.window
        check_number("window", window, "[1, inf)")
        first = [] if window_bos(self.bos, tokenizer) == "none" else [tokenizer.bos_token_id]
        if None in first:
            raise ValueError('this tokenizer has no bos token: use --config.bos="none"')
        documents = [encode(tokenizer, text) for text in self.read()]
        cut = sum(len(ids) > window for ids in documents)
        if cut:
            print(f"{cut} of {len(documents)} documents cut to window={window}", file=sys.stderr)
        return [np.asarray(first + ids[:window], np.int32) for ids in documents], cut


def _text(field: str, row: Mapping[str, Any]) -> str:
    text = text_of(row, field)
    if not text.strip():
        raise DataError(f"no text in field {field!r}")
    return text


def displacement(settings: DisplacementSettings, load: Load, workdir: epath.Path) -> dict:
    """The analysis "displacement"; for a directory of checkpoints, of each checkpoint.

    The row of each checkpoint is saved in `<workdir>/series` when it is complete.

    Raises:
      ValueError: as `load_model` and `displacements`.
    """
    series = [(name, spec, None) for name, spec in checkpoints_in(settings.model)]
    series = series or [(name, settings.model, name) for name in settings.revisions]
    if not series:
        result = _of_model(settings, load(settings.model, revision=settings.revision))
        _say(settings.model, result)
        panels = {"all tokens": result, "last tokens": result["last"]}
        lines = {
            title: {_words(name): panel[name] for name in READINGS}
            for title, panel in panels.items()
        }
        _draw(lines, workdir)
        return result
    rows = []
    for name, spec, revision in series:
        measure = functools.partial(_row, settings, name, spec, revision)
        rows.append(once(workdir / "series", name, measure))
        _say(name, rows[-1])
    lines = {_words(name): {row["checkpoint"]: row[name] for row in rows} for name in READINGS}
    _draw(lines, workdir)
    _curve(rows, workdir / "jump_rates.png")
    return {"checkpoints": rows}


def _words(name: str) -> str:
    return name.replace("_", " ")


def _row(settings: DisplacementSettings, name: str, spec: str, revision: str | None) -> dict:
    model = load_model(spec, revision=revision)
    return {"checkpoint": name, "step": _step(name), **_of_model(settings, model)}


def _of_model(settings: DisplacementSettings, model: Model) -> dict:
    if settings.jsonl:
        documents, cut = settings.documents(model)
        counts = {"documents": len(documents), "cut": cut}
    else:
        documents = settings.rows(model)  # every window is one document
        counts = {"windows": len(documents)}
    how = settings.how | {"options": dataclasses.replace(settings.options, packed=False)}
    psi = displacements(model.config, model.params, documents, **how)
    result: dict[str, Any] = describe(psi) | {"tokens": sum(map(len, documents)), **counts}
    result["last"]["tokens"] = len(documents)
    return result


def _say(name: str, result: dict) -> None:
    """Print a table: every layer's displacement, the jump rates, and the number of tokens."""
    parts = {"all": result, "last": result["last"]}
    header = [f"{reading.split('_')[0]}, {which}" for which in parts for reading in READINGS]
    columns = []
    for section in parts.values():
        for reading in (section[name] for name in READINGS):
            psi = [f"{value:.5f}" for value in reading["psi"]]
            rates = [f"{reading[rate]:.2f}%" for rate in RATES if rate in reading]
            columns.append([*psi, *rates, section["tokens"]])
    layers = len(result["block_influence"])
    rows = [*range(1, layers + 1), *RATES[: layers - 1], "tokens"]
    table = markdown_table(("layer", *header), [*zip(rows, *columns, strict=True)])
    title = "angular displacement before or after the final norm, of all or the last tokens"
    print(f"{name}: {title}\n{table}")


def _draw(panels: dict[str, dict[str, dict]], workdir: epath.Path) -> None:
    """Plot Psi against the layer (JREG, Figures 2 and 4), one line per reading or checkpoint."""
    curves: dict[str, dict] = {title: {} for title in panels}
    for title, lines in panels.items():
        for label, reading in lines.items():
            if "zeta_L" in reading:
                label = f"{label}, jump {reading['zeta_L']:.2f}%"
            curves[title][label] = dict(enumerate(reading["psi"], 1))
    axes = {"xlabel": "layer", "ylabel": "angular displacement"}
    curves_figure(curves, workdir / "displacement.png", **axes)


def _curve(rows: list[dict], path: epath.Path) -> None:
    """Plot zeta against training steps, one line per rate and reading (JREG, Table 7)."""
    lines = {
        f"{rate} {_words(name)}": {
            row["step"]: row[name][rate] for row in rows if rate in row[name]
        }
        for name in READINGS
        for rate in RATES
    }
    curves_figure({"jump rate (%)": lines}, path)


def checkpoints_in(model: str) -> list[tuple[str, str]]:
    """(name, directory) of the models in a directory that is not itself a model, by step."""
    # Hub ids and presets are not directories: they have no checkpoints.
    root = epath.Path(model)
    if not model or not root.is_dir() or (root / "config.json").exists():
        return []
    paths = [path for path in root.iterdir() if (path / "config.json").exists()]
    return [(path.name, str(path)) for path in sorted(paths, key=lambda p: (_step(p.name), p.name))]


def _step(name: str) -> int:
    """The last number in a checkpoint's name; 0 without one."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else 0
