"""`make docs`: the site builds without a warning or the network; broken pages stop it."""

import sys
import zlib

import pytest
from tiny_models import REPOSITORY
from tiny_runs import run_program

import ffn_heterogeneity as fh

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sphinx")]
OFFLINE = """import socket
def refuse(*given):
    raise OSError("a site is built without the network")
socket.socket.connect = socket.getaddrinfo = refuse
"""


def build(pages, out, tmp_path):
    (tmp_path / "offline").mkdir(exist_ok=True)
    (tmp_path / "offline" / "sitecustomize.py").write_text(OFFLINE)
    flags = ["-q", "-n", "-W", "--keep-going", "-c", str(REPOSITORY / "docs")]
    command = [sys.executable, "-m", "sphinx", *flags, pages, out]
    return run_program(*command, PYTHONPATH=str(tmp_path / "offline"))


def test_it_builds_whole(tmp_path):
    out = tmp_path / "site"
    done = build(REPOSITORY / "docs", out, tmp_path)
    assert done.code == 0 and not done.err, done.err
    for page in (REPOSITORY / "docs").rglob("*.md"):
        assert (out / page.relative_to(REPOSITORY / "docs").with_suffix(".html")).exists()
    inventory = (out / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    face = {f"ffn_heterogeneity.{name}" for name in fh._FACE}
    assert face <= documented and "ffn_heterogeneity.losses.terms.LossTerm" in documented
    assert "ffn_heterogeneity.losses.TERMS" in documented
    for page, registry in (("surgery", fh.surgery.SURGERIES), ("losses", fh.losses.TERMS)):
        text = (out / "reference" / f"{page}.html").read_text()
        assert [name for name in registry if name not in text] == []
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "-m sphinx -E -q -n -W --keep-going docs build/docs" in makefile


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[A page](gone.md)", "gone.md"),
        ("[A heading](#gone)", "gone"),
        ("![A picture](gone.png)", "gone.png"),
        ("{py:func}`ffn_heterogeneity.load_modle`", "load_modle"),
        ("```{eval-rst}\n.. autofunction:: ffn_heterogeneity.gone\n```", "gone"),
        ("```{eval-rst}\n.. automodule:: ffn_heterogeneity.losses.gone\n```", "losses.gone"),
        ("```{toctree}\ngone\n```", "gone"),
    ],
)
def test_what_is_broken_stops_it(tmp_path, text, said):
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text("# Title\n\nWords.\n")
    assert build(pages, tmp_path / "whole", tmp_path).code == 0
    (pages / "index.md").write_text(f"# Title\n\n{text}\n")
    done = build(pages, tmp_path / "broken", tmp_path)
    assert done.code != 0 and said in done.err
