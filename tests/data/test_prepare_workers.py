"""The thread or the processes that make shards: how they fail, stop and are interrupted."""

import threading
from pathlib import Path

import pytest
from prepare_tools import Slow, settings

from ffn_heterogeneity.data.corpus import corpora, prepare_workers
from ffn_heterogeneity.data.corpus.corpora import find_inputs, plan_chunks
from ffn_heterogeneity.data.corpus.documents import Layout
from ffn_heterogeneity.data.corpus.prepare import prepare
from ffn_heterogeneity.data.corpus.tokenise import Tokeniser
from ffn_heterogeneity.data.sources import DataError


def test_a_failing_process_ends_all_with_its_error(corpus, tmp_path):
    lines = Path(corpus[0]).read_text().splitlines(keepends=True)
    Path(corpus[0]).write_text("".join(lines[:30] + ['{"txt": ""}\n'] + lines[30:]))
    with pytest.raises(DataError, match="a.jsonl, line 31: no field 'text'; fields seen: txt"):
        prepare(corpus, Slow(), tmp_path / "out", settings=settings(), processes=2)
    assert not list((tmp_path / "out").glob(".*"))


def test_a_worker_that_is_told_to_stop_does(corpus, characters, tmp_path):
    chunks = plan_chunks(find_inputs(corpus), Layout(chunk_bytes=2000))
    worker = prepare_workers.Worker(Tokeniser(characters(), settings()), tmp_path, [0, 0, 1])
    with pytest.raises(prepare_workers.Stopped):
        worker(chunks[0])
    assert not list(tmp_path.glob("*.tokens"))


def test_one_process_hashes_where_ctrl_c_reaches_it(characters, tmp_path, monkeypatch):
    """A thread would hash a large file to its end first."""
    seen, fingerprint = [], corpora.fingerprint

    def watched(*given):
        seen.append(threading.current_thread() is threading.main_thread())
        return fingerprint(*given)

    monkeypatch.setattr(corpora, "fingerprint", watched)
    (tmp_path / "text.txt").write_text("some text")
    prepare(str(tmp_path / "text.txt"), characters(), tmp_path / "out", settings=settings())
    assert seen == [True]
