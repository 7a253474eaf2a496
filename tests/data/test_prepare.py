"""Corpora to shards: the same for any number of processes and after a stop; errors."""

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from prepare_tools import Slow, contents, documents_of, expected, read_chunk, settings, texts
from tiny_runs import refused

from ffn_heterogeneity.data.corpus import corpora
from ffn_heterogeneity.data.corpus import documents as documents_reader
from ffn_heterogeneity.data.corpus.corpora import find_inputs, plan_chunks
from ffn_heterogeneity.data.corpus.documents import Layout, hub
from ffn_heterogeneity.data.corpus.prepare import claim, prepare
from ffn_heterogeneity.data.corpus.shards import open_corpus
from ffn_heterogeneity.data.corpus.tokenise import Settings
from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError

REPOSITORY = Path(__file__).resolve().parents[2]


def test_one_and_three_processes_write_the_same_bytes(corpus, bpe, tmp_path):
    one = prepare(corpus, bpe, tmp_path / "one", name="tiny", settings=settings())
    three = prepare(corpus, bpe, tmp_path / "three", name="tiny", settings=settings(), processes=3)
    assert one == three and contents(tmp_path / "one") == contents(tmp_path / "three")
    assert len(one["shards"]) > 4 and one["dtype"] == "uint16"
    assert not (tmp_path / "three" / "progress").exists()
    documents = documents_of(tmp_path / "one")
    assert documents == expected(corpus, bpe, bpe.eos_token_id)
    assert one["tokens"] == sum(map(len, documents)) and one["documents"] == 87
    assert one["empty_documents"] == 3 and one["tokenizer"]["name"] == "tiny"
    assert [entry["path"] for entry in one["inputs"]] == corpus
    assert [entry["bytes"] for entry in one["inputs"]] == [os.path.getsize(p) for p in corpus]


def test_ids_beyond_uint16(corpus, characters, tmp_path):
    manifest = prepare(corpus, characters(), tmp_path, settings=settings(eos=False))
    assert manifest["dtype"] == "uint32" and manifest["policy"]["eos_id"] is None
    assert documents_of(tmp_path) == [ids[:-1] for ids in expected(corpus, characters())]


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from ffn_heterogeneity.data.corpus.prepare import prepare
from prepare_tools import Slow, settings

