"""Files are complete or absent, and leftovers of killed processes are removed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import LLAMA, no_file_beyond, random_params

from ffn_heterogeneity.io.files import atomic_path, write_json
from ffn_heterogeneity.io.gguf.export import save_gguf

WRITER = """
import sys, time
from ffn_heterogeneity.io.files import atomic_path, write_json
with atomic_path(sys.argv[1] + "/model", directory=True) as a, \\
     atomic_path(sys.argv[1] + "/model.gguf") as b:
    (a / "half").write_text("x")
    b.write_text("x")
    print("writing", flush=True)
    time.sleep(600)
"""
# Files that a user may have.
THEIRS = (".model.partial", ".model.0123abcd.partial.txt", ".model.0123ABCD.partial", ".other.old")
THEIRS += (".model.0123abcd", "model.0123abcd.partial", ".other.0123abcd.partial")


def write(folder: Path) -> None:
    with atomic_path(folder / "model", directory=True) as temporary:
        (temporary / "weights").write_text("whole")
    with atomic_path(folder / "model.gguf") as temporary:
        temporary.write_text("whole")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_killed_writer_s_files_go_a_living_one_s_stay(tmp_path):
    for name in THEIRS:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".model.0123abcd.old").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "writing\n"
        live = names(tmp_path) - {*THEIRS, ".model.0123abcd.old"}
        assert len(live) == 2
        write(tmp_path)
        assert names(tmp_path) == {*THEIRS, *live, "model", "model.gguf"}
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert live < names(tmp_path)
    write(tmp_path)
    assert names(tmp_path) == {*THEIRS, "model", "model.gguf"}
    assert (tmp_path / "model" / "weights").read_text() == "whole"


def test_two_at_once_in_one_process(tmp_path):
    with atomic_path(tmp_path / "a.txt") as first, atomic_path(tmp_path / "a.txt") as second:
        first.write_text("1"), second.write_text("2")
        assert len(names(tmp_path)) == 2
    assert names(tmp_path) == {"a.txt"} and (tmp_path / "a.txt").read_text() == "1"


def test_an_error_leaves_nothing_and_the_former_file(tmp_path):
    write(tmp_path)
    for name, directory in (("model", True), ("model.gguf", False)):
        with pytest.raises(KeyError), atomic_path(tmp_path / name, directory=directory):
            raise KeyError
    assert names(tmp_path) == {"model", "model.gguf"} and (tmp_path / "model/weights").exists()


def test_a_full_disk_names_the_file(tmp_path):
    said = "File too large: '.*/m.gguf'$"
    with pytest.raises(OSError, match=said), no_file_beyond(1000):
        save_gguf(LLAMA, random_params(LLAMA), tmp_path / "m.gguf", type="f32")
    assert not names(tmp_path)
    broken = ConnectionResetError(104, "Connection reset by peer")  # does not belong to the file
    with pytest.raises(OSError, match="by peer$"), atomic_path(tmp_path / "m.gguf"):
        raise broken


def test_a_gguf_file_after_a_kill(tmp_path):
    (tmp_path / ".m.0123abcd.partial.gguf").write_text("half")
    save_gguf(LLAMA, random_params(LLAMA), tmp_path / "m.gguf", type="f32")
    assert names(tmp_path) == {"m.gguf"}


def test_links_and_pipes_under_a_temporary_name(tmp_path):
    """A link is removed, its target stays; a FIFO is not waited for."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "kept").write_text("x")
    (tmp_path / ".a.01234567.partial.json").symlink_to(tmp_path / "far")
    (tmp_path / ".a.11234567.partial.json").symlink_to("/dev/zero")
    (tmp_path / ".a.21234567.partial.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / ".a.31234567.partial.json")
    write_json(tmp_path / "a.json", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "far"}
    assert (tmp_path / "far" / "kept").exists()
