"""MBPP: programs from their descriptions, judged by running them against tests (pass@1)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from ffn_heterogeneity.data.tasks.mbpp import END
from ffn_heterogeneity.evaluate.sandbox.programs import Limits, Outcome, run_many


@dataclasses.dataclass(frozen=True)
class CodeScore:
    """What came of one program per task.

    Attributes:
      passed, tasks: pass@1 is their quotient.
      statuses: how many programs ended how ("passed", "failed", "timeout", ...).
      outcomes: in the programs' order.
    """

    passed: int
    tasks: int
    statuses: dict[str, int]
    outcomes: list[Outcome]

    @property
    def pass_at_1(self) -> float:
        return self.passed / self.tasks


def extract(completion: str) -> str:
    """What was generated before the first "[DONE]"; all of it where there is none."""
    return completion.partition(END)[0]


def program_of(completion: str, tests: Sequence[str], setup: str = "") -> str:
    """One program: what the model wrote, what the tests need, the tests.

    In this order, because MBPP's setup code may use the solution's names (task 367 builds trees
    out of its class).
    """
    return "\n".join([extract(completion), setup, *tests]) + "\n"


def pass_at_1(
    completions: Sequence[str],
    tests: Sequence[Sequence[str]],
    setups: Sequence[str] | None = None,
    *,
    allow: bool,
    limits: Limits = Limits(),
    workers: int | None = None,
    progress: str | None = "run programs",
) -> CodeScore:
    """Share of tasks whose one program passes all its tests, each run in a sandbox.

    Args:
      completions: what the model generated for each task.
      tests: assert statements of each task.
      setups: what each task's tests need before them (`test_setup_code`); None: nothing.
      allow: whether the user allowed code a model wrote to run (--config.allow_code_execution).
      limits, workers, progress: see `sandbox.run_many`.

    Raises:
      SandboxError: not allowed, or no sandbox here.
      ValueError: no tasks, a task without tests (anything would pass), or unequal numbers.
    """
    setups = [""] * len(completions) if setups is None else setups
    if not completions or not len(completions) == len(tests) == len(setups):
        raise ValueError(
            f"{len(completions)} completions, {len(tests)} lists of tests, {len(setups)} setups: "
            "one of each per task, and at least one task"
        )
    for i, asserts in enumerate(tests):
        if isinstance(asserts, str) or not any(text.strip() for text in asserts):
            raise ValueError(f"task {i}: tests are {asserts!r}, expected a list of assert lines")
    programs = [program_of(*parts) for parts in zip(completions, tests, setups, strict=True)]
    outcomes = run_many(programs, allow=allow, limits=limits, workers=workers, progress=progress)
    statuses = dict(collections.Counter(outcome.status for outcome in outcomes))
    passed = sum(outcome.passed for outcome in outcomes)
    return CodeScore(passed, len(outcomes), statuses, outcomes)
