"""Questions of chat benchmarks, answered turn by turn, in the benchmarks' answer formats.

MT-bench, Vicuna and Spec-Bench (FastChat): {"question_id", "answer_id", "model_id", "choices":
[{"index": 0, "turns": [text, ...]}], "tstamp"}; WizardLM: {"id", "instruction", <model_id>: text}.

Answers are written batch by batch, the whole file atomically, and answered questions are not asked
again. `<workdir>/turns.jsonl` has the reason why each turn ended, which the benchmarks' formats do
not include. Random draws depend on the seed, the question's batch and its place in it. Batches are
made from all questions, so an interruption changes nothing.
"""

import dataclasses
import json
import re
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from etils import epath

from ffn_heterogeneity.data.packing import CHAT_TEMPLATES, Encoder
from ffn_heterogeneity.data.sources import DataError, read_each, read_jsonl
from ffn_heterogeneity.data.tasks.base import text_of, texts_of, value_of
from ffn_heterogeneity.data.tasks.messages import Message, end_of_turn, prompt_ids
from ffn_heterogeneity.evaluate.inputs import ModelSettings, tokenizer_of
from ffn_heterogeneity.evaluate.result_rows import read_rows, write_rows
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import check_choice, check_number

BENCHMARKS = ("mt_bench", "spec_bench", "vicuna_bench", "wizardlm_testset")
QUESTION_FILES = ("test.jsonl", "question.jsonl", "WizardLM_testset.jsonl")
# Temperatures of MT-bench's authors, by category; other categories have the last one.
TEMPERATURES = {
    **dict.fromkeys(("extraction", "math", "coding", "reasoning"), 0.0),
    **dict.fromkeys(("stem", "humanities"), 0.1),
    **dict.fromkeys(("writing", "roleplay"), 0.7),
}
OTHER_TEMPERATURE = 0.7
# WizardLM's authors set a temperature but do not turn sampling on, so theirs are greedy.
WIZARDLM_TEMPERATURE = 0.0
# The categories that Spec-Bench adds to MT-bench's: its authors' runs are greedy.
SPEC_BENCH_TEMPERATURE = 0.0


class Question(NamedTuple):
    """A question with its turns; `reference`: good answers to the turns, if there are any."""

    id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


class Turn(NamedTuple):
    """An answer, and why it ended: "stop", "eos", "length", or "no room" (nothing generated)."""

    text: str
    finish: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatSettings(ModelSettings):
    """Settings of `configs/chat.py`."""

    model_id: str
    benchmark: str
    data_root: str
    limit: int
    system: str
    chat_template: str
    template_date: str
    bos: str
    temperature: float | None = None
    top_p: float
    seed: int
    max_new_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        model_id(self.model_id, self.model)
        check_choice("chat_template", self.chat_template, CHAT_TEMPLATES)
        # Generation checks the numbers.
        Sampling(self.max_new_tokens, self.temperature or 0.0, self.top_p)

    def read(self) -> list[Question]:
        return read_questions(self.benchmark, self.data_root, self.limit)

    def temperature_of(self, question: Question) -> float:
        """The configured temperature, else the benchmark's for the question's category."""
        if self.temperature is not None:
            return self.temperature
        if self.benchmark == "wizardlm_testset":
            return WIZARDLM_TEMPERATURE
        other = SPEC_BENCH_TEMPERATURE if self.benchmark == "spec_bench" else OTHER_TEMPERATURE
        return TEMPERATURES.get(question.category, other)

    def groups(self, questions: Sequence[Question]) -> list[list[Question]]:
        """Batches of questions with one temperature, in the file's order."""
        batches, size = [], self.batch_size
        for value in sorted({self.temperature_of(question) for question in questions}):
            same = [question for question in questions if self.temperature_of(question) == value]
            batches += [same[start : start + size] for start in range(0, len(same), size)]
        return batches


