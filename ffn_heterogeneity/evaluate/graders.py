"""The list of the harness's tasks whose graders were reviewed and may see generated text.

A grader that calls `eval`, sympy's `parse_expr` or a program runs a model's answer as code in this
process, and few tasks are marked so (`unsafe_code`). So there is a list of allowed graders:

  questions without text       multiple choice, log-likelihoods: graders see only numbers
  the harness's graders        metrics, aggregations and filters of lm_eval/api and lm_eval/filters,
                               of any version
  code of a task               if its file was reviewed (`READ`)
  graders of this package      harness_tasks/grading.py, which runs programs in the sandbox
"""

import functools
import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ffn_heterogeneity.evaluate.harness_tasks import grading

# SHA-256 of reviewed files of lm_eval 0.4.13. They were read completely, with all their imports
# except numpy and the standard library: generated text is only cut, counted, matched and compared,
# never evaluated, parsed by sympy, run, unpickled, written to a file or sent. They import no other
# task's code. To add a file after a review, compute its digest:
#   sha256sum "$(python -c 'import lm_eval; print(lm_eval.__path__[0])')"/tasks/drop/utils.py
READ = {
    # bbh/zeroshot and bbh/cot_zeroshot.
    "bbh": "ecc017c5c3c0a03757d94072fb74feac74406b63d2f6efa6ec68f73f8db8a9fd",
    "drop": "a5782ee7d2e537968a5b83976195ae2b9b6e2a565a0bfb5c24d221b4d61a04f5",
    "hendrycks_math": "8332e42f23c62043b23d74ee6d3934f997b209cd60a1ad45b7882d6b00929d5c",
}

OURS = Path(grading.__file__)


def running(task: Any) -> str:
    """Describe how a task's grader could run generated text as code; "" if it cannot."""
    files = [*map(_file, _graders(task))]
    for file in files:
        if file != OURS and not _was_read(file):
            return f"is graded by {file}, which was not reviewed: it could run"
    return "runs" if getattr(task, "UNSAFE_CODE", False) and OURS not in files else ""


def _graders(task: Any) -> Iterator[Any]:
    """All functions and classes that get the generated text."""
    from lm_eval.api.task import ConfigurableTask

    if type(task) is not ConfigurableTask:
        yield type(task)
    elif task.OUTPUT_TYPE == "generate_until":
        yield from filter(callable, (task.config.process_results, *task._metric_fn_list.values()))
        yield from filter(callable, task.aggregation().values())
        for made in (one for ensemble in task._filters for one in ensemble.filters):
            yield from filter(callable, (made.func, *made.keywords.values()))


def _file(grader: Any) -> Path:
    """The file of a grader's code."""
    while isinstance(grader, functools.partial):
        grader = grader.func
    # The harness wraps a function of metric_list; the original is in `__call__`.
    grader = getattr(grader, "__self__", grader)
    named = inspect.isroutine(grader) or inspect.isclass(grader)
    try:
        return Path(inspect.getfile(grader if named else type(grader)))
    except (TypeError, OSError):
        return Path("compiled code")


def _was_read(path: Path) -> bool:
    import lm_eval

    harness = Path(lm_eval.__file__).parent
    core = path.parent in (harness / "api", harness / "filters")
    return core or path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() in READ.values()
