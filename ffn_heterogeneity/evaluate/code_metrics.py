"""MBPP: programs from their descriptions, judged by running them against tests."""

from collections.abc import Sequence

from ffn_heterogeneity.data.tasks.mbpp import END
from ffn_heterogeneity.evaluate.sandbox.programs import Limits, Outcome, run_code


def extract(completion: str) -> str:
    """The text before the first "[DONE]"; all of it where there is none."""
    return completion.partition(END)[0]


def run_solution(
    completion: str,
    tests: Sequence[str],
    setup: str = "",
    *,
    allow: bool,
    limits: Limits = Limits(),
) -> Outcome:
    """Runs what a model generated for a task against its tests, in a sandbox.

    One program: what the model wrote, what the tests need, the tests; in this order, because MBPP's
    setup code may use the solution's names (task 367 builds trees out of its class).

    Args:
      tests: assert statements.
      setup: what they need before them (`test_setup_code`).
      allow: whether the user allowed code a model wrote to run (--config.allow_code_execution).

    Raises:
      SandboxError: not allowed, or no sandbox here.
      ValueError: no tests (anything would pass).
    """
    if isinstance(tests, str) or not any(text.strip() for text in tests):
        raise ValueError(f"tests are {tests!r}, expected a list of assert lines")
    program = "\n".join([extract(completion), setup, *tests]) + "\n"
    return run_code(program, allow=allow, limits=limits)
