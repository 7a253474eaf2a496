"""The pipeline: order, resuming, held-out data, errors (processes: test_process_rows.py)."""

import json
import subprocess
import sys
import threading

import pytest
from batch_tools import check_resumes, same, take, texts_of
from tiny_runs import refused

from ffn_heterogeneity.data.pipeline import make_pipeline, split_records
from ffn_heterogeneity.data.sources import DataError, open_source


def documents_of(batches):
    return texts_of(batches, "targets")


@pytest.fixture
def numbered(write):
    """103 short documents "0" ... "102"."""
    return write("numbered.jsonl", [{"text": str(i)} for i in range(103)])


CASES = {
    "gsm8k": {"task": "gsm8k", "path": "gsm8k/test.jsonl"},
    "one_per_row": {"task": "gsm8k", "path": "gsm8k/test.jsonl", "packing": False},
    "text": {"path": "tinyshakespeare/input.txt"},
    "text_one_per_row": {"path": "tinyshakespeare/input.txt", "packing": False},
    "alpaca": {"task": "jsonl", "path": "alpaca_gpt4_en/train.jsonl", "prefetch": 0},
    "in_order": {"path": "wikitext2/validation.txt", "shuffle": False, "bos": "document"},
}


def case(name, shared_data, **more):
    return {**CASES[name], "path": str(shared_data / CASES[name]["path"]), **more}


@pytest.mark.parametrize("name", CASES)
def test_resumes_to_the_very_next_batch(shared_data, bpe, name):
    def make():
        return make_pipeline(case(name, shared_data), bpe, 8, 128, seed=3).train_iterator()

    iterator, states, batches = check_resumes(make, 14, (0, 1, 5, 9, 13))
    assert max(map(len, states)) < 1000
    assert make().get_state()["pipeline"] == json.loads(states[5])["pipeline"]
    iterator.set_state(json.loads(states[2]))  # an iterator in use can be set back, too
    assert all(same(a, b) for a, b in zip(take(iterator, 4), batches[2:6], strict=True))
    iterator.close()


def test_resumes_anywhere_in_a_finite_pass(numbered, characters):
    pipeline = make_pipeline({"path": numbered, "packing": False}, characters(), 4, 8, 0)
    iterator, states, batches = pipeline.train_iterator(epochs=2), [], []
    for _ in range(52):
        states.append(iterator.get_state())
        batches.append(next(iterator))
    assert next(iterator, None) is None
    for state, rest in list(zip(states, range(52, 0, -1), strict=True))[::3]:
        again = pipeline.train_iterator(epochs=2)
        again.set_state(state)
        got = list(again)
        assert len(got) == rest and same(got[0], batches[52 - rest]) and same(got[-1], batches[-1])


def test_a_state_survives_dropped_documents(write, characters):
    """Reading the same dropped documents again must not be taken for "nothing is left"."""
    records = [{"text": ""}] * 9 + [{"text": "word"}]
    config = {"path": write("a.jsonl", records), "task": "text", "shuffle": False}
    iterator = make_pipeline(config, characters(), 1, 4, 0).train_iterator()
    start = iterator.get_state()
    for _ in range(12):
        iterator.set_state(start)
    assert documents_of([next(iterator)]) == ["word"]
    iterator.close()


@pytest.mark.parametrize(
    "change, named",
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"seq_len": 64}, "seq_len was 128, is 64"),
        ({"batch_size": 4}, "batch_size was 8, is 4"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"packing": False}, "packing was True, is False"),
        ({"bos": "document"}, "bos was"),
        ({"eos": False}, "eos was 1, is None"),
        ({"append": "\n[eod]"}, "append was ''"),
        ({"loss_on_prompt": True}, "loss_on_prompt was False"),
        ({"path": "gsm8k/train.jsonl"}, "records was 1319, is 7473"),
        ({"validation_fraction": 0.1}, "records was 1319, is 1187"),
        ({"task": "jsonl"}, "task was 'gsm8k', is 'jsonl'"),
        ({"prompt_field": "answer"}, "data_crc was"),
        ({"epochs": 1}, "epochs was None, is 1"),
    ],
)
def test_a_state_of_another_pipeline_is_refused(shared_data, bpe, change, named):
    def iterator_of(seed=3, seq_len=128, batch_size=8, epochs=None, **config):
        if "path" in config:
            config["path"] = str(shared_data / config["path"])
        config = case("gsm8k", shared_data) | config
        return make_pipeline(config, bpe, batch_size, seq_len, seed).train_iterator(epochs)

    state = iterator_of().get_state()
    iterator_of().set_state(state)
    refused(f"another pipeline.*{named}", iterator_of(**change).set_state, state, error=DataError)


