"""Chat benchmarks: the questions of each turn, the written files, and resuming."""

import dataclasses
import json
import shutil

import pytest
from etils import epath
from tiny_models import LLAMA, byte_tokenizer, config_of, random_params, run_script, save_tiny
from tiny_runs import flags_of, read_rows, refused, write_rows

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.evaluate.chat import conversations as chat
from ffn_heterogeneity.evaluate.chat.endpoint import _text_of
from ffn_heterogeneity.evaluate.run import check_config
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.generate import Generation
from ffn_heterogeneity.wording import settings_from

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LONG = dataclasses.replace(LLAMA, max_position=512)


@pytest.fixture(scope="module")
def model():
    return Model(LONG, random_params(LONG), byte_tokenizer(), "tiny")


@pytest.fixture
def data_root(tmp_path):
    """A few questions of each benchmark's form."""
    rows = {
        "mt_bench": [
            {"question_id": 81 + i, "category": kind, "turns": [f"Ask {i}?", f"And {i}?"]}
            for i, kind in enumerate(["writing", "math", "stem", "writing", "riddles", "math"])
        ],
        "spec_bench": [{"question_id": 161, "category": "translation", "turns": ["Translate: Ja"]}],
        "vicuna_bench": [{"question_id": 1, "category": "generic", "turns": ["How?"]}],
    }
    keys = ("idx", "Skill", "Difficulty", "Instruction")
    wizards = ((1, "Math", 1, "Add 1."), (2, "Code", 2, "Sort it."))
    rows["wizardlm_testset"] = [dict(zip(keys, one, strict=True)) for one in wizards]
    for name, questions in rows.items():
        write_rows(tmp_path / "data" / name / "test.jsonl", questions)
    return tmp_path / "data"


def config_for(data_root, benchmark="mt_bench", **changes):
    settings = {
        "model": "x/tiny.gguf",
        "max_new_tokens": 6,
        "batch_size": 2,
        "benchmark": benchmark,
    }
    return config_of("chat", data_root=str(data_root), **{**settings, **changes})


class Recorder:
    """Replaces the generator: answers "answer <n>" and stores its inputs."""

    def __init__(self, *arguments, **settings):
        self.calls = []

    def __call__(self, prompts, samplings, *, progress=None):
        self.calls.append((prompts, samplings))
        texts = [f" answer {len(self.calls)}.{i}\n" for i in range(len(prompts))]
        return [Generation(text, [5], "eos") for text in texts]


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(chat, "Generator", lambda *a, **k: made)
    return made


def test_what_the_model_is_given(data_root, model, recorder, tmp_path):
    """Both turns use the template, the category's temperature and the template's end of turn."""
    config = config_for(data_root, system="Be kind.")
    results = chat.answer_questions(check_config(config), model, tmp_path / "out")
    tokenizer, seen = model.tokenizer, {}
    for prompts, samplings in recorder.calls:
        for ids, sampling in zip(prompts, samplings, strict=True):
            seen[tokenizer.decode(ids)] = sampling
    assert len(seen) == 12
    first = "<s><|system|>\nBe kind.\n<|user|>\nAsk 0?\n<|assistant|>\n"
    assert seen[first].temperature == 0.7 and seen[first].max_new_tokens == 6
    assert seen[first].eos == (tokenizer.eos_token_id,)
    (second,) = [text for text in seen if "And 0?" in text]
    answers = read_rows(results["answers"])
    turns = {row["question_id"]: row["choices"][0]["turns"] for row in answers}
    assert second == f"{first}{turns[81][0]}</s>\n<|user|>\nAnd 0?\n<|assistant|>\n"
    # The answer has no white space around it.
    assert turns[81][0].startswith("answer ") and turns[81][0] == turns[81][0].strip()
    by_question = {i: s.temperature for t, s in seen.items() for i in range(6) if f"Ask {i}" in t}
    assert by_question == {0: 0.7, 1: 0.0, 2: 0.1, 3: 0.7, 4: 0.7, 5: 0.0}
    # Other batches and other turns have other draws.
    seeds = [samplings[0].seed for _, samplings in recorder.calls]
    assert len(set(seeds)) == len(seeds) == len(recorder.calls)
    assert results["answered"] == 6 and results["turns"] == 12 and results["turns_length"] == 0
    assert results["chat_template"] == "tulu"


