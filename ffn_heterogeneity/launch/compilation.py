"""JAX's persistent compilation cache, in the user's cache directory."""

import contextlib
import hashlib
import os
import platform
import time
import warnings
from pathlib import Path

from ffn_heterogeneity.io.files import user_cache

# Programs that compile faster are not saved; entries older than a month are deleted.
SECONDS, DAYS = 0.5, 30


def keep_compiled(wanted: bool = True) -> None:
    """Share compiled programs between processes of the same user.

    Does nothing if no cache directory is available. Settings in the user's environment
    (JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE, ...) take priority. Call it before the
    first computation.

    Args:
      wanted: False: neither read nor write any cache.
    """
    import jax

    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
    if not wanted or jax.config.jax_compilation_cache_dir is not None:
        return
    directory = cache_directory()
    if directory is None:
        return
    # An incomplete entry (another process writes it, or was killed) is compiled again, and so is an
    # entry for devices that are not available here (from a dry run), which cannot be loaded.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SECONDS)


def cache_directory(name: str = "xla") -> Path | None:
    """Return `<user's cache>/ffn_heterogeneity/<name>/<kind of CPU>`, created if missing.

    None if it cannot be created or written, or if other users could write to it, because JAX runs
    what it reads from there.
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
    """Name of the properties that machine code depends on: the CPU's features and cores.

    JAX does not promise that its cache keys include them, and machines may share a home directory.
    """
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
