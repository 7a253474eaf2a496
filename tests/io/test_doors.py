"""Former weaknesses: archives, heads, pictures, values beyond a type's range, full disks."""

import dataclasses
import io
import json
import lzma
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from test_hostile import HOSTILE
from tiny_models import (
    LLAMA,
    byte_tokenizer,
    no_file_beyond,
    places,
    random_params,
    replaced,
    save_tiny,
    save_tiny_reader,
)
from tiny_runs import refused, write_rows

import ffn_heterogeneity as fh
from ffn_heterogeneity.data.glue import label_text
from ffn_heterogeneity.data.hub import HubSource
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.heads import with_head
from ffn_heterogeneity.io import runs
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.tokenizer_files import save_tokenizer
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.report.paper import _not_begun
from ffn_heterogeneity.surgery.calibration import WINDOW, read_rows
from ffn_heterogeneity.tree import flatten, unflatten
from ffn_heterogeneity.wording import as_text

# ---- archives

RESULTS = b'{"nll": 1.0}'


def member(name: str, content: bytes = RESULTS, **header) -> bytes:
    """A member of an archive; `header`: fields of tarfile.TarInfo, true or false."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in header.items():
        setattr(info, key, value)
    form = tarfile.PAX_FORMAT if info.pax_headers else tarfile.GNU_FORMAT
    return info.tobuf(form) + content + b"\0" * (-len(content) % 512)


def pax(**records: str) -> dict:
    return {"pax_headers": records}


END = b"\0" * 1024
GOOD = member("run/results.json")
XZ = lzma.compress(GOOD + END)
BAD = {
    # Some versions of Python seek back by that number, in an endless loop.
    "negative.tar": GOOD + member("run/config.json", size=-512) + END,
    "negative_long_name.tar": member("x", size=-512, type=tarfile.GNUTYPE_LONGNAME) + GOOD + END,
    "negative_pax.tar": member("run/rows.jsonl", **pax(size="-512")) + END,
    "cut.tar.xz": XZ[: len(XZ) // 2],
    "altered.tar.xz": XZ[:20] + bytes([XZ[20] ^ 255]) + XZ[21:],
    "cut.tar.gz": b"\x1f\x8b\x08\x00" + b"\0" * 6 + b"abc",
    "large.tar": member("run/results.json", size=200 << 30),
    # 96 MiB of a name that says it has 3 GiB, in a small file.
    "bomb.tar.xz": member("x", b"", size=3 << 30, type=tarfile.GNUTYPE_LONGNAME),
    "latin.tar": member("run/results.json", b"\xff") + END,
}


@pytest.mark.parametrize("name", BAD)
def test_archives_end_in_one_line(name, tmp_path, monkeypatch):
    path, content = tmp_path / name, BAD[name]
    if name == "bomb.tar.xz":
        packer = lzma.LZMACompressor(preset=0)
        zeros = bytes(1 << 20)
        content = packer.compress(content) + b"".join(packer.compress(zeros) for _ in range(96))
        content += packer.flush()
        monkeypatch.setattr(runs, "MAX_ARCHIVE", 64 << 20)
    path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"{name} is not a readable archive") as caught:
        fh.results(path)
    assert "\n" not in str(caught.value) and time.perf_counter() - start < 30
    assert ("wants more than 64 MB" in str(caught.value)) == (name == "bomb.tar.xz")


def test_what_an_archive_may_hold(tmp_path):
    """Links and names outside of the archive are not read; a long name is."""
    deep = "/".join(["folder"] * 30)
    path = tmp_path / "all.tar.xz"
    content = GOOD + member(f"{deep}/results.json", **pax(comment="x"))
    content += member("run/config.json", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
    path.write_bytes(lzma.compress(content + END))
    folders = dict(runs.folders(str(path), runs.READ))
    assert folders == dict.fromkeys(
        (str(path / "run"), str(path / deep)), {"results.json": RESULTS.decode()}
    )
    assert runs.read_text(f"{path}/run/results.json") == RESULTS.decode()


def test_links_between_folders_do_not_loop(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_bytes(RESULTS)
        for other in ("one", "two", "three"):
            (tmp_path / name / other).symlink_to(tmp_path)
    start = time.perf_counter()
    paths = [path for path, _ in runs.folders(str(tmp_path), runs.READ)]
    assert paths == [str(tmp_path / name) for name in ("a", "b")]
    assert time.perf_counter() - start < 5


def test_listings_of_sweeps(tmp_path):
    """With each value of sweep.json replaced, the names that are read are folders, in order."""
    valid = {
        "sweep": "s",
        "kind": "train",
        "config": "c",
        "points": [{"name": "a=1"}, {"name": "b"}],
    }
    path, refused = tmp_path / "sweep.json", 0
    for place in places(valid):
        for value in [*HOSTILE, "../x", "a/b", ".."]:
            bent = replaced(valid, place, value)
            path.write_text(json.dumps(bent))
            try:
                listing = runs.read_listing(path)
            except ValueError as error:
                assert "\n" not in str(error) and str(path) in str(error)
                refused += 1
                continue
            assert listing == bent
            assert all(name == Path(name).name for name in (x["name"] for x in listing["points"]))
            assert [*_not_begun([str(tmp_path)])] == [
                f"{tmp_path.name}/{one['name']}" for one in bent["points"]
            ]
    assert refused > 80


# ---- heads

SETTINGS = {"pooling": "p32", "outputs": 2, "task": "labels", "fields": [["text"]]}
SETTINGS |= {"labels": ["no", "yes"], "max_length": 16, "final_norm": "pooled", "problem": ""}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    root = tmp_path_factory.mktemp("head")
    model = load_model(save_tiny_reader(root / "reader"))
    import jax

    head = HeadConfig.of("classification", SETTINGS)
    config, params = with_head(model.config, model.params, head, jax.random.key(0))
    return save_pretrained(config, params, root / "saved", tokenizer=model.tokenizer)


def with_settings(classifier, folder, **changes):
    """A copy of the classifier's directory with other settings in config.json."""
    folder.mkdir()
    for file in classifier.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    values = json.loads((classifier / "config.json").read_text())
    values["ffn_heterogeneity"]["task_head"]["settings"] |= changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


