"""prepare_data on streams: packed files, hub data, limits; an interrupted run is resumed."""

import gzip
import json

import pytest
from prepare_tools import contents, documents_of, expected, settings, texts

from ffn_heterogeneity.data.corpus import corpora
from ffn_heterogeneity.data.corpus import documents as documents_reader
from ffn_heterogeneity.data.corpus.documents import Layout
from ffn_heterogeneity.data.corpus.prepare import prepare
from ffn_heterogeneity.data.corpus.tokenise import Settings
from ffn_heterogeneity.data.sources import DataError


@pytest.fixture
def hub(write, monkeypatch):
    """25 documents in two files, streamed by `datasets`; how often their rows were begun."""
    import datasets

    documents = texts(25)
    files = [write(f"{i}.jsonl", [{"text": x} for x in documents[i::2]]) for i in range(2)]
    begun = []

    def load_dataset_builder(name, config, revision):
        assert (name, config, revision) == ("owner/name", "part", "v2")
        builder = inner("json", data_files=files)
        stream = builder.as_streaming_dataset
        if known:
            splits = {"train": {"name": "train", "num_examples": 25}}
            builder.info.splits = datasets.SplitDict.from_split_dict(splits)

        class Counted:
            features = None  # in JSON they are unknown before it is read

            def __init__(self, data):
                self.data = data

            def __iter__(self):
                begun.append(1)
                return iter(self.data)

        builder.as_streaming_dataset = lambda split: Counted(stream(split=split))
        return builder

    inner, known = datasets.load_dataset_builder, []
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(corpora, "HUB_ROWS", 10)
    yield files, begun, known
    documents_reader.hub.cache_clear()


def of_hub(**limits):
    return Settings(Layout(revision="v2", stream=True, **limits))


def test_a_hub_stream_is_read_once_and_resumed(hub, characters, tmp_path, monkeypatch):
    files, begun, known = hub
    known.append(True)
    manifest = prepare("owner/name:part", characters(), tmp_path / "a", settings=of_hub())
    assert documents_of(tmp_path / "a") == expected(files, characters())
    assert len(begun) == 1 and [entry["documents"] for entry in manifest["shards"]] == [10, 10, 5]
    assert manifest["inputs"][0]["path"] == "owner/name:part[train]"

    class Stops(characters):
        def encode(self, text, add_special_tokens=True):
            if self.calls > 14:
                raise KeyboardInterrupt
            return super().encode(text, add_special_tokens)

    with pytest.raises(KeyboardInterrupt):
        prepare("owner/name:part", Stops(), tmp_path / "b", settings=of_hub())
    again = characters()
    assert prepare("owner/name:part", again, tmp_path / "b", settings=of_hub()) == manifest
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert again.calls < 20  # not the first shard again


def test_rows_of_a_stream_are_limited(hub, characters, tmp_path):
    files = hub[0]
    words = r"owner/name:part\[train\] does not say how many .*max_doc"
    with pytest.raises(DataError, match=words):
        prepare("owner/name:part", characters(), tmp_path, settings=of_hub())
    prepare("owner/name:part", characters(), tmp_path, settings=of_hub(max_documents=12))
    assert documents_of(tmp_path) == expected(files, characters())[:12]


def test_a_stream_that_breaks_is_one_line_and_goes_on(hub, characters, tmp_path, monkeypatch):
    files, begun, _ = hub
    layout = of_hub(max_documents=25)
    source = documents_reader.hub("owner/name:part", layout.layout)
    rows = iter(source._data)

    def broken():
        for number, row in enumerate(rows):
            if number == 13:
                raise ConnectionError("connection reset\nmore")
            yield row

    source._rows, source._at = broken(), 0
    words = r"name:part\[train\]'.*ConnectionError: connection reset\)"
    with pytest.raises(DataError, match=words):
        prepare("owner/name:part", characters(), tmp_path, settings=layout)
    prepare("owner/name:part", characters(), tmp_path, settings=layout)
    assert documents_of(tmp_path) == expected(files, characters())


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_packed_files_hold_what_the_others_do(write, characters, tmp_path, processes):
    from prepare_tools import Slow

    rows = {name: [{"text": x} for x in texts(30, i)] for i, name in enumerate("ab")}
    plain = [write(f"{name}.jsonl", file_rows) for name, file_rows in rows.items()]
    for path in plain:
        with open(path, "rb") as file:
            write(f"packed/{path[-7:]}.gz", gzip.compress(file.read()))
    options = {"settings": settings(), "processes": processes}
    prepare(plain, Slow(), tmp_path / "plain", **options)
    prepare(str(tmp_path / "packed"), Slow(), tmp_path / "out", **options)
    shards = [contents(tmp_path / name) for name in ("plain", "out")]
    for files in shards:
        del files["manifest.json"]
    assert len(shards[0]) > 8 and shards[0] == shards[1]
    for name, data, message in (
        ("c.jsonl.gz", gzip.compress(b"[1]\n" * 999)[:-9], "c.jsonl.gz: not a readable .gz"),
        ("d.jsonl.gz", b"no gzip", "d.jsonl.gz: not a readable .gz"),
        ("e.jsonl.gz", gzip.compress(b'{"text": "x"}\n{"body": 1}\n'), "gz, line 2: no field"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(write(name, data), characters(), tmp_path / "bad", settings=settings())


@pytest.mark.parametrize("limit", [{"max_documents": 25}, {"max_tokens": 2000}])
def test_limits_take_the_first_shards_whatever_the_processes(write, tmp_path, limit):
    from prepare_tools import Slow

    path = write("a.jsonl", [{"text": text} for text in texts(90)])
    unlimited = prepare(path, Slow(), tmp_path / "whole", settings=settings())
    written = []
    for processes in (1, 3) if "max_tokens" in limit else (1, 1):
        directory = tmp_path / str(processes)
        options = {"settings": Settings(Layout(chunk_bytes=2000, **limit)), "processes": processes}
        manifest = prepare(path, Slow(), directory, **options)
        entries, (key, least) = manifest["shards"], next(iter(limit.items()))
        assert entries == unlimited["shards"][: len(entries)] and len(entries) < len(
            unlimited["shards"]
        )
        counts = [entry[key.removeprefix("max_")] for entry in entries]
        assert sum(counts[:-1]) < least <= sum(counts)
        assert len(list(directory.glob("*.tokens"))) == len(entries)
        assert prepare(path, Slow(), directory, **options) == manifest
        written.append(contents(directory))
    assert written[0] == written[1]
    with pytest.raises(DataError, match="max_(tokens|documents) was .*, is None|was None"):
        prepare(path, Slow(), tmp_path / "1", settings=settings())
    assert json.loads(written[0]["manifest.json"])["documents"] == manifest["documents"]
