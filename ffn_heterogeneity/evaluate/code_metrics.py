"""MBPP: generated programs, scored by running them against tests."""

from collections.abc import Sequence

from ffn_heterogeneity.data.tasks.mbpp import END
from ffn_heterogeneity.evaluate.sandbox.programs import Limits, Outcome, run_code


def extract(completion: str) -> str:
    """Return the text before the first "[DONE]", or all of it."""
    return completion.partition(END)[0]


def run_solution(
    completion: str,
    tests: Sequence[str],
    setup: str = "",
    *,
    allow: bool,
    limits: Limits = Limits(),
) -> Outcome:
    """Run a generated solution against its task's tests, in a sandbox.

    The program consists of the solution, the setup code and the tests, in this order, because
    MBPP's setup code may use the solution's names (task 367 builds trees from its class).

    Args:
      tests: assert statements.
      setup: setup code of the tests (`test_setup_code`).
      allow: whether the user allowed generated code to run (--config.allow_code_execution).

    Raises:
      SandboxError: not allowed, or no sandbox available.
      ValueError: no tests (anything would pass).
    """
    if isinstance(tests, str) or not any(text.strip() for text in tests):
        raise ValueError(f"tests are {tests!r}, expected a list of assert lines")
    program = "\n".join([extract(completion), setup, *tests]) + "\n"
    return run_code(program, allow=allow, limits=limits)
