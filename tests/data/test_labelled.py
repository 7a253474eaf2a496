"""Labelled rows: GLUE's original files, truncation as elsewhere, an order set only by the seed."""

import contextlib
import csv
import dataclasses
import math

import numpy as np
import pytest
from tiny_models import byte_tokenizer
from tiny_runs import read_rows, refused, write_rows

from ffn_heterogeneity.data import labelled
from ffn_heterogeneity.data.glue import TASKS, get_task, label_number
from ffn_heterogeneity.data.labelled import Encoded, Form, LabelSettings, Shuffled
from ffn_heterogeneity.data.record_source import ClassName, DataError
from ffn_heterogeneity.io.load import load_tokenizer

# Headers of GLUE's original files; CoLA's have none.
HEADERS = {
    "rte": "index,sentence1,sentence2,label",
    "mrpc": "Quality,#1 ID,#2 ID,#1 String,#2 String",
    "stsb": "index,genre,filename,year,old_index,source1,source2,sentence1,sentence2,score",
    "cola": "source,label,original_mark,sentence",
    "sst2": "sentence,label",
    "qnli": "index,question,sentence,label",
    "qqp": "id,qid1,qid2,question1,question2,is_duplicate",
    "mnli": "index,promptID,pairID,genre,sentence1_parse,sentence1,sentence2,label1,gold_label",
}
PLAIN = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}


def rows_in(path, *rows, name="rows.jsonl"):
    return labelled.open_rows(str(write_rows(path / name, rows)))


@pytest.mark.parametrize("task", TASKS)
def test_files_of_each_task(task, shared_data):
    """Fields and labels of the official files and of published copies; answers in both halves."""
    folder = shared_data / f"glue_{task}"
    for file in sorted(folder.glob("*.jsonl")):
        if (task, file.name) == ("rte", "test.jsonl"):
            continue
        source, kind = labelled.open_rows(str(file)), TASKS[task]
        targets = np.array([kind.target(source[i]) for i in range(len(source))])
        assert all(len(kind.texts(source[i])) == len(kind.fields[0]) for i in range(50))
        if kind.regression:
            assert 0 <= targets.min() < 1 and 4 < targets.max() <= 5
        else:
            assert set(targets) == set(range(len(kind.labels)))
    if task in ("rte", "mrpc", "stsb", "cola"):
        train = labelled.open_rows(str(folder / "train.jsonl"))
        assert len(train) == TASKS[task].rows


@pytest.mark.parametrize("task", TASKS)
def test_glues_own_tables_are_their_rows(task, shared_data, tmp_path):
    """Texts and targets of every row, without quoting (as in GLUE) and as CSV."""
    kind, names = TASKS[task], HEADERS[task].split(",")
    rows = read_rows(shared_data / f"glue_{task}" / "train.jsonl")[:20_000]
    texts = next(group for group in kind.fields if {*group} <= {*names})
    filled, lines = [*texts, kind.field(names)], []
    for row in rows:
        given = zip(filled, (*kind.texts(row), str(row[kind.field(row)])), strict=True)
        lines.append(({name: str(row.get(name, 7)) for name in names} | dict(given)).values())
    assert task != "mrpc" or sum(any(x[:1] == '"' for x in line) for line in lines) == 455
    for name, form in (("a.csv", {}), ("a.tsv", PLAIN)):
        with (tmp_path / name).open("w", encoding="utf-8", newline="") as file:
            headless = task == "cola" and name == "a.tsv"
            csv.writer(file, **form).writerows(lines if headless else [names, *lines])
        source = labelled.open_rows(str(tmp_path / name))
        examples = [(kind.texts(row), kind.target(row)) for row in labelled.read_each(source, dict)]
        assert examples == [(kind.texts(row), kind.target(row)) for row in rows]


