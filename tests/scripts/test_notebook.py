"""The notebook from its first to its last cell, as Colab would run it."""

from __future__ import annotations

import json
import os

import pytest
from tiny_models import REPOSITORY

NOTEBOOK = REPOSITORY / "notebooks" / "quickstart.ipynb"


def test_no_output_of_anybodys_run_is_in_it():
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert len(cells) > 5 and not any(c["outputs"] or c["execution_count"] for c in cells)


@pytest.mark.slow
def test_it_runs(smollm2_gguf, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    (tmp_path / ".cache" / "models").mkdir(parents=True)
    (tmp_path / ".cache" / "models" / smollm2_gguf.name).symlink_to(smollm2_gguf.resolve())
    monkeypatch.setenv("FFN_STEPS", "4")
    monkeypatch.setenv("PATH", f"{REPOSITORY / '.venv' / 'bin'}:{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()  # fmt: skip
    texts = json.dumps([cell.get("outputs") for cell in notebook.cells if "outputs" in cell])
    assert texts.count("image/png") >= 4 and "not pushed" in texts
    assert (tmp_path / "pruned" / "config.json").exists() and (tmp_path / "pruned.gguf").exists()