if __name__ == "__main__":
    prepare({paths!r}, Slow(), {out!r}, settings=settings(), processes={processes})
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed(corpus, characters, tmp_path, processes):
    manifest = prepare(corpus, characters(), tmp_path / "whole", settings=settings())
    out = tmp_path / "killed"
    script = tmp_path / "killed.py"
    tests = str(Path(__file__).parent)
    script.write_text(KILLED.format(tests=tests, paths=corpus, out=str(out), processes=processes))
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": path})
    for _ in range(3000):
        if len(list(out.glob("progress/shard-*.json"))) >= 3:
            break
        assert child.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = {path.stem: None for path in out.glob("progress/shard-*.json")}
    assert 3 <= len(done) < len(manifest["shards"])
    refused("unfinished: run the same command again", open_corpus, out, error=DataError)
    (out / ".shard-000000.0123abcd.partial.tokens").write_bytes(b"half")
    before = {name: (out / f"{name}.tokens").stat() for name in done}
    calls = characters()
    prepare(corpus, calls, out, settings=settings())
    for name, stat in before.items():  # not made again
        again = (out / f"{name}.tokens").stat()
        assert (again.st_ino, again.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert contents(out) == contents(tmp_path / "whole")


def test_again_on_a_finished_directory(corpus, characters, tmp_path):
    manifest = prepare(corpus, characters(), tmp_path, settings=settings())
    first = contents(tmp_path)
    tokenizer = characters()
    before = tokenizer.calls
    assert prepare(corpus, tokenizer, tmp_path, name="other", settings=settings()) == manifest
    assert tokenizer.calls - before < 40  # only checked, nothing tokenised
    # Only the damaged shard and the missing one are made again.
    names = [f"{entry['name']}.tokens" for entry in manifest["shards"]]
    (tmp_path / names[1]).write_bytes(b"\0" * len(first[names[1]]))
    (tmp_path / names[3].replace("tokens", "documents")).unlink()
    stat = (tmp_path / names[0]).stat()
    prepare(corpus, characters(), tmp_path, settings=settings())
    assert contents(tmp_path) == first
    assert (tmp_path / names[0]).stat().st_mtime_ns == stat.st_mtime_ns
    open_corpus(tmp_path)


def test_another_corpus_is_not_written_over(corpus, characters, bpe, tmp_path):
    prepare(corpus, characters(), tmp_path, settings=settings())
    for args, more, message in (
        ((corpus, bpe), {}, "fingerprint was"),
        ((corpus, characters(eos=5)), {}, "eos_id was 2, is 5"),
        ((corpus, characters()), {"eos": False}, "eos_id was 2, is None"),
        ((corpus, characters()), {"chunk_bytes": 99}, "chunk_bytes was 2000, is 99"),
        ((corpus[:1], characters()), {}, "other inputs: .*b.jsonl"),
        ((corpus[::-1], characters()), {}, "other inputs: another order"),
    ):
        with pytest.raises(DataError, match=f"holds other shards .*{message}.*remove this one"):
            prepare(*args, tmp_path, settings=settings(**more))
    Path(corpus[1]).write_text('{"text": "changed"}\n')
    with pytest.raises(DataError, match="other inputs: .*b.jsonl"):
        prepare(corpus, characters(), tmp_path, settings=settings())


def test_a_refused_plan_leaves_a_stopped_runs_progress(corpus, characters, tmp_path):
    """A run stopped before its first shard left only the plan, which must not be removed."""
    entry = prepare(corpus, characters(), tmp_path / "whole", settings=settings())
    plan = {key: entry[key] for key in ("tokenizer", "policy", "settings", "inputs")}
    out = tmp_path / "stopped"
    claim(out, plan, np.dtype(entry["dtype"]))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert [path.name for path in before] == ["plan.json"]
    with pytest.raises(DataError, match="holds other shards .*chunk_bytes"):
        prepare(corpus, characters(), out, settings=settings(chunk_bytes=99))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    prepare(corpus, characters(), out, settings=settings())
    assert contents(out) == contents(tmp_path / "whole")


def test_documents_the_tokenizer_drops_are_empty_ones(write, tmp_path):
    class Dropping(Slow):
        def encode(self, text, add_special_tokens=True):
            return [] if "drop" in text else super().encode(text, add_special_tokens)

    path = write("a.jsonl", [{"text": text} for text in ("whale", "drop me", "sea", "drop")])
    manifest = prepare([path], Dropping(), tmp_path, settings=settings())
    assert (manifest["documents"], manifest["empty_documents"]) == (2, 2)
    assert len(documents_of(tmp_path)) == 2
    with pytest.raises(DataError, match="2 documents, all of them empty"):
        only = write("b.jsonl", [{"text": "drop"}, {"text": "drop it"}])
        prepare([only], Dropping(), tmp_path / "nothing", settings=settings())


def test_what_training_reads_is_what_the_text_task_reads(shared_data, bpe, write, tmp_path):
    """On real text, the batches equal those of task "text", which tokenises while it reads."""
    lines = (shared_data / "fineweb_edu" / "train.jsonl").read_text().splitlines(keepends=True)
    path = write("part.jsonl", "".join(lines[:40]))
    prepare(path, bpe, tmp_path, settings=settings(50_000, passage_chars=1 << 30))
    for bos in ("segment", "document", "none"):
        common = {"shuffle": False, "bos": bos}
        places = (("text", path), ("tokens", str(tmp_path)))
        configs = [{"task": task, "path": where, **common} for task, where in places]
        texts, tokens = (make_pipeline(config, bpe, 4, 128, 0) for config in configs)
        batches = zip(texts.train_iterator(1), tokens.train_iterator(1), strict=True)
        for number, (first, second) in enumerate(batches):
            for key in first:
                np.testing.assert_array_equal(first[key], second[key], f"{bos} {number} {key}")
        assert number > 50


def pieces_of(paths, **layout):
    layout = Layout(**layout)
    chunks = plan_chunks(find_inputs(paths), layout)
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    return chunks, list(itertools.chain(*(read_chunk(chunk, layout) for chunk in chunks)))


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 10**9])
def test_no_document_is_lost_or_cut_at_the_ends_of_chunks(write, size, monkeypatch):
    # Separators cross the ends of the blocks that are read.
    monkeypatch.setattr(documents_reader, "BLOCK", 5)
    documents = texts(30, seed=3)
    lines = [{"text": text} for text in documents]
    chunks, actual = pieces_of(write("a.jsonl", lines), chunk_bytes=size)
    assert actual == documents
    assert len(chunks) == (1 if size == 10**9 else len(chunks)) and (size > 7 or len(chunks) == 30)
    for separator, name in (("<|endoftext|>", "<|endoftext|>"), ("\n\n", "blank_line")):
        documents = [text.replace("\n", " ") for text in documents]
        path = write("a.txt", separator.join(documents))
        chunks, actual = pieces_of(path, chunk_bytes=size, separator=name)
        wanted = [text.strip("\n") for text in documents if text.strip()]
        assert [text for text in actual if text.strip()] == wanted