def test_the_benchmarks_own_forms(data_root, model, recorder, tmp_path):
    """Files have FastChat's or WizardLM's fields, and both are read back."""
    for benchmark in chat.BENCHMARKS:
        config = config_for(data_root, benchmark, model_id="my model")
        results = chat.answer_questions(check_config(config), model, tmp_path / benchmark)
        assert results["answers"].endswith("model_answer/my_model.jsonl")
        row = read_rows(results["answers"])[0]
        if benchmark == "wizardlm_testset":
            assert list(row) == ["id", "instruction", "my_model"] and row["id"] == 1
        else:
            fields = ["question_id", "answer_id", "model_id", "choices", "tstamp"]
            assert list(row) == fields and list(row["choices"][0]) == ["index", "turns"]
        name, answers = chat.read_answers(results["answers"])
        assert name == "my_model" and len(answers) == results["answered"]
        assert all(turn.startswith("answer") for turns in answers.values() for turn in turns)
    # WizardLM's are greedy, Vicuna's other categories at 0.7, and a set temperature is for all.
    temperatures = [samplings[0].temperature for _, samplings in recorder.calls]
    assert temperatures[-1] == 0.0 and temperatures[-2] == 0.7
    question = chat.read_questions("mt_bench", str(data_root))[1]
    assert check_config(config_for(data_root, temperature=0.3)).temperature_of(question) == 0.3


def test_going_on_gives_the_same_answers(data_root, model, tmp_path):
    """After a stop, existing sampled texts are kept, and missing ones are as without a stop."""
    config = config_for(data_root, temperature=1.0, seed=5)
    uninterrupted = tmp_path / "whole"
    first = chat.answer_questions(check_config(config), model, uninterrupted)
    (file,) = (uninterrupted / "model_answer").iterdir()
    rows = read_rows(file)
    texts = {row["question_id"]: row["choices"] for row in rows}
    assert len(texts) == 6 and len({json.dumps(choice) for choice in texts.values()}) == 6
    for existing in ([], rows[:1], rows[1:4]):
        path = write_rows(
            tmp_path / f"part{len(existing)}" / "model_answer" / "tiny.jsonl", existing
        )
        shutil.copy(
            uninterrupted / "turns.jsonl", path.parent.parent
        )  # as written before the answers
        results = chat.answer_questions(check_config(config), model, path.parent.parent)
        assert {**results, "answers": first["answers"]} == first, "counts are of all turns"
        answers = read_rows(path)
        assert answers[: len(existing)] == existing
        assert {row["question_id"]: row["choices"] for row in answers} == texts
    before = file.read_bytes()
    assert first["turns"] == 12 == first["turns_length"]
    assert chat.answer_questions(check_config(config), model, uninterrupted) == first
    assert file.read_bytes() == before
    (uninterrupted / "turns.jsonl").unlink()
    assert chat.answer_questions(check_config(config), model, uninterrupted) == first, "asked again"


def test_answers_end_where_the_models_positions_do(data_root, model, recorder, tmp_path):
    """Answers use the remaining positions; a conversation without room gets no more answers."""
    ids = len("<s>") - 2 + len("<|user|>\nAsk 0?\n<|assistant|>\n")
    short = dataclasses.replace(LONG, max_position=ids + 4)
    small = Model(short, {}, model.tokenizer, "tiny")
    results = chat.answer_questions(check_config(config_for(data_root, limit=1)), small, tmp_path)
    (prompts, samplings), (nothing, _) = recorder.calls
    assert len(prompts[0]) == ids and samplings[0].max_new_tokens == 4
    assert nothing == []
    assert results["turns_no_room"] == 1
    assert read_rows(results["answers"])[0]["choices"][0]["turns"][1] == ""


