"""Sources and tasks: the rows that are read, and the error of each kind of bad input."""

import csv
import json
import subprocess
import sys

import pytest
from prepare_tools import read_chunk
from tiny_runs import read_rows, refused

from ffn_heterogeneity.data import hub
from ffn_heterogeneity.data.corpus.corpora import find_inputs, plan_chunks
from ffn_heterogeneity.data.corpus.documents import Layout
from ffn_heterogeneity.data.sources import DataError, open_source
from ffn_heterogeneity.data.tasks import Fields, get_task, tasks


def read(source):
    return [source[i] for i in range(len(source))]


def test_text_passages_join_to_the_file(shared_data):
    path = shared_data / "tinyshakespeare" / "input.txt"
    records = read(open_source(str(path), passage_chars=5000))
    assert "".join(r["text"] for r in records) == path.read_bytes().decode()
    assert all(0 < len(r["text"]) <= 5000 for r in records)
    # Blank lines between speeches are closer than half a passage: every cut is at one.
    assert all(r["text"].endswith("\n\n") for r in records[:-1])
    assert [r["passage_starts"] for r in records] == [True] + [False] * (len(records) - 1)
    assert [r["passage_ends"] for r in records] == [False] * (len(records) - 1) + [True]


@pytest.mark.parametrize("text", ["a" * 50, "ab " * 20, "one line\n" * 9, "\n" * 30, " " * 30, "x"])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_passages_of_any_text(write, text, size):
    pieces = [r["text"] for r in read(open_source(write("a.txt", text), passage_chars=size))]
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_line_ends_and_byte_order_mark(write):
    source = open_source(write("a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n"))
    assert source[0]["text"] == "one\r\ntwo\r\n"
    assert open_source(write("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n'))[0] == {"text": "one"}


def test_directory_of_text_in_order(write):
    write("books/b.txt", "second")
    write("books/c.txt", "third")
    write("books/cover.png", b"\x89PNG")
    directory = write("books/a.txt", "first").removesuffix("/a.txt")
    source = open_source(directory)
    assert [r["text"] for r in read(source)] == ["first", "second", "third"]
    assert all(r["passage_starts"] and r["passage_ends"] for r in read(source))
    assert source.where(1).startswith(directory + "/b.txt")


def test_jsonl_keeps_unicode_line_separators(write):
    line = json.dumps({"text": "one\u2028two\u0085three"}, ensure_ascii=False)
    source = open_source(write("a.jsonl", f"\n{line}\n\n{line}"))
    assert read(source) == [{"text": "one\u2028two\u0085three"}] * 2
    assert source.where(0).endswith("line 2") and source.where(1).endswith("line 4")


def test_jsonl_rows_equal_json(shared_data):
    path = shared_data / "gsm8k" / "test.jsonl"
    expected = read_rows(path)
    assert read(open_source(str(path))) == expected and len(expected) == 1319


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "one", "n": 1}, {"text": "zwei \u00fc", "n": 2}, {"text": "", "n": None}]
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read(open_source(path)) == rows


def test_tables_in_several_files(write, tmp_path):
    """CSV and TSV are what `csv` reads; a directory of files of one kind is one source."""
    import pyarrow
    import pyarrow.parquet

    write("csv/a.csv", 'text,n\n"one, two",1\n')
    write("csv/b.tsv", "text\tn\nthree\t2\n")
    write("csv/README.md", "not data")
    source = open_source(str(tmp_path / "csv"))
    assert read(source) == [{"text": "one, two", "n": "1"}, {"text": "three", "n": "2"}]
    assert source.where(1) == f"{tmp_path}/csv/b.tsv, line 2"
    paths = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    for i, path in enumerate(paths):
        pyarrow.parquet.write_table(pyarrow.table({"text": [str(i)]}), path)
    assert read(open_source(paths)) == [{"text": "0"}, {"text": "1"}]
    pyarrow.parquet.write_table(pyarrow.table({"other": [0]}), paths[1])
    refused("and 1 more: unlike columns.*: 'other', 'text'", open_source, paths, error=DataError)
    # Another order of columns, and types of other widths.
    text, more = pyarrow.array(["0"]).dictionary_encode(), pyarrow.array(["1"], "large_string")
    tables = {"text": text, "n": pyarrow.array([1], "int32")}, {"n": [2], "text": more}
    for path, table in zip(paths, tables, strict=True):
        pyarrow.parquet.write_table(pyarrow.table(table), path)
    assert read(open_source(paths)) == [{"text": "0", "n": 1}, {"text": "1", "n": 2}]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["b"], "n": ["x"]}), paths[1])
    refused("unlike columns .*Field n", open_source, paths, error=DataError)


