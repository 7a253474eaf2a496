"""MBPP: prompts, programs, and pass@1 of the published solutions."""

import concurrent.futures
import os

import pytest
from tiny_runs import read_rows, refused

from ffn_heterogeneity.evaluate.code_metrics import extract, run_solution
from ffn_heterogeneity.evaluate.sandbox.programs import Limits, SandboxError


def records(folder, split: str) -> list[dict]:
    return read_rows(folder / "mbpp" / f"{split}.jsonl")


def statuses(rows: list[dict], programs: list[str], limits: Limits = Limits()) -> list[str]:
    """The exit status of each task's program."""

    def status(row: dict, program: str) -> str:
        setup = "\n".join(row.get("test_imports") or [row.get("test_setup_code", "")])
        return run_solution(program, row["test_list"], setup, allow=True, limits=limits).status

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(status, rows, programs))


WRITTEN = (("x = 1\n[DONE]\nmore [DONE]", "x = 1\n"), ("x = 1", "x = 1"), ("[DONE]", ""), ("", ""))


@pytest.mark.parametrize(("completion", "program"), WRITTEN)
def test_extract(completion, program):
    assert extract(completion) == program


def test_published_solutions_pass_and_others_fail(sandbox, shared_data):
    rows = records(shared_data, "test")
    rows = [*rows[::60], next(row for row in rows if row["test_setup_code"])]
    right = statuses(rows, [f"{row['code']}\n[DONE]\nnot Python" for row in rows])
    assert set(right) == {"passed"}
    assert set(statuses(rows, [row["code"] for row in rows[1:] + rows[:1]])) == {"failed"}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "train", "validation", "prompt", "sanitized"])
def test_every_published_solution_passes(sandbox, shared_data, split):
    rows = records(shared_data, split)
    outcomes = statuses(rows, [row["code"] for row in rows], Limits(90.0, 30))
    assert not [row["task_id"] for row, end in zip(rows, outcomes, strict=True) if end != "passed"]


@pytest.mark.slow
def test_no_solution_passes_the_next_task(sandbox, shared_data):
    rows = records(shared_data, "test")
    assert "passed" not in statuses(rows, [row["code"] for row in rows[1:] + rows[:1]])


def test_only_a_whole_and_right_program_passes(sandbox):
    right, wrong = "def f(n): return 2 * n", "def f(n): return n"
    endings = ["import os; os._exit(0)", "'''", "if False:"]
    endings += ["raise SystemExit", "x = \\", "def g():"]
    programs = [right, wrong, right, *(f"{wrong}\n{end}" for end in endings)]
    row = {"test_list": ["assert f(2) == 4", "assert f(k) == 6"], "test_setup_code": "k = 3"}
    outcomes = statuses([row] * len(programs), programs)
    assert [status == "passed" for status in outcomes] == [True, False, True] + [False] * 6


def test_what_is_refused():
    with pytest.raises(SandboxError, match="allow_code_execution"):
        run_solution("x", ["assert x"], allow=False)
    for tests in ([], [""], "assert x"):
        refused("tests are", run_solution, "x", tests, allow=True)