def test_blank_lines_lines_and_whole_files(write):
    path = write("a.txt", "\ufeffone\n\n\n\ntwo\nlines\n\n\nthree\n")
    for separator, pieces in (
        ("blank_line", ["one", "two\nlines", "three"]),
        ("line", ["one", "two", "lines", "three"]),
        ("", ["one\n\n\n\ntwo\nlines\n\n\nthree\n"]),
    ):
        for size in (1, 6, 100):
            _, documents = pieces_of(path, chunk_bytes=size, separator=separator)
            assert documents == pieces, "none is empty, wherever the file is cut"


def test_line_ends_that_hide_the_separator(write):
    path = write("crlf.txt", "one\r\n\r\ntwo\r\n")
    for separator in ("blank_line", "line"):
        layout = Layout(separator=separator)
        chunks = corpora.plan_chunks(corpora.find_inputs(path), layout)
        with pytest.raises(DataError, match="its lines end in CRLF"):
            [text for chunk in chunks for text in read_chunk(chunk, layout)]


def test_parquet_by_row_groups_and_small_files_share_a_chunk(write, tmp_path):
    import pyarrow
    import pyarrow.parquet

    documents = texts(50)
    table = pyarrow.table({"id": list(range(50)), "body": documents})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=8)
    chunks, actual = pieces_of(str(tmp_path / "a.parquet"), text_field="body", chunk_bytes=1)
    assert actual == documents and len(chunks) == 7
    for i in range(5):
        write(f"many/{i}.txt", f"document {i}")
    write("many/.hidden.txt", "no")
    write("many/deep/9.txt", "document 9")
    chunks, actual = pieces_of(str(tmp_path / "many"), chunk_bytes=22)
    assert actual == [f"document {i}" for i in (0, 1, 2, 3, 4, 9)]
    assert [len(chunk.pieces) for chunk in chunks] == [2, 2, 2]
    _, actual = pieces_of(str(tmp_path / "many" / "[0-2].txt"))
    assert actual == ["document 0", "document 1", "document 2"]


def test_long_documents_are_tokenised_in_passages(write, characters, tmp_path):
    text = "\n\n".join(texts(40))
    prepare(write("a.txt", text), characters(), tmp_path, settings=settings(passage_chars=100))
    (document,) = documents_of(tmp_path)
    assert document == characters().encode(text, add_special_tokens=False) + [2]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", [{"text": "x"}, {"body": "y"}], "a.jsonl, line 2: no field 'text'; fields see"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": 3}\n', "line 3: field 'text' is int"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "line 2: list, but each line must be one JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "not UTF-8: byte 0xff at offset 24"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: .*half a surrogate pair"),
        ("a.jsonl", [{"text": " "}, {"text": ""}], "2 documents, all of them empty"),
        ("a.txt", b"caf\xe9", "a.txt: not UTF-8: byte 0xe9 at offset 3"),
        ("a.txt", b"", "a.txt: the file is empty"),
        ("a.parquet", b"PAR1 no", "not a readable parquet file"),
        ("a.csv", b"a,b", "documents are read from .* files, not csv"),
        ("a.html", b"a,b", "unknown kind of data '.html'"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [5, 10**6])
def test_bad_input(write, characters, tmp_path, name, content, message, chunk_bytes):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=message) as caught:
        prepare(write(name, content), characters(), out, settings=settings(chunk_bytes))
    assert "\n" not in str(caught.value) and not (out / "manifest.json").exists()
    if list(out.glob("shard-*.tokens")):  # complete shards stay for the next run
        assert (out / "progress" / "plan.json").exists() and not list(out.glob(".*"))
    else:
        assert not out.exists()