def test_cells_of_any_length_and_marks_that_are_text(write):
    before = csv.field_size_limit()
    assert len(open_source(write("long.csv", f"a,b\n{'x' * 200_000},1\n"))[0]["a"]) == 200_000
    assert csv.field_size_limit() == before
    source = open_source(write("marks.tsv", 'a\tb\r\n"it\t\r\n\u2028""\t"is"\r\n'))
    assert read(source) == [{"a": '"it', "b": ""}, {"a": '\u2028""', "b": '"is"'}]


def test_folders_that_datasets_saved(tmp_path, write):
    import datasets

    rows = [{"text": "one"}, {"text": "two"}]
    parts = {name: datasets.Dataset.from_list(rows[:n]) for name, n in (("train", 2), ("test", 1))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    folder = str(tmp_path / "saved")
    assert read(open_source(folder)) == read(open_source(f"{folder}/train")) == rows
    assert read(open_source(folder, split="test")) == rows[:1]
    with pytest.raises(DataError, match="no split 'validation'; splits seen: train, test:"):
        open_source(folder, split="validation")
    chunks = plan_chunks(find_inputs(folder), Layout())
    assert [text for chunk in chunks for text in read_chunk(chunk, Layout())] == ["one", "two"]
    state = tmp_path / "saved" / "test" / "state.json"
    state.write_text(state.read_text()[:20])
    with pytest.raises(DataError, match="test: not a readable data set of save_to_disk") as caught:
        open_source(f"{folder}/test")
    assert "\n" not in str(caught.value)


def test_hub_name_config_split_revision(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_list([{"question": "q", "answer": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source("openai/gsm8k:main", split="test", revision="abc")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "revision": "abc"})]
    assert read(source) == [{"question": "q", "answer": "a"}]


def test_hub_offline_is_one_line_with_the_way_out(monkeypatch):
    import datasets
    import huggingface_hub

    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    refused("'nobody/nothing'.*give a local", open_source, "nobody/nothing", error=DataError)


def test_without_a_name_server_the_hub_is_not_retried(monkeypatch):
    import datasets
    import huggingface_hub

    def unresolved(*_):
        raise hub.socket.gaierror("no such name")

    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.socket, "getaddrinfo", unresolved)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    with hub._offline_without_network():
        assert datasets.config.HF_HUB_OFFLINE and huggingface_hub.constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE and not huggingface_hub.constants.HF_HUB_OFFLINE


BROKEN = [
    ("empty.txt", b"", "empty.txt: the file is empty"),
    ("empty.jsonl", b"", "empty.jsonl: the file is empty"),
    ("blank.jsonl", b"\n \n", "no JSON objects"),
    ("latin.txt", b"caf\xe9 au lait", r"latin.txt: not UTF-8: byte 0xe9 at offset 3"),
    ("latin.jsonl", b'{"text": "caf\xe9"}', r"not UTF-8: byte 0xe9 at offset 13"),
    ("cut.jsonl", b'{"a": 1}\n\n{"a": \n{"a": 3}\n', r"cut.jsonl, line 3: not JSON"),
    ("deep.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "deep.jsonl, line 2: not JSON"),
    ("long.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "long.jsonl, line 1: not JSON .Exceeds"),
    ("list.jsonl", b'{"a": 1}\n[1, 2]\n', r"list.jsonl, line 2: list, but"),
    ("bad.parquet", b"PAR1 no table", r"bad.parquet: not a readable parquet"),
    ("table.csv", b"a,b\n", "table.csv: a header and no rows"),
    ("short.csv", b"a,b\n1,2\n\n3\n", "short.csv, line 4: 1 columns, the header has 2"),
    ("quote.csv", b'a,b\n1,"2\n', "quote.csv, line 2: not CSV"),
    ("index.csv", b",a\n0,1\n", r"index.csv, line 1: the column name '' is empty.*index=False"),
    ("twice.csv", b"a,b,a\n0,1,2\n", "twice.csv, line 1: the column name 'a' is empty or dupl"),
    ("cut.tsv", b'a\tb\n"1\n2"\t3\n', "cut.tsv, line 2: 1 columns, .*; quoting is not supported"),
    ("some.tsv", b'a\tb\n"1 ""x"""\t2\n', r"some.tsv, line 2: .* is quoted; quoting is not.*csv"),
    ("all.tsv", b'"a"\t"b"\n"1"\t"2"\n', "all.tsv, line 1: '\"a\"' is quoted"),
    ("blank.tsv", b"\n\r\n", "blank.tsv: a header and no rows"),
    ("page.html", b"<p>", r"page.html: unknown kind of data '.html'; known: .txt"),
]


@pytest.mark.parametrize("name, content, message", BROKEN, ids=[name for name, *_ in BROKEN])
def test_broken_files(write, name, content, message):
    refused(message, open_source, write(name, content), error=DataError)


def test_paths_that_lead_nowhere(write, tmp_path):
    for path, message in [
        (str(tmp_path / "none.txt"), "none.txt: no such file"),
        (str(tmp_path / "none"), "no such file, and not the form of a hub name"),
        (write("images/a.png", b"").removesuffix("/a.png"), "a directory without .txt, "),
        ("", "no data: path is ''"),
        ((), "no data"),
        ((write("a.txt", "x"), write("a.jsonl", "{}")), "several kinds"),
    ]:
        refused(message, open_source, path, error=DataError)


def test_tasks_are_discovered():
    assert {"text", "jsonl", "gsm8k"} <= set(tasks())
    assert all(task.name == name for name, task in tasks().items())
    words = r"unknown task 'gsm8', did you mean 'gsm8k'\?.*Known: alpaca, glue_cola"
    refused(words, get_task, "gsm8", error=DataError)
    words = r"unknown task '\?\?'. Known: alpaca, glue_cola, glue_mnli, glue_mr"
    refused(words, get_task, "??", error=DataError)


def test_gsm8k_form():
    example = get_task("gsm8k").example({"question": "How?", "answer": "So. #### 3"}, Fields())
    assert example.prompt + example.target == "Question: How?\nAnswer: So. #### 3"
    assert example.target == " So. #### 3"


@pytest.mark.parametrize(
    "record, prompt, response",
    [
        ({"prompt": "p ", "response": "r"}, "p ", "r"),
        ({"prompt": "p", "completion": " c"}, "p", " c"),
        ({"instruction": "i", "input": "x", "output": "o", "answer": "B"}, "i\nx\n", "o"),
        ({"instruction": "i", "input": "", "output": "o"}, "i\n", "o"),
        ({"instruction": "i", "output": "o"}, "i\n", "o"),
        ({"question": "q", "answer": "a"}, "q\n", "a"),
    ],
)
def test_jsonl_pairs(record, prompt, response):
    assert get_task("jsonl").example(record, Fields())[:2] == (prompt, response)


def test_jsonl_named_fields_are_verbatim():
    fields = Fields(prompt="ask", response="say")
    record = {"ask": "1+1=", "say": "2", "prompt": "no", "response": "no"}
    assert get_task("jsonl").example(record, fields)[:2] == ("1+1=", "2")
    with pytest.raises(DataError, match="name both or neither"):
        get_task("jsonl").example(record, Fields(prompt="ask"))


@pytest.mark.parametrize(
    "task, record, message",
    [
        ("gsm8k", {"question": "q", "solution": "s"}, "'answer'; fields seen: question, solution"),
        ("text", {"body": "b"}, "no field 'text'; fields seen: body"),
        ("text", {"text": None}, "'text' is NoneType"),
        ("text", {"text": ["a"]}, "'text' is list"),
        ("jsonl", {"ask": "a"}, "fields seen: ask; known pairs: prompt/response"),
        ("jsonl", {}, "fields seen: none"),
    ],
)
def test_unreadable_records(task, record, message):
    refused(message, get_task(task).example, record, Fields(), error=DataError)


def test_imports_stay_light(shared_data):
    """Reading local text and JSONL needs neither `datasets` nor grain nor `transformers`."""
    code = f"""
import sys
import ffn_heterogeneity.data.pipeline, ffn_heterogeneity.data.windows
from ffn_heterogeneity.data.sources import open_source
from ffn_heterogeneity.data.tasks import get_task
open_source({str(shared_data / "gsm8k" / "test.jsonl")!r}); get_task("text")
heavy = {{"datasets", "grain", "transformers", "tokenizers", "pyarrow", "torch"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
