"""A harness task whose rows are given instead of loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask

from ffn_heterogeneity.evaluate.answer_metrics import macro_f1, normalize_squad, rouge_l, token_f1

EVALUATION, FEWSHOT = "evaluation", "fewshot"


class LocalTask(ConfigurableTask):
    """A task of the harness with its rows in memory: nothing is looked up or downloaded.

    Args:
      config: the harness's task settings, without those of the data.
      rows: "evaluation", and "fewshot" unless the examples are to come from the evaluation rows.
      leave_out: whether the question asked is left out of the examples. The harness does so where
        few-shot split and test split agree, for its own tasks without a test split too, and then
        draws one example more; kept, so that the same seed gives the examples of the stock task.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        rows: Mapping[str, Sequence[Mapping[str, Any]]],
        leave_out: bool,
    ):
        self._rows, config = rows, dict(config)
        if "process_results" in config:
            config["process_results"] = FUNCTIONS[config["process_results"]]
        config["metric_list"] = [
            {**metric, "aggregation": FUNCTIONS.get(metric["aggregation"], metric["aggregation"])}
            for metric in config["metric_list"]
        ]
        if leave_out or FEWSHOT not in rows:
            config["validation_split"] = EVALUATION  # test split and few-shot split: none, none
        else:
            config |= {"test_split": EVALUATION, "fewshot_split": FEWSHOT}
        super().__init__(config=config)

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        """Puts the rows where the harness expects a downloaded data set."""
        self.dataset = {
            split: datasets.Dataset.from_list([dict(row) for row in rows])
            for split, rows in self._rows.items()
        }

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> Any:
        """The harness's; a row's own `max_gen_toks` comes before the task's."""
        made = super().construct_requests(doc, ctx, **kwargs)
        if "max_gen_toks" in doc:
            made.arguments[1]["max_gen_toks"] = doc["max_gen_toks"]
        return made

    def fewshot_docs(self) -> datasets.Dataset | None:
        """The rows that examples are drawn from."""
        if not self.config.num_fewshot:
            return None
        return self.dataset[FEWSHOT if FEWSHOT in self.dataset else EVALUATION]


def mbpp_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Runs one program in the sandbox; only tasks made with `allow_code` come here."""
    from ffn_heterogeneity.evaluate import code_metrics

    judged = code_metrics.run_solution(results[0], doc["test_list"], doc["setup"], allow=True)
    return {"pass_at_1": float(judged.passed)}


def cb_macro_f1(items: Sequence[tuple[int, int]]) -> float:
    """F1 averaged over CB's three classes, of (label, prediction) pairs."""
    golds, predictions = zip(*items, strict=True)
    return macro_f1([int(p) for p in predictions], [int(g) for g in golds], (0, 1, 2))["macro_f1"]


def longbench_summary(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The best ROUGE-L over the reference summaries."""
    return {"rouge_l": max(rouge_l(results[0], answer) for answer in doc["answers"])}


def longbench_qa(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The best F1 over the answers; LongBench scores the first line of TriviaQA's alone."""
    said = results[0]
    if doc["dataset"] == "triviaqa":
        said = said.lstrip("\n").split("\n")[0]
    said = normalize_squad(said)
    return {"f1": max(token_f1(said, normalize_squad(answer)) for answer in doc["answers"])}


# What task files may name.
FUNCTIONS = {
    one.__name__: one for one in (mbpp_results, cb_macro_f1, longbench_summary, longbench_qa)
}
