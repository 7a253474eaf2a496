"""The filter of system calls, interpreted as in the kernel."""

import importlib
import os
import struct
import types
from pathlib import Path

import pytest
from tiny_runs import refused

from ffn_heterogeneity.evaluate.sandbox import programs as sandbox

SANDBOX = Path(sandbox.__file__).parent


def filtered(code: bytes, architecture: int, number: int, first: int = 0) -> int:
    """The filter's result for a system call, by a small copy of the kernel's interpreter."""
    data = struct.pack("<iIQQ", number, architecture, 0, first)
    instructions = list(struct.iter_unpack("<HBBI", code))
    place, held = 0, 0
    while True:
        kind, yes, no, value = instructions[place]
        place += 1
        if kind == 0x06:
            return value
        if kind == 0x20:
            held = struct.unpack_from("<I", data, value)[0]
        else:
            truth = {0x15: held == value, 0x35: held >= value, 0x45: held & value != 0}[kind]
            place += yes if truth else no


@pytest.mark.parametrize("name", ["x86_64", "aarch64"])
def test_filter_of_system_calls(monkeypatch, name):
    monkeypatch.syspath_prepend(str(SANDBOX))
    kernel = importlib.import_module("sandbox_kernel")
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine=name))
    column, architecture = kernel.MACHINES[name]
    code, clone = kernel.filter_program(), kernel.SYSCALLS["clone"][column]
    kill, allow, refuse, missing = 0x80000000, 0x7FFF0000, 0x50000 + 1, 0x50000 + 38
    assert all(filtered(code, architecture, n[column]) == refuse for n in kernel.DENIED.values())
    others = set(range(500)) - {n[column] for n in kernel.DENIED.values()} - {435}
    assert {filtered(code, architecture, number) for number in others} == {allow}
    assert filtered(code, architecture, 435) == missing
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert filtered(code, architecture, clone, bit | 17) == refuse
    assert filtered(code, architecture, clone, 0x3D0F00) == allow  # a thread
    assert filtered(code, architecture ^ 1, 0) == kill
    assert filtered(code, architecture, 0x40000000 + 1) == kill
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="z80"))
    refused("no table of system calls for z80", kernel.filter_program)