def test_a_number_is_a_label_by_its_text():
    """Or by its index, if no label is a number. None is no label. Classes have names or numbers."""
    named = ClassName("pos")
    named.place = 1

    def place(*given):
        with contextlib.suppress(DataError):
            return label_number("x", *given)

    for labels, numbers, wanted in (
        (("1", "2", "3"), None, {1: 0, "2": 1, 3.0: 2, "3.0": 2, 0: None, 4: None}),
        (("-1", "0", "1"), None, {-1: 0, False: 1, "1": 2, True: 2}),
        (("False", "True"), None, {True: 1, "true": 1, "0": 0}),
        (("LABEL_0", "LABEL_1"), None, {1: 1, "0": 0, "label_0": 0, -1: None, "": None}),
        (("Yes", "yes"), None, {"yes": 1, "Yes": 0, "YES": None, 0: 0}),
        (("C", "N", "E"), ("e", "n", "c"), {0: 2, "1": 1, "c": 0}),
        (("c", "n", "e"), (), {0: None, "e": 2}),
        (("1 star", "2 stars"), None, {1: 0, "2": 1, 0: None, "2 stars": 1}),
        (("LABEL_0", "LABEL_1"), None, {named: 1}),
        (("0", "1"), None, {named: 1}),
        (("negative", "positive"), None, {named: None}),
    ):
        assert {value: place(value, labels, numbers) for value in wanted} == wanted, labels


def test_answers_by_name_number_and_text(tmp_path):
    rte, mrpc = TASKS["rte"], TASKS["mrpc"]
    for value, number in (("entailment", 0), (" not_entailment ", 1), (1, 1), ("0", 0), (1.0, 1)):
        assert rte.target({"label": value}) == number
    assert mrpc.target({"Quality": "1"}) == 1 and TASKS["stsb"].target({"score": "2.5"}) == 2.5
    bad = dict.fromkeys((-1, "-1"), "not published")
    bad |= dict.fromkeys(("maybe", 2, 0.5, None), "none of the labels")
    for value, message in bad.items():
        source = rows_in(tmp_path, {"label": 1}, {"label": value})
        with pytest.raises(DataError, match=rf"rows.jsonl, line 2: .*{message}"):
            list(labelled.read_each(source, rte.target))
    for value in ("nan", 1e39, 3.5e38, "-1e39", 10**400, [1.0]):
        refused("finite number of float32", TASKS["stsb"].target, {"score": value})
    assert get_task("rte", labels=["not_entailment", "entailment"]).numbers == ()


def test_what_cannot_be_is_one_line(tmp_path):
    for words, function, *arguments in (
        ("did you mean 'mrpc'", get_task, "mprc"),
        ("the fields 'sentence1', 'sentence2'.*'premise'", TASKS["rte"].texts, {"premise": "a"}),
        ("needs --config.fields", get_task, "labels"),
        ("each once", get_task, "labels", ["a"], ["x", "x"]),
        ("one text or two", get_task, "labels", ["a", "b", "c"]),
    ):
        refused(words, function, *arguments, error=DataError)
    for name, content, words in (
        ("t.csv", "a,b\n1,2\n3\n", r"t.csv, line 3: 1 columns, the header has 2"),
        ("t.csv", 'a,b\n"1,2\n', "not CSV"),
        ("plain.txt", "text", "plain text"),
    ):
        (tmp_path / name).write_text(content)
        refused(words, labelled.open_rows, str(tmp_path / name), error=DataError)
    held_out = {"path": "a.csv", "validation_fraction": 0.1}
    LabelSettings("rte", **held_out)
    for more in ({"path": ""}, {"validation_path": "b.csv"}):
        refused("holds out rows of data.path", LabelSettings, "rte", **(held_out | more))
    for bad in ({"fraction": 0.0}, {"fraction": 1.5}, {"validation_fraction": 1.0}):
        refused(next(iter(bad)), LabelSettings, "rte", error=DataError, **bad)


def test_csv_and_labels_that_the_file_says(tmp_path):
    table = tmp_path / "t.CSV"
    table.write_text('text,label\n"a, ""b""",10\nc,9\n\n"two\nlines",10\n')
    source = labelled.open_rows(str(table))
    assert [source[i]["text"] for i in range(3)] == ['a, "b"', "c", "two\nlines"]
    assert labelled.found_labels(source) == ("9", "10"), "by their size"
    mixed = [1, 1.0, "1", " 1.0 ", None, "", math.nan, -1, 10, "9", "b", True]
    source = rows_in(tmp_path, *({"label": x} for x in mixed))
    assert labelled.found_labels(source) == ("-1", "1", "9", "10", "True", "b")
    refused("expected one text", labelled.found_labels, rows_in(tmp_path, {"label": [1, 0]}))