def test_other_data_tokenizer_or_version_is_refused(write, characters, bpe):
    config = {"path": write("a.txt", "one text")}
    state = make_pipeline(config, characters(), 1, 8, 0).train_iterator().get_state()
    with pytest.raises(DataError, match="tokenizer_crc was"):
        make_pipeline(config, bpe, 1, 8, 0).train_iterator().set_state(state)
    write("a.txt", "two text")
    changed = make_pipeline(config, characters(), 1, 8, 0).train_iterator()
    refused("data_crc was", changed.set_state, state, error=DataError)
    for version in (None, 1):
        with pytest.raises(DataError, match=f"version {version}, this code reads 2; continue with"):
            changed.set_state(state | {"version": version})


def test_every_epoch_holds_each_document_once_in_a_new_order(numbered, characters):
    everything = [str(i) for i in range(103)]
    # One document a row, so that rows keep the order; 206 rows in 2 epochs.
    config = {"path": numbered, "packing": False, "eos": False}

    def orders(seed, **more):
        iterator = make_pipeline(config | more, characters(), 1, 8, seed).train_iterator(epochs=2)
        documents = documents_of(iterator)
        return documents[:103], documents[103:]

    first, second = orders(0)
    assert sorted(first) == sorted(second) == sorted(everything)
    assert len({tuple(first), tuple(second), tuple(everything)}) == 3
    assert orders(0) == (first, second)
    assert orders(99, shuffle_seed=0) == (first, second)
    other = orders(1)
    assert len({tuple(first), tuple(second), *map(tuple, other)}) == 4  # not seed 0 one epoch later
    assert orders(0, shuffle=False) == (everything, everything)


def test_held_out_records_are_disjoint_and_the_same_for_every_seed(numbered, characters):
    config = {"path": numbered, "validation_fraction": 0.2, "packing": False, "task": "text"}
    held_out = None
    for seed in (0, 1):
        pipeline = make_pipeline(config, characters(), 4, 8, seed)
        train = documents_of(pipeline.train_iterator(epochs=1))
        held = documents_of(pipeline.validation_iterator())
        assert len(held) == 21 and len(train) == 82
        assert sorted(train + held) == sorted(str(i) for i in range(103))
        assert held == sorted(held, key=int), "in order"
        assert held_out in (None, held)
        held_out = held
    assert held_out != [str(i) for i in range(82, 103)], "a sample, not the tail"


def test_running_text_holds_out_its_last_stretch(shared_data):
    source = open_source(str(shared_data / "tinyshakespeare" / "input.txt"))
    train, held = split_records(source, 0.1)
    assert list(train.rows) + list(held.rows) == list(range(len(source)))
    assert len(held) == round(0.1 * len(source))


def test_validation_is_a_fixed_padded_pass(shared_data, bpe):
    config = case("gsm8k", shared_data, validation_fraction=0.05)
    pipeline = make_pipeline(config, bpe, 8, 256, 0)
    batches = list(pipeline.validation_iterator())
    again = list(pipeline.validation_iterator())
    assert len(batches) > 2 and all(same(a, b) for a, b in zip(batches, again, strict=True))
    assert all(batch["tokens"].shape == (8, 256) for batch in batches)
    assert not batches[-1]["segment_ids"][-1].any() and not batches[-1]["loss_mask"][-1].any()
    assert len(list(pipeline.validation_iterator(max_batches=2))) == 2


def test_validation_of_its_own(write, characters, monkeypatch):
    train = write("train.jsonl", [{"text": "t"}] * 5)
    other = write("other.jsonl", [{"text": "v"}] * 3)
    config = {"path": train, "validation_path": other, "packing": False}
    config |= {"validation_fraction": 0.5}  # a config's default, which then selects nothing
    pipeline = make_pipeline(config, characters(), 2, 4, 0)
    assert documents_of(pipeline.validation_iterator()) == ["v"] * 3
    assert documents_of(pipeline.train_iterator(epochs=1)) == ["t"] * 5


def test_training_and_validation_never_read_one_file(write, characters, tmp_path):
    """Nor a split that files do not have, which would be all of them."""
    train = write("train.jsonl", [{"text": "t"}] * 5)
    both = {"path": train, "packing": False, "validation_fraction": 0.0}
    for wrong in (
        {"validation_path": train},
        {"validation_split": "validation"},
        {"path": str(tmp_path), "validation_path": train},
    ):
        refused(
            "training and validation both read it",
            make_pipeline,
            both | wrong,
            characters(),
            2,
            4,
            0,
            error=DataError,
        )


