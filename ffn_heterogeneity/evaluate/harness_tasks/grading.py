"""Graders of the task files in this folder."""

from collections.abc import Mapping, Sequence
from typing import Any

from ffn_heterogeneity.evaluate.answer_metrics import normalize_squad, rouge_l, token_f1


def mbpp(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Run one program in the sandbox; called only for tasks made with `allow_code`."""
    from ffn_heterogeneity.evaluate import code_metrics

    judged = code_metrics.run_solution(results[0], doc["test_list"], doc["setup"], allow=True)
    return {"pass_at_1": float(judged.passed)}


def longbench_summary(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Best ROUGE-L over the reference summaries."""
    return {"rouge_l": max(rouge_l(results[0], answer) for answer in doc["answers"])}


def longbench_qa(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Best F1 over the answers; for TriviaQA, LongBench scores only the first line."""
    said = results[0]
    if doc["dataset"] == "triviaqa":
        said = said.lstrip("\n").split("\n")[0]
    said = normalize_squad(said)
    return {"f1": max(token_f1(said, normalize_squad(answer)) for answer in doc["answers"])}