@pytest.mark.parametrize("most", [16, 33, 64])
def test_an_encoders_rows_are_cut_as_its_tokenizer_cuts_them(most, shared_data, minilm_dir):
    tokenizer = load_tokenizer(minilm_dir)
    source = labelled.open_rows(str(shared_data / "glue_rte" / "validation.jsonl"))
    texts = [TASKS["rte"].texts(source[i]) for i in range(100)]
    ids, types, cut = labelled.encode_texts(tokenizer, texts, Form(True, 0, most))
    first, second = zip(*texts, strict=True)
    options = {"truncation": "longest_first", "max_length": most, "return_token_type_ids": True}
    want = tokenizer(first, second, **options)
    assert [row.tolist() for row in ids] == want["input_ids"]
    assert [row.tolist() for row in types] == want["token_type_ids"]
    assert [*cut] == [len(tokenizer(*text)["input_ids"]) > most for text in texts]


def test_a_decoders_row_is_bos_and_both_texts_without_eos():
    tokenizer = byte_tokenizer()
    texts = [("abc", "defgh"), ("x", "y")]
    ids, types, cut = labelled.encode_texts(tokenizer, texts, Form(False, 1, 99))
    assert tokenizer.decode(ids[0]) == "<s>abc\ndefgh" and not any(cut) and not np.any(types[0])
    ids, _, cut = labelled.encode_texts(tokenizer, texts, Form(False, 1, 8))
    assert tokenizer.decode(ids[0]) == "<s>abc\ndef" and [*cut] == [True, False], (
        "the longer one is cut"
    )
    # Where a model has no padding, its end of text is the padding: no row may end with it.
    with pytest.raises(DataError, match="row 2 ends with the padding token"):
        labelled.encode_texts(tokenizer, [("a",), ("b</s>",)], Form(False, 1, 99))


def encoded(lengths) -> Encoded:
    ids = [np.full(n, i + 3, np.int32) for i, n in enumerate(lengths)]
    types, targets = [np.zeros(len(x), np.int32) for x in ids], np.arange(len(ids)) * 1.0
    return Encoded(ids, types, targets, np.zeros(len(ids), bool))


def test_the_order_is_the_seeds_whatever_the_lengths_and_processes():
    """Every row once per epoch, one length per batch; the same on two processes, and resumed."""
    rng = np.random.default_rng(0)
    data, size = encoded(rng.integers(2, 60, 50)), 8

    def steps(count=20, lengths=(16, 32, 64), mine=range(size), start=0, seed=1):
        drawn = Shuffled(data, size, list(mine), seed, lengths)
        drawn.set_state({"step": start})
        return [next(drawn) for _ in range(count)]

    batches = steps()
    seen = np.concatenate([batch["target"] for batch in batches])
    for epoch in range(3):
        assert sorted(seen[50 * epoch : 50 * (epoch + 1)]) == list(range(50))
    assert not np.array_equal(seen[:50], seen[50:100])
    one = steps(lengths=(64,))
    assert {batch["tokens"].shape[1] for batch in batches} <= {16, 32, 64}
    assert all(np.array_equal(a["target"], b["target"]) for a, b in zip(batches, one, strict=True))
    halves = [steps(mine=range(4)), steps(mine=range(4, 8))]
    for i, batch in enumerate(batches):
        for name, leaf in batch.items():
            assert np.array_equal(leaf, np.concatenate([half[i][name] for half in halves]))
    again = steps(5, start=15)
    for one, other in zip(again, batches[15:], strict=True):
        assert np.array_equal(one["tokens"], other["tokens"])
    assert not np.array_equal(steps(seed=2)[0]["target"], batches[0]["target"])


