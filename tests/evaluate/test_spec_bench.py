"""Spec-Bench: its 480 published questions, their sampling, and the prompts of its judge."""

import collections
import dataclasses

import pytest
from tiny_models import config_of
from tiny_runs import write_rows

from ffn_heterogeneity.evaluate.chat import conversations as chat
from ffn_heterogeneity.evaluate.chat import judge
from ffn_heterogeneity.evaluate.run import check_config
from ffn_heterogeneity.wording import settings_from

ADDED = ("translation", "summarization", "qa", "math_reasoning", "rag")


@pytest.fixture
def questions(shared_data):
    return chat.read_questions("spec_bench", str(shared_data))


def test_the_published_questions(questions, shared_data):
    """80 unchanged questions of MT-bench, and 80 of each further category."""
    mt_bench = chat.read_questions("mt_bench", str(shared_data))
    assert [q[:3] for q in questions[:80]] == [q[:3] for q in mt_bench]
    counts = collections.Counter(q.category for q in questions[80:])
    assert counts == dict.fromkeys(ADDED, 80)
    assert {len(q.turns) for q in questions[80:]} == {1}
    lacking = {q.category for q in questions[80:] if not q.reference}
    assert lacking == {"qa"}
    # Each of several right answers has a line.
    rag = next(q for q in questions if q.category == "rag")
    assert rag.reference[0].startswith("a source of lumber\naiding in regulating climate")
    assert not any("['" in text for q in questions for text in q.reference)


def test_temperatures(questions):
    """MT-bench's temperatures for its categories, 0 for the others, or the config's for all."""
    config = config_of("chat", model="m", benchmark="spec_bench")
    settings = settings_from(chat.ChatSettings, config)
    for question in questions:
        expected = chat.TEMPERATURES.get(question.category, 0.0)
        assert settings.temperature_of(question) == expected
    assert {settings.temperature_of(q) for q in questions[80:]} == {0.0}
    groups = settings.groups(questions)
    assert sorted(q.id for group in groups for q in group) == list(range(81, 561))
    settings = dataclasses.replace(settings, temperature=0.3)
    assert {settings.temperature_of(q) for q in questions} == {0.3}


def test_what_the_judge_is_shown(questions, shared_data, tmp_path):
    """Each turn is a job, with the question's reference if its category is judged with one."""
    rows = [chat.answer_row("spec_bench", q, "tiny", ["said"] * len(q.turns)) for q in questions]
    path = write_rows(tmp_path / "answers.jsonl", rows)
    options = {"url": "http://localhost:1", "judge_model": "judge", "key_env": ""}
    options |= {"data_root": str(shared_data), "answers": str(path)}
    settings = check_config(config_of("judge", benchmark="spec_bench", **options))
    jobs, models, unanswered = judge.read_jobs(settings)
    assert (len(jobs), models, unanswered) == (560, ["tiny"], 0)
    judged_by = collections.Counter(job.question.category for job in jobs if job.reference)
    # One question of coding has none.
    complete = dict.fromkeys(("translation", "summarization", "math_reasoning", "rag"), 80)
    assert judged_by == complete | {"math": 20, "reasoning": 20, "coding": 18}
    asker = judge.Judge(settings, models)
    for job in jobs[160:]:
        name, prompt = asker._prompts(job)[""]
        assert name == ("single" if job.question.category == "qa" else "single-reference")
        assert job.question.turns[0] in prompt and all(text in prompt for text in job.reference)
    rated = [{"question_id": job.question.id, "turn": job.turn, "score": 5.0} for job in jobs]
    categories = {q.id: q.category for q in questions}
    summary = judge.single_summary(rated, categories)
    assert set(summary["by_category"]) == {*chat.TEMPERATURES, *ADDED}