@pytest.mark.parametrize(
    "row", ['{"text": "x", "b": ' + "[" * 100_000, '{"text": ' + "9" * 5000 + "}"]
)
def test_a_mended_command_may_run_in_the_same_directory(write, characters, tmp_path, row):
    write("a.jsonl", f'{{"text": "x"}}\n{row}\n'.encode())
    with pytest.raises(DataError, match="a.jsonl, line 2: not JSON"):
        prepare(str(tmp_path / "a.jsonl"), characters(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write("a.jsonl", b'{"text": "x"}\n')
    assert prepare(str(tmp_path / "a.jsonl"), characters(), tmp_path / "out")["documents"] == 1


def test_a_document_longer_than_memory_streams_and_ends_at_the_limit(characters, tmp_path):
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        for _ in range(200):
            file.write(b"the whale " * 100_000)  # 200 MB in all, 0.4 packed
    tracemalloc.start()
    given = (str(tmp_path / "a.txt.gz"), characters(), tmp_path / "out")
    manifest = prepare(*given, settings=settings(max_tokens=9))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert manifest["documents"] == 1 and 9 <= manifest["tokens"] < 20_000 and peak < 30 << 20


def test_a_line_without_end_is_refused_by_its_number(characters, tmp_path, monkeypatch):
    monkeypatch.setattr(documents_reader, "MAX_LINE", 2 << 20)
    good = json.dumps({"text": "a" * (1 << 20)})
    (tmp_path / "a.jsonl").write_text(f'{good}\n\n{good}\n{{"text": "{"bé" * (3 << 19)}"}}\n')
    with pytest.raises(DataError, match="a.jsonl, line 4: a line of more than 2 MB"):
        prepare(str(tmp_path / "a.jsonl"), characters(), tmp_path / "out", settings=settings(10**8))


def test_a_long_document_of_spaces_is_an_empty_one(write, characters, tmp_path):
    path = write("a.jsonl", [{"text": "one"}, {"text": " \n" * 600}, {"text": "two " * 300}])
    manifest = prepare(path, characters(), tmp_path / "out", settings=settings(passage_chars=100))
    assert manifest["documents"] == 2 and manifest["empty_documents"] == 1
    one, two = documents_of(tmp_path / "out")
    assert one == characters().encode("one", False) + [2]
    assert two == characters().encode("two " * 300, False) + [2]
    path = write("b.txt", " " * 1000)
    with pytest.raises(DataError, match="1 documents, all of them empty"):
        prepare(path, characters(), tmp_path / "none", settings=settings(passage_chars=100))
    assert not (tmp_path / "none").exists()


def test_inputs_that_lead_nowhere(write, characters, tmp_path):
    file = write("a.txt", "x")
    write("mixed/a.txt", "x")
    write("mixed/a.jsonl", [{"text": "x"}])
    write("pictures/a.png", b"x")
    for spec, message in (
        ("", "no input"),
        (f"{file},", "no input"),
        (f"{file},{file}", "named more than once"),
        (str(tmp_path / "none.txt"), "none.txt: no such file"),
        (str(tmp_path / "*.jsonl"), "no file is named so"),
        (str(tmp_path / "mixed"), "files of several kinds .*choose with a glob"),
        (str(tmp_path / "pictures"), "a directory without .txt"),
    ):
        refused(message, find_inputs, spec, error=DataError)
    with pytest.raises(DataError, match="processes=0"):
        prepare(file, characters(), tmp_path / "out", processes=0)
    with pytest.raises(DataError, match="no eos token; set eos=False"):
        prepare(file, characters(eos=None), tmp_path / "out")


def test_folders_named_like_files_are_looked_into(write, tmp_path):
    inner = write("spark/x.jsonl/part-0.jsonl", [{"text": "x"}])
    assert find_inputs(str(tmp_path / "spark")) == [(inner, "jsonl")]


def test_hub_data_sets(characters, tmp_path, monkeypatch):
    import datasets

    documents = texts(25)
    data = datasets.Dataset.from_dict({"text": documents})
    asked = []

    def load_dataset(name, config, split, revision):
        asked.append((name, config, split, revision))
        return data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(corpora, "HUB_ROWS", 10)
    hub.cache_clear()
    layout = Layout(split="validation", revision="v2")
    manifest = prepare("owner/name:part", characters(), tmp_path, settings=Settings(layout))
    hub.cache_clear()
    assert set(asked) == {("owner/name", "part", "validation", "v2")}
    assert len(manifest["shards"]) == 3 and len(documents_of(tmp_path)) == 25
    assert manifest["inputs"][0]["path"] == "owner/name:part[validation]"
    assert manifest["inputs"][0]["rows"] == 25 and manifest["inputs"][0]["fingerprint"]
