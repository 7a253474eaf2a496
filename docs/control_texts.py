"""Two texts that no model should be compressed on: controls of the study of calibration texts.

    python docs/control_texts.py <model> <its own_text.jsonl> <folder>

writes random.jsonl, rows of token ids drawn at random (as many as the model's own rows, as long),
and written.txt, the self-generated text as text, which another model can read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.surgery.calibration import read_rows, write_rows


def main(name: str, own: str, out: str) -> None:
    """Write both files."""
    model, folder = load_model(name), Path(out)
    rows, drawn = read_rows(model, own), np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    size = model.config.vocab_size
    ids = [np.asarray([row[0], *drawn.integers(size, size=len(row) - 1)]) for row in rows]
    write_rows(folder / "random.jsonl", ids)
    texts = (model.tokenizer.decode(row, skip_special_tokens=True) for row in rows)
    (folder / "written.txt").write_text("\n\n".join(texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
