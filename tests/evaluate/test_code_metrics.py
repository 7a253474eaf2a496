"""MBPP: prompts, programs, and pass@1 of the published solutions."""

from __future__ import annotations

import json

import pytest

from ffn_heterogeneity.evaluate import code_metrics
from ffn_heterogeneity.evaluate.code_metrics import extract, pass_at_1
from ffn_heterogeneity.evaluate.sandbox.programs import Limits, SandboxError


def records(folder, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "mbpp" / f"{split}.jsonl").open()]


def score(rows: list[dict], programs: list[str], **options) -> code_metrics.CodeScore:
    tests = [row["test_list"] for row in rows]
    if "test_imports" in rows[0]:
        setups = ["\n".join(row["test_imports"]) for row in rows]
    else:
        setups = [row["test_setup_code"] for row in rows]
    return pass_at_1(programs, tests, setups, allow=True, progress=None, **options)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1\n[DONE]\nmore [DONE]", "x = 1\n"),
        ("x = 1", "x = 1"),
        ("[DONE]", ""),
        ("", ""),
    ],
)
def test_extract(completion, program):
    assert extract(completion) == program


def test_published_solutions_pass_and_others_fail(sandbox, shared_data):
    rows = records(shared_data, "test")
    rows = [*rows[::60], next(row for row in rows if row["test_setup_code"])]
    right = score(rows, [f"{row['code']}\n[DONE]\nnot Python" for row in rows])
    assert right.pass_at_1 == 1.0 and right.statuses == {"passed": len(rows)}
    wrong = score(rows, [row["code"] for row in rows[1:] + rows[:1]])
    assert wrong.pass_at_1 == 0.0 and wrong.statuses == {"failed": len(rows)}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "train", "validation", "prompt", "sanitized"])
def test_every_published_solution_passes(sandbox, shared_data, split):
    rows = records(shared_data, split)
    found = score(rows, [row["code"] for row in rows], limits=Limits(90.0, 30))
    failed = [row["task_id"] for row, o in zip(rows, found.outcomes, strict=True) if not o.passed]
    assert not failed and found.passed == found.tasks == len(rows)


@pytest.mark.slow
def test_no_solution_passes_the_next_task(sandbox, shared_data):
    rows = records(shared_data, "test")
    found = score(rows, [row["code"] for row in rows[1:] + rows[:1]])
    assert found.passed == 0


def test_pass_at_1_counts(sandbox):
    right, wrong = "def f(n): return 2 * n", "def f(n): return n"
    endings = [
        "import os; os._exit(0)",
        "'''",
        "if False:",
        "raise SystemExit",
        "x = \\",
        "def g():",
    ]
    programs = [right, wrong, right, *(f"{wrong}\n{end}" for end in endings)]
    tests = [["assert f(2) == 4", "assert f(k) == 6"]] * len(programs)
    found = pass_at_1(programs, tests, ["k = 3"] * len(programs), allow=True)
    assert (found.passed, found.tasks) == (2, 9) and found.pass_at_1 == 2 / 9
    assert [o.passed for o in found.outcomes] == [True, False, True] + [False] * 6
    assert pass_at_1([right], [["assert f(2) == 4"]], allow=True).pass_at_1 == 1.0


def test_what_is_refused():
    with pytest.raises(SandboxError, match="allow_code_execution"):
        pass_at_1(["x"], [["assert x"]], allow=False)
    with pytest.raises(ValueError, match="0 completions, 0 lists of tests, 0 setups"):
        pass_at_1([], [], allow=True)
    with pytest.raises(ValueError, match="2 completions, 1 lists of tests, 2 setups"):
        pass_at_1(["x", "y"], [["assert x"]], allow=True)
    for tests in ([], [""], "assert x"):
        with pytest.raises(ValueError, match="task 0: tests are"):
            pass_at_1(["x"], [tests], allow=True)
