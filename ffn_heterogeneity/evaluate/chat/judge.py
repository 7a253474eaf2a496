"""A language model as the judge of chat answers, behind an OpenAI-compatible endpoint.

Single: a rating from 1 to 10 of every turn, "[[8]]". Pairwise: which of two models' answers is
better, "[[A]]", "[[B]]" or "[[C]]" for neither. Each pair is judged twice, with the order swapped;
a model wins if both verdicts agree on it, otherwise it is a tie. If a judge writes several
verdicts, the last counts.

Rows have FastChat's form. A call without a judgment (time-out, HTTP error, no JSON, no rating) is
not a row but a line of failed.jsonl, with the reason and the response; the next run of the same
command asks again. The key is read from the environment and redacted in all output.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate.answer_metrics import wilson_interval, with_ends
from ffn_heterogeneity.evaluate.chat import conversations, judge_prompts
from ffn_heterogeneity.evaluate.chat.endpoint import Endpoint, EndpointError
from ffn_heterogeneity.evaluate.result_rows import read_rows, write_rows
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import check_choice, check_numbers, settings_from

MODES = ("single", "pairwise")
# Categories with right and wrong answers, for which MT-bench's authors show the judge a reference,
# and those that Spec-Bench adds (its qa has no references).
REFERENCE_CATEGORIES = frozenset(
    ["math", "reasoning", "coding", "translation", "summarization", "math_reasoning", "rag"]
)
REFERENCE_FILES = ("reference_gpt4.jsonl", "reference_answer/gpt-4.jsonl")
# Pairs are judged twice, in both orders: {prefix of a game's fields: the order}.
GAMES = {"g1_": (0, 1), "g2_": (1, 0)}
WINNERS = {
    "g1_": {"A": "model_1", "B": "model_2", "C": "tie"},
    "g2_": {"A": "model_2", "B": "model_1", "C": "tie"},
}
FORMS = {"single": "single", "pairwise": "pair"}


class Job(NamedTuple):
    """One future row: a question's first or second turn, and every model's answers up to it."""

    question: conversations.Question
    turn: int  # from 1
    answers: tuple[tuple[str, ...], ...]
    reference: tuple[str, ...]

    @property
    def key(self) -> tuple:
        return self.question.id, self.turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Settings of `configs/judge.py`."""

    mode: str
    benchmark: str
    data_root: str
    limit: int
    answers: str
    baseline: str
    endpoint: Endpoint
    workers: int
    give_up_after: int

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        if not self.answers:
            raise ValueError("give --config.answers=<file of configs/chat.py's answers>")
        if (self.mode == "pairwise") != bool(self.baseline):
            raise ValueError(
                f"mode={self.mode!r} and baseline={self.baseline!r}: pairwise compares with the "
                "answers of a baseline, single has none"
            )
        check_numbers(self, workers="[1, inf)", give_up_after="[0, inf)")

    @classmethod
    def of(cls, config: ConfigDict) -> JudgeSettings:
        """Return the settings of a config; the endpoint's key is read from the environment.

        Raises:
          ValueError: the key is missing, or a setting is invalid.
        """
        key = os.environ.get(config.key_env, "").strip() if config.key_env else ""
        if config.key_env and not key:
            raise ValueError(
                f"the environment variable {config.key_env}, which key_env names, is not set; "
                "--config.key_env= (empty) is for an endpoint without a key"
            )
        if not config.judge_model:
            raise ValueError("give --config.judge_model=<the judge's name at the endpoint>")
        endpoint = settings_from(Endpoint, config, model=config.judge_model, key=key)
        return settings_from(cls, config, endpoint=endpoint)

    def read(self) -> list[conversations.Question]:
        return conversations.read_questions(self.benchmark, self.data_root, self.limit)