def test_the_tokenizers_eos_ends_an_answer_too(model, tmp_path):
    """The template ends a turn with another special token, and the config has no eos."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens("!", special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    config = config_for(tmp_path, bos="none")
    made = chat.Chat(
        settings_from(chat.ChatSettings, config),
        Model(model.config, model.params, tokenizer, "tiny"),
    )
    (bang,) = tokenizer.encode("!", add_special_tokens=False)
    assert made.template == "tokenizer" and made.eos == (bang, tokenizer.eos_token_id)
    # A generation prompt that begins a thought, which the rendered answers do not have.
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    made = chat.Chat(made.settings, Model(model.config, model.params, tokenizer, "tiny"))
    assert made.eos == (tokenizer.eos_token_id,)


def test_turns_that_went_wrong_are_counted():
    finishes = ["eos", "length", "no room", "eos"]
    turns = [chat.Turn(text, end) for text, end in zip(["a", "b", "", ""], finishes, strict=True)]
    ends = {"turns_length": 1, "turns_no_room": 1, "turns_empty": 1}
    assert chat.turn_counts(turns) == {"turns": 4, **ends}


def test_half_a_surrogate_pair_is_no_end_of_a_run(tmp_path):
    """JSON can contain one, a text file cannot: in an answer of a judge, and in a row."""
    body = json.dumps({"choices": [{"message": {"content": "good \ud83d [[8]] \U0001f600"}}]})
    assert "\\ud83d [[8]]" in body
    assert _text_of(body) == "good ? [[8]] \U0001f600"
    path = epath.Path(tmp_path) / "rows.jsonl"
    chat.write_rows(path, [{"id": 1, "m": "a\ud83db\U0001f600"}, {"id": 2, "m": "ü"}])
    assert [row["m"] for row in chat.read_rows(path)] == ["a?b\U0001f600", "ü"]


BAD_ROWS = [
    ("mt_bench", {"category": "math", "turns": ["a"]}, "no field 'question_id'"),
    ("mt_bench", {"question_id": 1, "turns": []}, "'turns' is empty"),
    ("mt_bench", {"question_id": 1, "turns": "a"}, "'turns' is str"),
    ("mt_bench", {"question_id": 1, "turns": [3]}, "'turns' holds int"),
    ("mt_bench", {"question_id": 7, "turns": ["b"]}, "the id 7 is a duplicate"),
    ("wizardlm_testset", {"idx": 7}, "no field 'Instruction'"),
]


@pytest.mark.parametrize(("benchmark", "row", "message"), BAD_ROWS)
def test_questions_that_cannot_be_read(tmp_path, benchmark, row, message):
    good = {"question_id": 7, "idx": 8, "turns": ["a"], "Instruction": "a"}
    write_rows(tmp_path / benchmark / "question.jsonl", [good, row])
    refused(f"line 2: .*{message}", check_config, config_for(tmp_path, benchmark), error=DataError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmark": "arena"}, "benchmark='arena': choose one of"),
        ({"data_root": ""}, "data_root='' has no folder mt_bench"),
        ({"data_root": "/nowhere"}, "has no folder mt_bench: give the directory"),
        ({"limit": -1}, "limit=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"chat_template": "x"}, "chat_template='x'"),
        ({"model_id": "id"}, "model_id='id' is a field"),
    ],
)
def test_settings_that_cannot_be(data_root, changes, message):
    changes = {"data_root": str(data_root), **changes}
    with pytest.raises(ValueError, match=message):
        check_config(config_of("chat", **{"model": "m", "benchmark": "mt_bench", **changes}))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question_id": 1}], "line 1: no field 'choices'"),
        ([{"question_id": 1, "choices": [], "model_id": "m"}], "'choices' is empty"),
        ([{"id": 1, "instruction": "a"}], "line 1: neither an answer"),
        ([{"id": 1, "m": "a"}, {"id": 2, "n": "a"}], "answers of several models: m, n"),
        ([{"id": 1, "m": None}], "'m' is NoneType"),
    ],
)
def test_answers_that_cannot_be_read(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        chat.read_answers(str(write_rows(tmp_path / "a.jsonl", rows)))


def test_the_published_questions(shared_data):
    """All of them are read; MT-bench's categories are the eight that have a temperature."""
    counts = {name: chat.read_questions(name, str(shared_data)) for name in chat.BENCHMARKS}
    sizes = {"mt_bench": 80, "spec_bench": 480, "vicuna_bench": 80, "wizardlm_testset": 218}
    assert {name: len(questions) for name, questions in counts.items()} == sizes
    assert {q.category for q in counts["mt_bench"]} == set(chat.TEMPERATURES)
    assert all(len(q.turns) == 2 for q in counts["mt_bench"])
    name, answers = chat.read_answers(str(shared_data / "mt_bench" / "reference_gpt4.jsonl"))
    assert name == "gpt-4" and sorted(answers) == list(range(101, 131))


def test_the_script(data_root, tmp_path):
    directory = save_tiny(tmp_path / "model", LONG, random_params(LONG))
    settings = {"data_root": data_root, "max_new_tokens": 4, "batch_size": 2, "limit": 2}
    arguments = flags_of("configs/chat.py", model=directory, workdir=tmp_path / "out", **settings)
    done = run_script("evaluate", *arguments)
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["answered"] == 2 and results["turns"] == 4
    assert run_script("evaluate", *arguments).code == 0
    refused = run_script("evaluate", arguments[0], model=directory, data_root="/nowhere")
    assert refused.code == 2 and "has no folder mt_bench" in refused.err