LEAVES = [{"pooling": "average"}, {"pooling": "scalar_mix"}, {"outputs": 3, "labels": []}]
WRONG = [{"pooling": "mean"}, {"pooling": 3}, {"outputs": 0}, {"outputs": 2.5}, {"labels": "no"}]
WRONG += [{"labels": ["no"]}, {"labels": [1, 2]}, {"fields": "text"}, {"fields": [["a", "b", "c"]]}]
WRONG += [{"max_length": -1}, {"max_length": "x"}, {"task": 7}, {"depth": 2}, {"problem": "x"}]


@pytest.mark.parametrize("changes", [*LEAVES, *WRONG], ids=str)
def test_heads_fit_what_is_saved(classifier, tmp_path, changes):
    """A lambda of another length, or another pooling, would use other weights."""
    folder = with_settings(classifier, tmp_path / "bent", **changes)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    said = str(caught.value)
    assert str(folder) in said and "\n" not in said and "head" in said, said
    load_model(with_settings(classifier, tmp_path / "same"))


# ---- data


def test_pictures_are_not_opened(tmp_path):
    """An unused column has the path of a file of this machine, or a network address."""
    import datasets

    marker = tmp_path / "picture.png"
    rows = {"sentence": ["a", "b"], "label": [0, 1]}
    rows["image"] = [{"path": x, "bytes": None} for x in (str(marker), "http://0.0.0.0/x")]
    labels, image = datasets.ClassLabel(names=["no", "yes"]), {"bytes": datasets.Value("binary")}
    features = {"sentence": datasets.Value("string"), "label": labels}
    features |= {"image": image | {"path": datasets.Value("string")}}
    datasets.Dataset.from_dict(rows, datasets.Features(features)).save_to_disk(tmp_path / "saved")
    path = tmp_path / "saved/dataset_info.json"  # (the library itself would put the pictures in)
    values = json.loads(path.read_text())
    values["features"]["image"] = {"_type": "Image"}
    path.write_text(json.dumps(values))
    source = HubSource(str(tmp_path / "saved"), "train")
    assert [source[i]["sentence"] for i in range(2)] == ["a", "b"]
    assert source[0]["image"] == {"bytes": None, "path": str(marker)}
    source.by_name = True
    assert [source[i]["label"] for i in range(2)] == ["no", "yes"]