def test_rows_that_stand_together_are_the_batchs_own():
    """Packing keeps the rows, one segment each, with answers in order of rows and segments."""
    rng = np.random.default_rng(0)
    data, size = encoded(rng.integers(2, 60, 50)), 8
    given = (data, size, range(size), 1, (16, 24, 32, 64))
    alone, shared = (Shuffled(*given, together) for together in (1, 4))
    places = []
    for _ in range(20):
        one, other = next(alone), next(shared)
        places.append((one["tokens"].size, other["tokens"].size))
        assert sorted(one["target"]) == sorted(other["target"])
        segments = other["segment_ids"].reshape(2, -1)
        for i, target in enumerate(other["target"]):
            tokens = other["tokens"].reshape(2, -1)[i // 4][segments[i // 4] == 1 + i % 4]
            assert np.array_equal(tokens, data.ids[int(target)])
    assert np.sum(places, 0)[1] < 0.65 * np.sum(places, 0)[0]
    # The last batch of a pass may have fewer rows.
    seen = []
    for _, batch in labelled.in_order_of_length(data, size, (16, 64), 4):
        assert batch["tokens"].shape[0] == size
        seen += batch["target"][batch["valid"]].tolist()
    assert sorted(seen) == list(range(50))


def test_a_held_out_set_is_every_row_once_and_fillers_count_nowhere():
    data = encoded([5, 40, 9, 3, 33])
    rows, targets = [], []
    for chosen, batch in labelled.in_order_of_length(data, 2, (8, 16, 64)):
        rows += chosen
        targets += batch["target"][batch["valid"]].tolist()
        assert batch["tokens"].shape[0] == 2
    assert sorted(rows) == [0, 1, 2, 3, 4] and rows == [int(x) for x in targets]


def test_parts_of_the_rows():
    half = labelled.part_of(100, 0.2, seed=3)
    assert len(half) == 20 and not np.array_equal(half, labelled.part_of(100, 0.2, seed=4))
    assert set(half) < set(labelled.part_of(100, 0.6, seed=3)), "the larger part holds the smaller"
    training, out = labelled.held_out_part(100, 0.1)
    assert sorted([*training, *out]) == list(range(100)) and len(out) == 10
    for count, fraction, held in ((20, 0.99, 19), (40, 0.01, 1), (2, 0.5, 1)):
        training, out = labelled.held_out_part(count, fraction)
        assert (len(training), len(out)) == (count - held, held)
    refused("1 row cannot be split", labelled.held_out_part, 1, 0.5)
    data = dataclasses.replace(encoded([4, 5, 6]), cut=np.array([True, False, True]))
    cuts = [labelled.chosen_rows(data, part).cut.sum() for part in ([0, 1], [1], [2, 0])]
    assert cuts == [1, 0, 2]
    assert labelled.named_paths("a.jsonl") == {"validation": "a.jsonl"}
    assert labelled.named_paths("m=a,mm=b") == {"m": "a", "mm": "b"}
    refused("can be called 'm'", labelled.named_paths, "m=a,m=b")


def test_paths_with_equals_signs_and_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "year=2024" / "x.jsonl", [{"label": 1}])
    (path,) = labelled.named_paths("year=2024/x.jsonl").values()
    assert labelled.named_paths(f"a={path},b=~/x") == {"a": path, "b": f"{tmp_path}/x"}
    assert {len(labelled.open_rows(name)) for name in (path, f"~/{path}", "~/year=2024")} == {1}


def test_steps_of_epochs(tmp_path):
    rows_in(tmp_path, *({"label": i % 2} for i in range(100)))
    data = {"task": "rte", "path": str(tmp_path / "rows.jsonl")}
    assert labelled.steps_of(data, 3, 32) == 10
    assert labelled.steps_of(data | {"fraction": 0.2}, 3, 32) == 2
    assert labelled.steps_of(data | {"validation_fraction": 0.5}, 3, 32) == 5
    assert labelled.steps_of({"task": "mrpc"}, 3, 32) == 344
    refused("epochs=0", labelled.steps_of, data, 0, 32)
