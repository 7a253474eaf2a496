"""Questions of tasks answered by a model and scored: SuperGLUE, WebNLG, any task with metrics.

Prompts are answered greedily up to the end of the line or the eos, like the training targets.
`<workdir>/answers/<task>.jsonl` has one row per prompt: {"id": its number in the task, "place":
file and row, "prediction", "reference", "finish": "stop", "eos", "length", or "no room" (nothing
was generated)}. Prompts are answered in pieces, long ones first. The whole file is rewritten
atomically after each piece, and existing answers are not generated again.

Intervals are percentiles of a bootstrap over questions: the answers to one question of MultiRC are
drawn together. Parts of a task (WebNLG's seen and unseen categories) are also scored separately, as
"<task>_<part>".
"""

import collections
import dataclasses
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from ffn_heterogeneity.data.mixtures import TaskQuestion, member_file, questions
from ffn_heterogeneity.data.packing import BOS_POLICIES, Encoder
from ffn_heterogeneity.data.sources import open_source
from ffn_heterogeneity.data.tasks import Example, MixedTask, Task, get_task, tasks
from ffn_heterogeneity.evaluate import answer_metrics as metrics
from ffn_heterogeneity.evaluate.inputs import ModelSettings, tokenizer_of
from ffn_heterogeneity.evaluate.result_rows import read_rows, write_rows
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.generate import Generation, Generator, Sampling
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.report.stats import ends
from ffn_heterogeneity.wording import check_choice, check_known, check_numbers

PIECE = 16  # batches between two writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings(ModelSettings):
    """Settings of `configs/answers.py`."""

    tasks: tuple[str, ...]
    data_root: str
    split: str
    limit: int
    bos: str
    max_new_tokens: int
    bootstrap: int
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("bos", self.bos, BOS_POLICIES)
        check_numbers(self, limit="[0, inf)", seed="[0, inf)", bootstrap="[1, inf)")
        Sampling(self.max_new_tokens)

    def read(self) -> dict[Task, list[TaskQuestion]]:
        """Read the prompts of each task's first `limit` questions (0: of all).

        A mixture means its members, without optional ones (DPR).

        Raises:
          ValueError (DataError): an unknown task (with the nearest name), one without metrics,
            missing files, or rows without labels (file and row).
          ImportError: a metric's package is not installed.
        """
        if not self.tasks or isinstance(self.tasks, str):
            raise ValueError(f"tasks={self.tasks!r}: give names, e.g. \"('superglue_rte',)\"")
        by_task = {}
        for task in _scored(self.tasks):
            by_task[task] = _first(_questions_of(task, self.data_root, self.split), self.limit)
            _signatures(task, [one.reference for one in by_task[task]])
        return by_task


def evaluate_answers(settings: AnswerSettings, model: Model, workdir: epath.Path) -> dict[str, Any]:
    """Answer the questions without saved answers, and score all of them.

    Returns:
      "tasks": {task: {"n": questions, "shots": 0, "interval": "bootstrap", metric: value, metric +
      "_low", "_high", "finish": {reason why an answer ended: count}, "signatures": {metric: its
      description}}}. If all eight tasks of SuperGLUE are present, a row "superglue" with their
      "average": the mean of the tasks' mean metrics. This number is also next to "tasks", as
      "superglue".

    Raises:
      ValueError (DataError): as `AnswerSettings.read`, or a model without a tokenizer.
    """
    tokenizer = tokenizer_of(model, "answers are text, add its files")
    generator = Generator(model.config, model.params, tokenizer, **settings.how)
    rows, values, draws = {}, {}, {}
    for task, asked in settings.read().items():
        path = workdir / "answers" / f"{task.name}.jsonl"
        answers = _answered(asked, path, generator, settings)
        predictions = [row["prediction"] for row in answers]
        references = [question.reference for question in asked]
        every: metrics.Counts = {}
        for metric in task.metrics:
            every |= metrics.METRICS[metric].counts(predictions, references)
        for name, indices in _parts(task.name, asked).items():
            # (In a task without parts, a question may have several prompts.)
            counts = every
            if name != task.name:
                counts = {score: table[indices] for score, table in every.items()}
            # Independent of the other evaluated tasks.
            rng = np.random.default_rng([settings.seed, zlib.crc32(name.encode())])
            values[name] = metrics.scores(counts)
            draws[name] = metrics.bootstrap(counts, settings.bootstrap, rng)
            rows[name] = _row(len(next(iter(counts.values()))), values[name], draws[name])
            rows[name]["finish"] = dict(collections.Counter(answers[i]["finish"] for i in indices))
            rows[name] |= _signatures(task, [references[i] for i in indices])
    eight = [f"superglue_{name}" for name in metrics.SUPERGLUE]
    missing = [name for name in eight if name not in rows]
    if missing:
        if len(missing) < len(eight):
            print(f"no average of SuperGLUE: missing {', '.join(missing)}", file=sys.stderr)
        return {"tasks": rows}
    average = metrics.superglue({name: values[name] for name in eight})["superglue"]
    drawn = np.mean([np.mean(list(draws[name].values()), 0) for name in eight], 0)
    n = sum(rows[name]["n"] for name in eight)
    rows["superglue"] = _row(n, {"average": average}, {"average": drawn})
    return {"tasks": rows, "superglue": average}


