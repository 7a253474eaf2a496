"""Compiled programs that outlive their process: JAX's persistent cache, in the user's own cache."""

import contextlib
import hashlib
import os
import platform
import time
import warnings
from pathlib import Path

from ffn_heterogeneity.io.files import user_cache

# A program that compiles faster is not worth a file; after a month an entry is made anew.
SECONDS, DAYS = 0.5, 30


def keep_compiled(wanted: bool = True) -> None:
    """Has programs compiled here found by later processes of the same user, and theirs by this one.

    Silently does nothing where there is no directory to keep them in. What the user's environment
    tells JAX (JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE, ...) comes first. Call it
    before the first computation.

    Args:
      wanted: False: neither reads nor writes any cache.
    """
    import jax

    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
    if not wanted or jax.config.jax_compilation_cache_dir is not None:
        return
    directory = cache_directory()
    if directory is None:
        return
    # An entry that another process is just writing, or was killed writing, is compiled once more;
    # so is one for devices that are not here (a dry run's), which cannot be loaded.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SECONDS)


def cache_directory(name: str = "xla") -> Path | None:
    """`<user's cache>/ffn_heterogeneity/<name>/<kind of CPU>`, made where it is missing.

    None where it cannot be made or written, and where others could write to it: what JAX reads
    from there is run.
    """
    base = user_cache()
    if base is None:
        return None
    directory = base / name / _cpu()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
        _forget_old(directory)
    except OSError:  # a full or read-only disk
        return None
    private = facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
    return directory if private and os.access(directory, os.W_OK | os.X_OK) else None


def _cpu() -> str:
    """A name for what machine code depends on: XLA compiles for the CPU it finds, features and
    cores, and JAX does not promise that its keys tell them apart (homes may be shared)."""
    known = [platform.machine(), os.cpu_count()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        first = info.read_text().split("\n\n")[0].splitlines()
        known += [line for line in first if line.startswith(("model name", "flags", "Features"))]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def _forget_old(directory: Path) -> None:
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            if time.time() - path.stat().st_mtime > DAYS * 86_400:
                path.unlink()
