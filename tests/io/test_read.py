"""Reading with limits: files that are not regular, files that are too large, invalid JSON."""

import os
import random
import socket

import pytest
from tiny_runs import refused

from ffn_heterogeneity.io import read
from ffn_heterogeneity.io.read import parse_json, parse_object, read_bytes, read_json, read_text


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def _circle(path):
    path.symlink_to(path)


@pytest.mark.parametrize(
    "make, message",
    [
        (_fifo, "is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (lambda path: path.mkdir(), "is no regular file"),
        (_circle, "cannot be read: .*symbolic links"),
        (_socket, "cannot be read|is no regular file"),
        (lambda path: path.write_bytes(b"x" * 11), "has more than the 10 bytes"),
        (
            lambda path: path.symlink_to("/proc/self/maps"),
            "has more than the 10 bytes",
        ),  # "0 bytes"
        (lambda path: path.write_bytes(b"\xff"), "is no text"),
    ],
)
def test_what_is_no_file_of_text(tmp_path, monkeypatch, make, message):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.json")
    with pytest.raises(ValueError, match=f"a.json'? {message}") as refused:
        read_text(tmp_path / "a.json", 10)
    assert "\n" not in str(refused.value)


def test_links_to_files_are_followed_and_no_file_is_left_open(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").symlink_to("a")
    before = len(os.listdir("/proc/self/fd"))
    assert read_bytes(tmp_path / "b", 10) == b"0123456789"
    for name in (".", "a"):
        refused("regular file|more than the 9 bytes", read_bytes, tmp_path / name, 9)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "c")
    refused("null", read_bytes, f"{tmp_path}/a\0b")


REFUSED = {
    '{"a": 1, "b": {"c": 2, "c": 3}}': "the name 'c' is twice",
    '{"a": NaN}': "NaN is no number of JSON",
    '{"a": -Infinity}': "-Infinity is no number",
    '{"a": 1e999}': "1e999 is beyond every number",
    '{"a": 1' + "0" * 40 + "}": "a number of 41 digits",
    '{"a": ' + "9" * 5000 + "}": "a number of 5,000 digits",
    "[" * 65 + "]" * 65: "more than 64 objects in each other",
    '{"a":' * 65 + "1" + "}" * 65: "more than 64 objects in each other",
    "[" * 100_000: "more than 64 objects in each other",
    "[[]," * 300 + "[" * 100 + "]" * 400: "more than 64 objects in each other",
    '"\\ud83d"': "half a surrogate pair",
    '{"a\\uDC00": 1}': "half a surrogate pair",
    '{"a": }': "Expecting value at column 7",
    '{"a":\n\n tru}': "Expecting value at line 3, column 2",
    "": "Expecting value at column 1",
    "{} {}": "Extra data at column 4",
    "\ufeff{}": "Unexpected UTF-8 BOM",
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_json(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError) as refused:
        read_json(tmp_path / "a.json")
    said = str(refused.value)
    assert said.startswith(f"{tmp_path}/a.json: ") and REFUSED[text] in said
    assert "\n" not in said and len(said) < 300


def test_too_many_parts_and_a_list_for_an_object(monkeypatch):
    monkeypatch.setattr(read, "MAX_PARTS", 10)
    assert parse_json("[" * 10 + "]" * 10, "x") == [[[[[[[[[[]]]]]]]]]]
    refused("x: not JSON .more than 10 objects and lists", parse_json, "[" * 11, "x")
    with pytest.raises(KeyError, match="x is malformed: it holds a list, no object"):
        parse_object("[1]", "x", KeyError)


def test_rows_of_data_may_hold_more_in_fields_that_nobody_reads():
    row = parse_json('{"a": NaN, "b": ' + "9" * 100 + ', "c": "\\ud83d"}', "", lax=True)
    assert row["b"] == int("9" * 100) and row["c"] == "\ud83d"
    for text in ('{"a": 1, "a": 2}', "[" * 1000, "9" * 5000):
        refused("^not JSON", parse_json, text, "", lax=True)


def test_any_bytes_are_an_answer_or_one_line(tmp_path):
    """JSON that is cut, changed and doubled at random gives a value or an error of one line."""
    chance, refused = random.Random(0), 0
    good = b'{"a": [1, 2.5e3, "x\\n\\u00e9", null, true], "b": {"c": {}, "d": -0.0}}'
    for i in range(3000):
        data = bytearray(good * chance.randint(1, 2))
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(0, 3)] = chance.choice(
                [bytes([chance.randrange(256)]), b"[", b"{", b'"', b"\\ud8", b"1e99", b"NaN", b""]
            )
        path = tmp_path / "a.json"
        path.write_bytes(data)
        try:
            read_json(path)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error), i
    assert refused > 2000