def answer_questions(settings: ChatSettings, model: Model, workdir: epath.Path) -> dict[str, Any]:
    """Answer the questions without saved answers.

    Returns:
      the answers' file, the numbers of answers and of turns, and how many turns were cut (by
      `max_new_tokens` or the model's positions), omitted for lack of room, or empty.

    Raises:
      ValueError (DataError): a model without a tokenizer, questions or answers that cannot be read.
    """
    tokenizer_of(model, "chats are text, add its files")
    questions, name = settings.read(), model_id(settings.model_id, settings.model)
    path = workdir / "model_answer" / f"{name}.jsonl"
    # Written before the answers: an answer without its turns is generated again.
    ended = {row["id"]: row["turns"] for row in read_rows(workdir / "turns.jsonl")}
    rows = [row for row in read_rows(path) if question_id(row) in ended]
    answered = {question_id(row) for row in rows}
    chat = Chat(settings, model)
    done = {"total": len(questions), "initial": len(answered)}
    with bar(settings.benchmark, **done) as shown:
        for group in settings.groups(questions):
            missing = [question for question in group if question.id not in answered]
            if not missing:
                continue
            # The whole batch, so that the draws do not depend on interruptions.
            for question, turns in zip(group, chat(group), strict=True):
                if question in missing:
                    ended[question.id] = turns
                    texts = [turn.text for turn in turns]
                    rows.append(answer_row(settings.benchmark, question, name, texts))
            turn_rows = [{"id": key, "turns": turns} for key, turns in ended.items()]
            write_rows(workdir / "turns.jsonl", turn_rows)
            write_rows(path, rows)
            shown.update(len(missing))
    return {
        "benchmark": settings.benchmark,
        "model_id": name,
        "answers": str(path),
        "answered": len(rows),
        "chat_template": chat.template,
        **turn_counts([Turn(*turn) for row in rows for turn in ended[question_id(row)]]),
    }


def turn_counts(turns: Sequence[Turn]) -> dict[str, int]:
    """Count the turns, and the failed ones by kind.

    A turn without room does not count as empty.
    """
    finishes = [turn.finish for turn in turns]
    empty = [turn for turn in turns if not turn.text and turn.finish != "no room"]
    return {
        "turns": len(turns),
        "turns_length": finishes.count("length"),
        "turns_no_room": finishes.count("no room"),
        "turns_empty": len(empty),
    }


class Chat:
    """A model that answers a batch of questions turn by turn."""

    def __init__(self, settings: ChatSettings, model: Model):
        self.settings, self.positions = settings, model.config.max_position
        template = settings.chat_template
        written = {"chat_template": template, "template_date": settings.template_date}
        self.encoder = Encoder(model.tokenizer, settings.bos, **written)
        from_tokenizer = template == "auto" and getattr(model.tokenizer, "chat_template", None)
        self.template = "tokenizer" if from_tokenizer else template.replace("auto", "tulu")
        # The template's end of a turn, and the tokenizer's eos, which may not be in the config.
        ends = (end_of_turn(self.encoder), model.tokenizer.eos_token_id)
        self.eos = tuple(dict.fromkeys(end for end in ends if end is not None))
        self.generator = Generator(model.config, model.params, model.tokenizer, **settings.how)

    def __call__(self, group: Sequence[Question]) -> list[list[Turn]]:
        """Return the answers to every question's turns."""
        start = [Message("system", self.settings.system)] if self.settings.system else []
        talks = [list(start) for _ in group]
        turns: list[list[Turn]] = [[] for _ in group]
        for number in range(max(len(question.turns) for question in group)):
            asked = [i for i, question in enumerate(group) if number < len(question.turns)]
            for i in asked:
                talks[i].append(Message("user", group[i].turns[number].strip()))
            answers = self._answers([talks[i] for i in asked], self._sampling(group[0], number))
            for i, answer in zip(asked, answers, strict=True):
                talks[i].append(Message("assistant", answer.text))
                turns[i].append(answer)
        return turns

    def _answers(self, talks: Sequence[Sequence[Message]], sampling: Sampling) -> list[Turn]:
        prompts = [prompt_ids(talk, self.encoder) for talk in talks]
        room = [min(sampling.max_new_tokens, self.positions - len(ids)) for ids in prompts]
        asked = [i for i, tokens in enumerate(room) if tokens > 0]
        generated = self.generator(
            [prompts[i] for i in asked],
            [dataclasses.replace(sampling, max_new_tokens=room[i]) for i in asked],
            progress=None,
        )
        turns = [Turn("", "no room")] * len(talks)
        for i, answer in zip(asked, generated, strict=True):
            turns[i] = Turn(answer.text.strip(), answer.finish)
        return turns

    def _sampling(self, first: Question, turn: int) -> Sampling:
        """Sampling of a turn for all questions in the batch that begins with `first`."""
        settings = self.settings
        seed = zlib.crc32(f"{settings.seed}/{first.id}/{turn}".encode())
        value = settings.temperature_of(first)
        return Sampling(settings.max_new_tokens, value, settings.top_p, seed, eos=self.eos)