def run(settings: JudgeSettings, load: Any, workdir: epath.Path) -> dict[str, Any]:
    """Judge the answers without saved judgments; return the results.

    Raises:
      ValueError (DataError): an invalid file; never because of a judge's answer.
    """
    jobs, models, unanswered = read_jobs(settings)
    judge = Judge(settings, models)
    path = workdir / "model_judgment" / f"{judge.file_name}_{FORMS[settings.mode]}.jsonl"
    old = {(row["question_id"], row["turn"]): row for row in read_rows(path)}
    # Saved judgments of other answers are ignored.
    rows = {job.key: old[job.key] for job in jobs if judge.is_of(old.get(job.key, {}), job)}
    failures, tried = read_rows(workdir / "failed.jsonl"), {}

    def keep(job: Job, row: dict[str, Any]) -> bool:
        if "error" in row:
            tried[job.key] = row["error"]
            failures.append(row)
            write_rows(workdir / "failed.jsonl", failures)
            return False
        rows[job.key] = row
        write_rows(path, [rows[one.key] for one in jobs if one.key in rows])
        return True

    todo = [job for job in jobs if job.key not in rows]
    _judge_all(judge, todo, keep, settings)
    judged = [rows[job.key] for job in jobs if job.key in rows]
    errors = [
        {"question_id": job.question.id, "turn": job.turn, "error": tried.get(job.key, "not asked")}
        for job in jobs
        if job.key not in rows
    ]
    summary = single_summary if settings.mode == "single" else pairwise_summary
    results = {
        "benchmark": settings.benchmark,
        "mode": settings.mode,
        "judge": judge.name,
        "models": models,
        "judgments": str(path),
        "judged": len(judged),
        "failed": len(errors),
        "unanswered": unanswered,
        "errors": errors,
        **summary(judged, {job.question.id: job.question.category for job in jobs}),
    }
    _report(results, workdir)
    return results


def read_jobs(settings: JudgeSettings) -> tuple[list[Job], list[str], int]:
    """Return the jobs, the models' names, and the number of questions without an answer."""
    files = [path for path in (settings.answers, settings.baseline) if path]
    names, answers = zip(*map(conversations.read_answers, files), strict=True)
    if len(set(names)) < len(names):
        raise ValueError(f"answers and baseline are both of {names[0]!r}: rename one (model_id)")
    references = _references(settings.benchmark, settings.data_root)
    jobs, unanswered = [], 0
    for question in settings.read():
        if any(len(one.get(question.id, ())) < len(question.turns) for one in answers):
            unanswered += 1
            continue
        reference = ()
        if question.category in REFERENCE_CATEGORIES:
            reference = references.get(question.id) or question.reference
        for turn in range(1, len(question.turns) + 1):
            texts = tuple(tuple(one[question.id][:turn]) for one in answers)
            jobs.append(Job(question, turn, texts, tuple(reference[:turn])))
    if not jobs:
        raise ValueError(
            f"{settings.answers} answers none of the questions of {settings.benchmark}"
        )
    return jobs, list(names), unanswered


class Judge:
    """`judge(job) -> row` in FastChat's form, or with "error" if there is no judgment."""

    def __init__(self, settings: JudgeSettings, models: Sequence[str]):
        self.endpoint, self.name = settings.endpoint, settings.endpoint.model
        self.single = settings.mode == "single"
        keys = ("model",) if self.single else ("model_1", "model_2")
        self._names = dict(zip(keys, models, strict=True))
        self.file_name = "".join(c if c.isalnum() or c in "._-" else "_" for c in self.name)

    def __call__(self, job: Job) -> dict[str, Any]:
        row: dict[str, Any] = {"question_id": job.question.id, **self._names}
        read = judge_prompts.rating if self.single else judge_prompts.verdict
        errors, name = [], ""
        for game, (name, prompt) in self._prompts(job).items():
            answer, judgment, error = self._ask(prompt, read)
            asked = {f"{game}user_prompt": prompt, f"{game}judgment": judgment}
            if self.single:
                row |= {"judge": [self.name, name], **asked, "score": answer}
            else:
                row |= {f"{game}winner": WINNERS[game].get(answer, "error"), **asked}
            errors.append(error)
        row |= {"judge": [self.name, name], "turn": job.turn, "tstamp": time.time()}
        if any(errors):
            row["error"] = "; ".join(dict.fromkeys(filter(None, errors)))
        return row

    def is_of(self, row: Mapping[str, Any], job: Job) -> bool:
        """True if a row judges this job: the same models, and the same answers in its prompts."""
        prompts = self._prompts(job).items()
        asked = self._names | {f"{game}user_prompt": prompt for game, (_, prompt) in prompts}
        return all(row.get(key) == value for key, value in asked.items())

    def _prompts(self, job: Job) -> dict[str, tuple[str, str]]:
        """{prefix of the fields: (the prompt's name, the prompt)}."""
        turns, answers, reference = job.question.turns, job.answers, job.reference
        if self.single:
            return {"": judge_prompts.single(turns, answers[0], reference)}
        return {
            game: judge_prompts.pair(turns, answers[first], answers[second], reference)
            for game, (first, second) in GAMES.items()
        }

    def _ask(self, prompt: str, read: Callable[[str], Any]) -> tuple[Any, str, str]:
        """Ask the judge: (value read from the text, the text, the error or "")."""
        try:
            text = self.endpoint.ask(judge_prompts.SYSTEM, prompt)
        except EndpointError as error:
            return None, error.body, str(error)
        try:
            return read(text), text, ""
        except ValueError as error:
            return None, text, str(error)