def _scored(names: Sequence[str]) -> list[Task]:
    """Return the named tasks, in order; raise ValueError if one has no metrics."""
    scored = []
    for name in names:
        members = [member.task for member in get_task(name).members if not member.option]
        for task in map(get_task, members or [name]):
            if not task.metrics:
                known = ", ".join(name for name, one in tasks().items() if one.metrics)
                raise ValueError(f"task {name!r} has no metric; tasks with metrics: {known}")
            check_known(task.metrics, metrics.METRICS, f"metric of task {name!r}")
            scored.append(task)
    return scored


def _questions_of(task: Task, data_root: str, split: str) -> list[TaskQuestion]:
    """Read all prompts of a task, from its file under `data_root` or from the hub."""
    path = task.hub
    if data_root:
        members = {member.task: member for mixed in tasks().values() for member in mixed.members}
        member = members.get(task.name, MixedTask(task.name, 1, (task.name,)))
        path = member_file(data_root, member, split)
    return questions(task, open_source(path, split=split))


def _first(asked: Sequence[TaskQuestion], limit: int) -> list[TaskQuestion]:
    """The prompts of the first `limit` questions (several per question in MultiRC)."""
    groups = collections.defaultdict(list)
    for i, one in enumerate(asked):
        grouped = isinstance(one.reference, Mapping) and "group" in one.reference
        groups[one.reference["group"] if grouped else i].append(one)
    return [one for group in list(groups.values())[: limit or None] for one in group]


def _parts(name: str, asked: Sequence[TaskQuestion]) -> dict[str, list[int]]:
    """Questions scored together: {name: all, name + "_" + part: those of the part}."""
    parts = {name: list(range(len(asked)))}
    for i, one in enumerate(asked):
        if isinstance(one.reference, Mapping) and "part" in one.reference:
            parts.setdefault(f"{name}_{one.reference['part']}", []).append(i)
    return parts


def _signatures(task: Task, references: Sequence[Any]) -> dict[str, Any]:
    """Entry "signatures" of the task's metrics, if they have any."""
    signed = {name: metrics.METRICS[name].signature for name in task.metrics}
    given = {name: sign(references) for name, sign in signed.items() if sign}
    return {"signatures": given} if given else {}


def _answered(
    asked: Sequence[TaskQuestion], path: epath.Path, generator: Generator, settings: AnswerSettings
) -> list[dict[str, Any]]:
    """Return all rows of the answers' file, in the questions' order, after writing them."""
    rows = {row["id"]: row for row in read_rows(path)}
    encoder = Encoder(generator.tokenizer, settings.bos)
    # In training, a target is encoded separately from its prompt.
    if generator.config.kind == "encoder_decoder":
        prompts = [encoder.pair(Example(q.prompt, ""))[0] for q in asked]
    else:
        each = (encoder.ids(Example(q.prompt, "")) for q in asked)
        prompts = [ids[:before] for ids, before in each]
    room = generator.room(settings.max_new_tokens)
    eos = () if encoder.eos_id is None else (encoder.eos_id,)
    sampling = Sampling(settings.max_new_tokens, stop=("\n",), eos=eos)
    order = sorted(range(len(asked)), key=lambda i: -len(prompts[i]))
    size = PIECE * settings.batch_size
    with bar(path.stem, total=len(asked), initial=len(rows)) as shown:
        for piece in (order[start : start + size] for start in range(0, len(order), size)):
            if rows.keys() >= set(piece):
                continue
            fitting = [i for i in piece if len(prompts[i]) <= room]
            answers = generator([prompts[i] for i in fitting], sampling, progress=shown.update)
            given = dict(zip(fitting, answers, strict=True))
            for i in piece:
                answer = given.get(i, Generation("", [], "no room"))
                rows[i] = {"id": i, "place": asked[i].where, "prediction": answer.text.strip()}
                rows[i] |= {"reference": asked[i].reference, "finish": answer.finish}
            write_rows(path, [rows[i] for i in sorted(rows)])
            shown.update(len(piece) - len(fitting))
    return [rows[i] for i in range(len(asked))]


def _row(n: int, values: Mapping[str, float], draws: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A result row: the values, each with its interval."""
    row: dict[str, Any] = {"n": n, "shots": 0, "interval": "bootstrap"}
    for name, value in values.items():
        row |= metrics.with_ends(name, value, *ends(draws[name]))
    return row
