"""Points of a sweep as jobs of a cluster, through submitit (extra `slurm`)."""

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.read import read_object
from ffn_heterogeneity.progress import bar, say_above
from ffn_heterogeneity.wording import extra, naming

# Ours; all others are submitit's own ("timeout_min", "gpus_per_node", "slurm_partition").
OWN_OPTIONS = ("cluster", "parallel")
# Minutes; submitit's own default is 5.
TIMEOUT = 24 * 60
WAIT = 0.5


def run_jobs(
    function: Callable[..., str | None],
    jobs: Mapping[str, tuple],
    folder: str | os.PathLike,
    options: str = "",
) -> dict[str, str]:
    """Runs `function(*arguments)` for every job, each in a process of its own, and waits.

    Jobs go on where this process is killed; started again, it waits for those that still run and
    submits the others. A job killed half-way goes on from its checkpoint in the next sweep.

    Args:
      function: returns what went wrong in one line, or None.
      jobs: name -> arguments, which are pickled.
      folder: for submitit's files and the logs of the jobs.
      options: "key=value,key=value" of submitit's `update_parameters`, and of ours: "cluster"
        (slurm | local | debug; default: slurm where there is one) and "parallel", how many jobs
        run at once (default: all on a cluster, one at a time locally).

    Returns:
      name -> what went wrong, of the jobs that failed.

    Raises:
      ImportError: submitit is not installed.
      ValueError: the options are not understood.
    """
    with extra("slurm"):
        import submitit
    values = parse_options(options)
    own = {key: values.pop(key) for key in OWN_OPTIONS if key in values}
    executor = submitit.AutoExecutor(folder=os.fspath(folder), cluster=own.get("cluster"))
    parallel = own.get("parallel", 1 if executor.cluster != "slurm" else 0)
    if not isinstance(parallel, int) or parallel < 0:
        raise ValueError(f"--submitit: parallel={parallel!r}, a number of jobs is needed")
    with naming(f"--submitit={options!r}", (NameError, TypeError)):
        executor.update_parameters(**{"timeout_min": TIMEOUT, "name": "sweep"} | values)
    earlier = {name: job for name in jobs if (job := _running(Path(folder), name))}
    return _wait(executor, function, dict(jobs), parallel or len(jobs), earlier)


def parse_options(text: str) -> dict[str, Any]:
    """{"timeout_min": 60, "slurm_partition": "gpu"} of "timeout_min=60,slurm_partition=gpu".

    Raises:
      ValueError: a part without "=".
    """
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ValueError(f"--submitit={text!r}: write key=value,key=value")
        found[key.strip()] = int(value) if value.strip().isdigit() else value.strip()
    return found


def _wait(
    executor, function, waiting: dict[str, tuple], parallel: int, running: dict[str, Any]
) -> dict[str, str]:
    """Keeps `parallel` jobs running until none is left.

    Args:
      running: jobs of an earlier start.
    """
    failed, folder, total = {}, Path(executor.folder), len(waiting)
    for name, job in running.items():
        del waiting[name]
        say_above(f"{name}: job {job.job_id} still runs")
    with bar("sweep", total=total, unit="job") as shown:
        while waiting or running:
            while waiting and len(running) < parallel:
                name = next(iter(waiting))
                running[name] = job = executor.submit(function, *waiting.pop(name))
                write_json(_note(folder, name), {"cluster": executor.cluster, "id": job.job_id})
                say_above(f"{name}: job {job.job_id}")
            for name in [name for name, job in running.items() if _ended(job)]:
                if error := _outcome(running.pop(name)):
                    failed[name] = error
                _note(folder, name).unlink(missing_ok=True)
                say_above(f"{name}: {failed.get(name, 'finished')}")
                shown.update()
            if running:
                time.sleep(WAIT)
    return failed


def _note(folder: Path, name: str) -> Path:
    return folder / f"{name}.job.json"


def _running(folder: Path, name: str) -> Any:
    """The job of an earlier start, if it has not ended."""
    import submitit

    if not _note(folder, name).exists():
        return None
    note = read_object(_note(folder, name))
    kinds = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}
    cluster, job_id = note.get("cluster"), str(note.get("id"))
    if str(cluster) not in kinds or not re.fullmatch(r"[\d_]+", job_id):
        if cluster != "debug":
            say_above(f"{_note(folder, name)} names no job: it is not waited for")
        return None
    job = kinds[str(cluster)](folder=folder, job_id=job_id)
    return None if _ended(job) else job


def _ended(job) -> bool:
    if not job.done():
        return False
    # Of a local job that another process started submitit knows nothing; its id is a process's.
    command = Path(f"/proc/{job.job_id}/cmdline")
    if getattr(job, "_process", job) is not None or not command.exists():
        return True
    return b"submitit" not in command.read_bytes()


def _outcome(job) -> str | None:
    """What the function returned; a job that was killed, or ran out of time, returned nothing."""
    error = job.exception()
    return f"the job ended without a result, see {job.paths.stderr}" if error else job.result()