def single_summary(rows: Sequence[Mapping], categories: Mapping) -> dict[str, Any]:
    """Mean rating of all turns with a 95% interval, by turn and by category.

    The turns of a question are not independent, so the interval is for drawn questions: normal, of
    a ratio of sums over questions [ours].
    """
    scores = np.array([row["score"] for row in rows], np.float64)
    if not scores.size:
        return {"score": None}
    mean = float(scores.mean())
    _, question = np.unique([str(row["question_id"]) for row in rows], return_inverse=True)
    apart = np.bincount(question, scores - mean)  # of each question, the sum over its turns
    half = math.inf
    if (n := apart.size) > 1:
        half = 1.96 * (n / (n - 1) * float(np.sum(apart**2))) ** 0.5 / scores.size
    return {
        "n": n,
        "turns": scores.size,
        "interval": "normal",
        **with_ends("score", mean, mean - half, mean + half),
        "by_turn": _means(scores, [row["turn"] for row in rows]),
        "by_category": _means(scores, [categories[row["question_id"]] for row in rows]),
    }


def _means(scores: np.ndarray, labels: Sequence[Any]) -> dict[str, float]:
    """The mean of the scores under each label, in the labels' order."""
    by_label: dict[str, list[float]] = {}
    for score, label in zip(scores, labels, strict=True):
        by_label.setdefault(str(label), []).append(score)
    return {label: float(np.mean(values)) for label, values in by_label.items()}


def pairwise_summary(rows: Sequence[Mapping], categories: Mapping) -> dict[str, Any]:
    """Wins, losses and ties of the first model; win_rate counts a tie as half.

    Wilson's interval is for as many draws as there are questions, as if all turns of a question
    agreed (wide at worst) [ours]. inconsistent: rows whose two verdicts differ (all of them ties).
    """
    pairs = [(row["g1_winner"], row["g2_winner"]) for row in rows]
    wins, losses = pairs.count(("model_1",) * 2), pairs.count(("model_2",) * 2)
    ties = len(pairs) - wins - losses
    counts = {"wins": wins, "losses": losses, "ties": ties}
    counts["inconsistent"] = sum(first != second for first, second in pairs)
    if not pairs:
        return counts | {"win_rate": None}
    rate, questions = (wins + ties / 2) / len(pairs), len({row["question_id"] for row in rows})
    ends = wilson_interval(rate * questions, questions)
    return counts | with_ends("win_rate", rate, *ends) | {"n": questions, "turns": len(pairs)}


def _judge_all(
    judge: Judge, jobs: Sequence[Job], keep: Callable[[Job, dict], bool], settings: JudgeSettings
) -> None:
    """Run all jobs, several in parallel; `keep` is called with every row."""
    pool = concurrent.futures.ThreadPoolExecutor(settings.workers)
    asked = {pool.submit(judge, job): job for job in jobs}
    in_a_row, seen = 0, set()
    try:
        done = concurrent.futures.as_completed(asked)
        for future in bar("judge", done, total=len(jobs)):
            seen.add(future)
            in_a_row = 0 if keep(asked[future], future.result()) else in_a_row + 1
            if settings.give_up_after and in_a_row >= settings.give_up_after:
                print(f"{in_a_row} failures in a row: the rest is skipped", file=sys.stderr)
                break
    finally:
        judge.endpoint.stop()
        pool.shutdown(wait=in_a_row > 0, cancel_futures=True)
    for future, job in asked.items():  # calls in progress
        if future not in seen and not future.cancelled():
            keep(job, future.result())


def _references(benchmark: str, data_root: str) -> dict[Any, list[str]]:
    try:
        file = conversations.benchmark_file(benchmark, data_root, REFERENCE_FILES)
    except ValueError:
        return {}
    return conversations.read_answers(file)[1]


def _report(results: Mapping[str, Any], workdir: epath.Path) -> None:
    """Print results on stdout, and missing judgments on stderr."""
    if results["mode"] == "single":
        score = results["score"]
        print("no ratings" if score is None else f"score {score:.2f}")
    else:
        keys = ("wins", "losses", "ties", "inconsistent")
        print(", ".join(f"{key} {results[key]}" for key in keys))
    if results["unanswered"]:
        print(f"{results['unanswered']} questions have no answer yet", file=sys.stderr)
    if results["failed"]:
        first = results["errors"][0]
        print(
            f"{results['failed']} of {results['failed'] + results['judged']} judgments failed "
            f"(question {first['question_id']}, turn {first['turn']}: {first['error']}), see "
            f"{workdir}/failed.jsonl; the same command asks for them again",
            file=sys.stderr,
        )