def test_half_a_surrogate_pair_is_no_label(tmp_path):
    refused("half a surrogate pair", label_text, "a\ud800", error=DataError)
    assert label_text("\U0001f600") == "\U0001f600"


def test_own_text_given_back_is_bounded(tmp_path):
    model = load_model(save_tiny(tmp_path / "tiny"))
    row = [model.config.bos_id, *[5] * WINDOW]
    assert len(read_rows(model, str(write_rows(tmp_path / "a.jsonl", [{"tokens": row}])))) == 1
    longer = write_rows(tmp_path / "b.jsonl", [{"tokens": [*row, 5]}])
    refused(r"b.jsonl, line 1: .*2 to 513 ids", read_rows, model, str(longer))


# ---- out

FORMS = [{}, {"export": "padded"}, {"export": "native"}, {"max_shard_bytes": 20_000}]


def large(value: float):
    """A model of finite weights with one large value, and the name of its tensor."""
    config = LLAMA.with_widths([8 + 4 * i for i in range(LLAMA.n_layers)])
    params = random_params(config)
    params["final_norm"]["scale"][2] = value
    return config, params


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype, value", [("float16", 1e5), ("bfloat16", 3.4e38)])
def test_finite_weights_stay_finite(tmp_path, form, dtype, value):
    config, params = large(-value)
    with pytest.raises(CheckpointError, match=rf"final_norm.*: -.* infinite in {dtype}") as e:
        save_pretrained(config, params, tmp_path / "out", dtype=dtype, **form)
    assert f"{-value:g}" in str(e.value) and not list(tmp_path.iterdir())


def test_and_where_they_are_read_or_written_otherwise(tmp_path):
    config, params = large(1e5)
    saved = save_pretrained(config, params, tmp_path / "saved", tokenizer=byte_tokenizer())
    with pytest.raises(CheckpointError, match="final_norm.*100000 is infinite in float16"):
        load_model(saved, dtype="float16")
    half = {"model": str(saved), "dtype": "float16"}
    for command, more in (("attack", {}), ("prune", {}), ("prune", {"streaming": True})):
        where = tmp_path / f"{command}{len(more)}"
        with pytest.raises((CheckpointError, ValueError), match="100000 is infinite in float16"):
            fh.run("surgery", command, where, half | more)
    # The changes of kernels by adapters.
    half = random_params(LLAMA, dtype=np.float16)
    adapted, _ = fh.lora(dataclasses.replace(load_model(saved), config=LLAMA, params=half), rank=2)
    leaves = flatten(adapted.params)
    leaves |= {k: np.full_like(x, 6e4) for k, x in leaves.items() if "/lora_" in k}
    with pytest.raises(CheckpointError, match="layers/0/.*/kernel: .* is infinite in float16"):
        save_pretrained(adapted.config, unflatten(leaves), tmp_path / "folded")


def test_a_full_disk_while_a_tokenizer_is_written(tmp_path):
    with no_file_beyond(2000), pytest.raises(CheckpointError, match="cannot be written") as caught:
        save_tokenizer(byte_tokenizer(), tmp_path, types=False)
    assert "\n" not in str(caught.value)


def test_cells_end_where_they_end():
    assert as_text("a\\|b") == r"a\\\|b" and as_text("\\<b>") == r"\\\<b>"


def test_bars_are_lines_where_there_is_no_terminal(monkeypatch):
    lines = io.StringIO()
    monkeypatch.setattr(sys, "stderr", lines)
    for _ in bar("counting", range(3), delay=0, mininterval=0):
        pass
    said = lines.getvalue()
    assert "\r" not in said and "counting: 100%" in said.splitlines()[-1]
    lines.truncate(0)
    assert list(bar("quick", range(3))) == [0, 1, 2] and not lines.getvalue()
