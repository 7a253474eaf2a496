"""The notebook from its first to its last cell, as Colab would run it."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
from tiny_models import REPOSITORY, WIDE, byte_tokenizer, random_params
from tiny_runs import refused
from tokenizers import pre_tokenizers

from ffn_heterogeneity.io import fetch
from ffn_heterogeneity.io.gguf.export import save_gguf

NOTEBOOK = REPOSITORY / "notebooks" / "quickstart.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
# Each Python process that imports jax writes a line to a file.
WATCH = """import os, sys
class Watch:
    def find_spec(name, path=None, target=None):
        if name == "jax":
            open(LOG, "a").write(f"{os.getpid()} {sys.orig_argv}\\n")
sys.meta_path.insert(0, Watch)"""


def test_no_output_of_anybodys_run_is_in_it():
    assert len(CELLS) > 5 and not any(c["outputs"] or c["execution_count"] for c in CELLS)


def outputs(model, folder, monkeypatch):
    """The outputs of all cells, run on a model file; checks that one process imported jax.

    A second process would get no TPU, because the kernel uses it.
    """
    import nbclient
    import nbformat

    for name in ("models", "watch"):
        (folder / ".cache" / name).mkdir(parents=True)
    (folder / ".cache/models/smollm2-135m-instruct.gguf").symlink_to(model.resolve())
    watch, log = folder / ".cache" / "watch", folder / "imported"
    (watch / "sitecustomize.py").write_text(f"LOG = {str(log)!r}\n{WATCH}")
    monkeypatch.setenv("PYTHONPATH", f"{watch}:{REPOSITORY}")
    monkeypatch.setenv("FFN_MODELS", str(folder / ".cache/models"))
    monkeypatch.setenv("FFN_SOURCE", str(REPOSITORY))
    # Marked as checked, because it replaces another file.
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "digest", lambda path: fetch.SOURCES["smollm2"].sha256)
        fetch.fetch_model("smollm2")
    monkeypatch.setenv("FFN_STEPS", "4")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook, where = nbformat.read(NOTEBOOK, as_version=4), {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
    assert len(log.read_text().splitlines()) == 1, log.read_text()
    return json.dumps([cell.get("outputs") for cell in notebook.cells if "outputs" in cell])


def test_every_step_runs_in_one_process(tmp_path, monkeypatch):
    """A tiny model replaces SmolLM2."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    tokenizer, config = byte_tokenizer(), dataclasses.replace(WIDE, max_position=512)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    save_gguf(config, random_params(config), tmp_path / "tiny.gguf", tokenizer=tokenizer)
    texts = outputs(tmp_path / "tiny.gguf", tmp_path, monkeypatch)
    assert texts.count("image/png") >= 4 and "os.fork" not in texts


@pytest.mark.slow
def test_it_runs(smollm2_gguf, tmp_path, monkeypatch):
    texts = outputs(smollm2_gguf, tmp_path, monkeypatch)
    assert texts.count("image/png") >= 4 and "not pushed" in texts
    # As means of the neurons, like README's.
    assert "entropy 6.0551 nats a neuron" in texts and "first: entropy 6.0551" in texts
    assert (tmp_path / "pruned" / "config.json").exists() and (tmp_path / "pruned.gguf").exists()


def install(monkeypatch, devices="", packages=None, newer=None, source="git+https://example.org/x"):
    """The first cell's requirements for pip, with these files of /dev and this environment."""
    asked, versions = [], {"jax": "0.10.2", **(packages or {})}

    def run(command, check):
        assert command[:5] == [sys.executable, "-m", "pip", "install", "-q"] and check
        asked.append(command[5])
        versions.update(newer or {})

    chips = {"accel0": "tpu", "vfio/0": "tpu", "nvidia0": "gpu"}
    chip = chips.get(devices.removeprefix("/dev/"), "cpu")
    fake = types.SimpleNamespace(devices=lambda: [chip], default_backend=lambda: chip)
    monkeypatch.setattr("glob.glob", lambda pattern: [devices] if fnmatch(devices, pattern) else [])
    monkeypatch.setattr(metadata, "version", versions.get)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setitem(sys.modules, "jax", fake)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("FFN_SOURCE", source)
    exec("".join(CELLS[0]["source"]), {})
    return asked


INSTALLED = {"ffn-heterogeneity": "0.1.0"}
OURS = "ffn-heterogeneity[all{}] @ git+https://example.org/x"


@pytest.mark.parametrize(
    ("devices", "packages", "asked"),
    [
        ("", {}, [OURS.format("")]),
        ("", INSTALLED, []),
        # libtpu is checked even if nothing else is missing.
        ("/dev/vfio/0", {}, [OURS.format(",tpu"), "jax[tpu]==0.10.2"]),
        ("/dev/accel0", INSTALLED, ["jax[tpu]==0.10.2"]),
        ("/dev/accel", INSTALLED, []),  # the device file of another vendor
        ("/dev/nvidia0", {}, [OURS.format(",gpu"), "jax[cuda12]==0.10.2"]),
    ],
)
def test_what_the_first_cell_installs(monkeypatch, devices, packages, asked):
    assert install(monkeypatch, devices, packages) == asked


def test_what_the_first_cell_says(monkeypatch):
    assert install(monkeypatch, source="/a/checkout") == ["/a/checkout[all]"]
    refused("address", install, monkeypatch, error=SystemExit, source="")
    with pytest.raises(SystemExit, match="restart the session.*numpy is newer"):
        install(monkeypatch, packages={"numpy": "1.26"}, newer={"numpy": "2.4"})