def test_a_saved_data_set_has_its_own_validation(characters, tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {"train": "t", "validation": "v"}
    rows = {name: datasets.Dataset.from_list([{"text": x}] * 3) for name, x in parts.items()}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "saved"))
    rows["train"].save_to_disk(str(tmp_path / "one"))
    for name, more in (("saved", {"validation_split": "train"}), ("one", {})):
        path = str(tmp_path / name)
        twice = {"path": path, "validation_path": path, "packing": False} | more
        sizes, words = (characters(), 2, 4, 0), "training and validation both read it"
        refused(words, make_pipeline, twice, *sizes, error=DataError)
    config = {"path": str(tmp_path / "saved"), "validation_path": str(tmp_path / "saved")}
    pipeline = make_pipeline(config | {"packing": False}, characters(), 2, 4, 0)
    assert documents_of(pipeline.validation_iterator()) == ["v"] * 3
    assert documents_of(pipeline.train_iterator(epochs=1)) == ["t"] * 3


def test_prefetching_changes_nothing_and_ends(numbered, characters):
    def batches(prefetch):
        config = {"path": numbered, "prefetch": prefetch}
        iterator = make_pipeline(config, characters(), 4, 16, 0).train_iterator()
        drawn = take(iterator, 9)
        iterator.close()
        return drawn

    before = threading.active_count()
    for prefetch in (2, 5):
        assert all(same(a, b) for a, b in zip(batches(0), batches(prefetch), strict=True))
    assert threading.active_count() == before


def test_tokenises_no_more_than_it_needs(write, characters):
    path = write("a.jsonl", [{"text": f"{i:>200}"} for i in range(3000)])
    tokenizer = characters()
    pipeline = make_pipeline({"path": path, "prefetch": 0}, tokenizer, 4, 128, 0)
    next(pipeline.train_iterator())
    assert tokenizer.calls < 20


def test_counts_of_an_epoch(numbered, characters):
    config = {"path": numbered, "packing": False}
    iterator = make_pipeline(config, characters(), 4, 8, 0).train_iterator(epochs=1)
    assert len(list(iterator)) == 26
    assert iterator.counts.documents == iterator.counts.kept == 103
    assert iterator.counts.loss_tokens == sum(len(str(i)) for i in range(103)) + 103


def test_a_closed_iterator_says_so(numbered, characters):
    iterator = make_pipeline({"path": numbered}, characters(), 4, 16, 0).train_iterator()
    next(iterator)
    iterator.close()
    iterator.close()
    refused("closed", next, iterator, error=DataError)


def test_a_program_that_forgets_to_close_ends_in_silence(numbered):
    code = f"""
from ffn_heterogeneity.data.pipeline import make_pipeline
class Tokenizer:
    bos_token_id = eos_token_id = 1
    def encode(self, text, add_special_tokens): return [ord(c) for c in text]
iterator = make_pipeline({{"path": {numbered!r}}}, Tokenizer(), 4, 16, 0).train_iterator()
next(iterator)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_field_is_found_at_once_and_placed(write, characters):
    records = [{"question": "q", "answer": "a"}] * 4 + [{"question": "q", "reply": "a"}]
    config = {"task": "gsm8k", "path": write("a.jsonl", records)}
    message = r"a.jsonl, line 5: no field 'answer'; fields seen: question, reply"
    refused(message, make_pipeline, config, characters(), 2, 16, 0, error=DataError)


@pytest.mark.parametrize(
    "config, sizes, message",
    [
        ({"pth": "x"}, (2, 8), "unknown data setting 'pth', did you mean 'path'"),
        ({"qqqq": "x"}, (2, 8), "unknown data setting 'qqqq'. Known"),
        ({}, (2, 1), "seq_len is 1"),
        ({}, (0, 8), "batch_size is 0; it must be a positive multiple of the 1 micro-batches"),
        ({"prefetch": -1}, (2, 8), "prefetch=-1"),
        ({"validation_fraction": 1.0}, (2, 8), r"validation_fraction=1.0.*\[0, 1\)"),
        ({"validation_fraction": -0.1}, (2, 8), "validation_fraction=-0.1"),
        ({"path": ""}, (2, 8), "task 'text' needs a path"),
        ({"bos": "first"}, (2, 8), "bos='first'"),
        ({"passage_chars": 0}, (2, 8), "passage_chars=0"),
        ({"task": "messages", "append": "x"}, (2, 8), "'messages' has no prompts and responses"),
        ({"task": "tokens", "loss_on_prompt": True}, (2, 8), "'tokens' has no prompts"),
        ({"passage_chars": 10**6, "validation_fraction": 0.5}, (2, 8), "cannot be split"),
    ],
)
def test_bad_settings(write, characters, config, sizes, message):
    config = {"path": write("a.txt", "some words, " * 9), "passage_chars": 20, **config}
    refused(message, make_pipeline, config, characters(), *sizes, 0, error=DataError)


def test_asking_for_validation_that_is_not_there(numbered, characters):
    with pytest.raises(DataError, match="no validation data: set validation_fraction"):
        make_pipeline({"path": numbered}, characters(), 1, 8, 0).validation_iterator()
