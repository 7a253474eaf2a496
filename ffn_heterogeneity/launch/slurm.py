"""Points of a sweep as cluster jobs, through submitit (extra `slurm`)."""

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

# Our options; all others are submitit's ("timeout_min", "gpus_per_node", "slurm_partition").
OWN_OPTIONS = ("cluster", "parallel")
# submitit's options that are no numbers or texts.
LISTS = ("slurm_setup", "slurm_teardown", "slurm_srun_args")
TABLES = ("slurm_additional_parameters",)
# Minutes; submitit's default is 5.
TIMEOUT = 24 * 60
WAIT = 0.5


def run_jobs(
    function: Callable[..., str | None],
    jobs: Mapping[str, tuple],
    folder: str | os.PathLike,
    options: str = "",
) -> dict[str, str]:
    """Run `function(*arguments)` for every job in a separate process, and wait.

    Jobs continue if this process is killed; a restart waits for those that still run and submits
    the others. A killed job resumes from its checkpoint in the next sweep.

    Args:
      function: returns None, or its error in one line.
      jobs: name -> arguments, which are pickled.
      folder: directory for submitit's files and the jobs' logs.
      options: "key=value,key=value" for submitit's `update_parameters`, and ours: "cluster" (slurm
        | local | debug; default: slurm if available) and "parallel", the number of simultaneous
        jobs (default: all on a cluster, one locally).

    Returns:
      {name: error} of the failed jobs.

    Raises:
      ImportError: submitit is not installed.
      ValueError: invalid options.
    """
    with extra("slurm"):
        import submitit
    values = parse_options(options)
    run_options = {key: values.pop(key) for key in OWN_OPTIONS if key in values}
    executor = submitit.AutoExecutor(folder=os.fspath(folder), cluster=run_options.get("cluster"))
    parallel = run_options.get("parallel", 1 if executor.cluster != "slurm" else 0)
    if not isinstance(parallel, int) or parallel < 0:
        raise ValueError(f"--submitit: parallel={parallel!r}; expected a number of jobs")
    with naming(f"--submitit={options!r}", (NameError, TypeError, AssertionError)):
        executor.update_parameters(**{"timeout_min": TIMEOUT, "name": "sweep"} | values)
    earlier = {name: job for name in jobs if (job := _running(Path(folder), name))}
    return _wait(executor, function, dict(jobs), parallel or len(jobs), earlier)


def parse_options(text: str) -> dict[str, Any]:
    """Parse "timeout_min=60,slurm_partition=gpu" to {"timeout_min": 60, "slurm_partition": "gpu"}.

    Raises:
      ValueError: a part without "=", or an option that is a table.
    """
    options: dict[str, Any] = {}
    for setting in filter(None, text.split(",")):
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--submitit={text!r}: write key=value,key=value")
        key, value = key.strip(), value.strip()
        if key in TABLES:
            raise ValueError(f"--submitit: {key} is a table, which this flag cannot write")
        options[key] = [value] if key in LISTS else _value(value)
    return options


def _value(text: str) -> int | float | bool | str:
    if re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?", text):  # not the account 00123
        return float(text) if "." in text else int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _wait(
    executor, function, waiting: dict[str, tuple], parallel: int, running: dict[str, Any]
) -> dict[str, str]:
    """Keep `parallel` jobs running until none is left.

    Args:
      running: jobs that an earlier process started.
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
    """Job that an earlier process started, if it has not ended."""
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
    # Submitit does not know local jobs that another process started; their ids are process ids.
    command = Path(f"/proc/{job.job_id}/cmdline")
    if getattr(job, "_process", job) is not None or not command.exists():
        return True
    return b"submitit" not in command.read_bytes()


def _outcome(job) -> str | None:
    """Return value of the job's function, or an error for a killed or timed-out job."""
    error = job.exception()
    return f"the job ended without a result, see {job.paths.stderr}" if error else job.result()
