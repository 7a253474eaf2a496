"""Files written in pieces equal those of the safetensors library."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_runs import refused

from ffn_heterogeneity.io import pieces, safetensors
from ffn_heterogeneity.io.pieces import Spec, open_pieces

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float64, np.float16)


def some_tensors() -> dict[str, np.ndarray]:
    """Tensors of mixed types and shapes, unordered names; one is empty, one name not ASCII."""
    rng = np.random.default_rng(0)
    names = [*(f"layers.{i}.w" for i in range(12)), "b", "Ä.weight", "a", "empty"]
    shapes = [(3, 5), (7,), (2, 3, 4), (1, 1)] * 3 + [(9,), (4, 4), (6,), (0, 3)]
    return {
        name: rng.normal(size=shape).astype(DTYPES[i % 4])
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }


@pytest.mark.parametrize("limit", [10**9, 200])
def test_bytes_are_those_of_the_library(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 16)
    tensors = some_tensors()
    reference, parts = tmp_path / "whole", tmp_path / "parts"
    reference.mkdir()
    parts.mkdir()
    sizes = {name: array.nbytes for name, array in tensors.items()}
    shards = safetensors.plan_shards(sizes, limit)
    for file, names in shards.items():
        some = {name: tensors[name] for name in names}
        save_file(some, reference / file, metadata={"format": "pt"})
    safetensors.write_index(reference, sizes, shards)
    specs = {name: Spec(array.shape, array.dtype) for name, array in tensors.items()}
    with open_pieces(parts, specs, limit) as files:
        assert sorted(files.order) == sorted(tensors)
        for name in reversed(files.order):  # any order will do
            files.write(name, tensors[name])
    written = {path.name: path.read_bytes() for path in parts.iterdir()}
    assert written == {path.name: path.read_bytes() for path in reference.iterdir()}
    assert (len(written) > 2) == (limit == 200)
    (tmp_path / "touched").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "touched", *parts.iterdir())}
    assert len(modes) == 1


def test_tensors_are_cast_and_held_to_their_shape(tmp_path):
    array = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    specs = {"a": Spec((50, 3), np.dtype(ml_dtypes.bfloat16))}
    with open_pieces(tmp_path, specs, 10**9) as files:
        refused(r"a has shape \(3, 50\), planned as \(50, 3\)", files.write, "a", array.T)
        files.write("a", array)
    tensors = safetensors.open_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(tensors["a"].load(), array.astype(ml_dtypes.bfloat16))