def read_questions(benchmark: str, data_root: str, limit: int = 0) -> list[Question]:
    """Read the first `limit` questions (0: all) of `<data_root>/<benchmark>/`.

    Raises:
      ValueError (DataError): an unknown benchmark, no such file, an unreadable question (names file
        and line), or a duplicate id.
    """
    check_choice("benchmark", benchmark, BENCHMARKS)
    check_number("limit", limit, "[0, inf), 0 for all")
    source = read_jsonl([benchmark_file(benchmark, data_root, QUESTION_FILES)])
    read = _wizardlm_question if benchmark == "wizardlm_testset" else _question
    questions = list(read_each(source, read))
    places: dict[int | str, int] = {}
    for i, question in enumerate(questions):
        if places.setdefault(question.id, i) < i:
            raise DataError(f"{source.where(i)}: the id {question.id!r} is a duplicate")
    return questions[: limit or None]


def benchmark_file(benchmark: str, data_root: str, names: Sequence[str]) -> str:
    """The first existing file of `names` in `<data_root>/<benchmark>/`."""
    folder = epath.Path(data_root or ".") / benchmark
    if not data_root or not folder.is_dir():
        raise ValueError(
            f"data_root={data_root!r} has no folder {benchmark}: give the directory that holds "
            f"{benchmark}/{names[0]}"
        )
    for name in names:
        if (folder / name).exists():
            return str(folder / name)
    raise ValueError(f"{folder} has none of {', '.join(names)}")


def read_answers(path: str) -> tuple[str, dict[int | str, list[str]]]:
    """Read the model's name and `{question id: its turns}` from an answers' file of either form.

    Raises:
      ValueError (DataError): an unreadable row, or answers of several models.
    """
    source = read_jsonl([path])
    answers = list(read_each(source, _answer))
    names = sorted({name for name, _, _ in answers})
    if len(names) > 1:
        raise DataError(f"{path} holds answers of several models: {', '.join(names)}")
    return names[0], {i: turns for _, i, turns in answers}


def answer_row(
    benchmark: str, question: Question, name: str, turns: Sequence[str]
) -> dict[str, Any]:
    """A line of the answers' file."""
    if benchmark == "wizardlm_testset":
        return {"id": question.id, "instruction": question.turns[0], name: turns[0]}
    written = json.dumps([benchmark, name, question.id, list(turns)])
    return {
        "question_id": question.id,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, written).hex,
        "model_id": name,
        "choices": [{"index": 0, "turns": list(turns)}],
        "tstamp": time.time(),
    }


def model_id(given: str, model: str) -> str:
    """The given name, else the last part of the model's, as a valid file name.

    Raises:
      ValueError: the name is another field of a row.
    """
    name = given or PurePath(model).name.removesuffix(".gguf")
    name = re.sub(r"[^\w.-]+", "_", name) or "model"
    if name in ("id", "instruction"):
        raise ValueError(f"model_id={name!r} is a field of WizardLM's answers")
    return name


def question_id(row: Mapping[str, Any]) -> Any:
    return row["question_id"] if "question_id" in row else row.get("id")


def _question(row: Mapping[str, Any]) -> Question:
    turns = texts_of(row, "turns")
    if not turns:
        raise DataError("field 'turns' is empty")
    reference = row.get("reference") or ()
    return Question(
        value_of(row, "question_id", (int, str), "a number or a name"),
        str(row.get("category", "")),
        tuple(turns),
        tuple(map(_reference, reference)) if isinstance(reference, list) else (),
    )


def _reference(answer: Any) -> str:
    """An answer to a turn; lists of answers (Spec-Bench's `rag`) are joined with line breaks."""
    return "\n".join(map(str, answer)) if isinstance(answer, list) else str(answer)


def _wizardlm_question(row: Mapping[str, Any]) -> Question:
    number = value_of(row, "idx", (int, str), "a number or a name")
    return Question(number, str(row.get("Skill", "")), (text_of(row, "Instruction"),))


def _answer(row: Mapping[str, Any]) -> tuple[str, Any, list[str]]:
    if "question_id" in row:
        choices = value_of(row, "choices", list, "a list")
        if not choices or not isinstance(choices[0], Mapping):
            raise DataError("field 'choices' is empty or holds no object")
        return text_of(row, "model_id"), row["question_id"], texts_of(choices[0], "turns")
    names = [key for key in row if key not in ("id", "instruction")]
    if "id" not in row or len(names) != 1:
        raise DataError(
            "neither an answer of FastChat's form (question_id, model_id, choices) nor one of "
            f"WizardLM's (id, instruction, <model>); fields seen: {', '.join(map(str, row))}"
        )
    return names[0], row["id"], [text_of(row, names[0])]
