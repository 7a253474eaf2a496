"""MBPP: a task in words and its tests, with the loss only on the program.

The prompt is that of the evaluation (`evaluate/harness_tasks/mbpp.yaml`), so that a fine-tuned
model is evaluated in the form of its training; generation stops at "[DONE]".
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example, Fields, Task, text_of, texts_of

END = "[DONE]"


def prompt_of(record: Mapping[str, Any], text: str) -> str:
    """The prompt of a task described by `text`, with the tests that its program must pass."""
    return (
        f"You are an expert Python programmer, and here is your task: {text} "
        f"Your code should pass these tests:\n\n" + "\n".join(tests_of(record)) + "\n[BEGIN]\n"
    )


def tests_of(record: Mapping[str, Any]) -> list[str]:
    """The tests: one or more Python statements."""
    tests = texts_of(record, "test_list")
    if not tests:
        raise DataError("field 'test_list' is empty, expected one or more tests")
    return tests


def setup_of(record: Mapping[str, Any]) -> str:
    """Code to run before the tests: "test_setup_code", or "test_imports" of the sanitized set."""
    if "test_imports" in record:
        return "\n".join(texts_of(record, "test_imports"))
    return text_of(record, "test_setup_code") if "test_setup_code" in record else ""


def example(record: Mapping[str, Any], fields: Fields) -> Example:
    """Field "text" (the full set) or "prompt" (the sanitized one), "code" and "test_list".

    Some published programs have carriage returns at line ends, which are removed.
    """
    field = fields.prompt or ("prompt" if "prompt" in record and "text" not in record else "text")
    code = text_of(record, fields.response or "code").replace("\r\n", "\n")
    return Example(prompt_of(record, text_of(record, field)), f"{code}\n{END}")


TASK = Task("mbpp", example, hub="google-research-datasets/mbpp:full")
