"""Reading and writing in buckets, where files cannot be renamed.

No bucket is available: local directories replace it, and only the rule for paths differs.
"""

import fsspec
import jax
import numpy as np
import pytest
from etils import epath
from tiny_models import LLAMA, byte_tokenizer, random_params
from tiny_runs import refused

from ffn_heterogeneity.io import files, load
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf import export
from ffn_heterogeneity.io.workdir import working_in


def test_what_a_bucket_is():
    assert files.is_bucket("gs://somewhere/run") and files.is_bucket(epath.Path("s3://x/y"))
    assert not files.is_bucket("/tmp/run") and not files.is_bucket("google/gemma-2-2b")


def test_a_model_goes_there_and_back(tmp_path, monkeypatch):
    params = random_params(LLAMA)
    bucket = tmp_path / "bucket"
    monkeypatch.setattr(export, "is_bucket", lambda path: True)
    for size in (5_000, 1 << 30):  # the second time over existing files, in fewer pieces
        export.save_pretrained(
            LLAMA,
            params,
            bucket / "model",
            tokenizer=byte_tokenizer(),
            overwrite=True,
            max_shard_bytes=size,
        )
        assert (len([*bucket.glob("model/*.safetensors")]) == 1) == (size > 5_000)
    written = sorted((bucket / "model").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert written[-1].name == "config.json" and len(written) > 3, "it makes the others a model"
    monkeypatch.setattr(load, "is_bucket", lambda path: str(path).startswith(str(bucket)))
    model = load.load_model(str(bucket / "model"))
    assert not str(model.source).startswith("/tmp/ffn") and model.tokenizer is not None
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    assert load.load_config(str(bucket / "model")) == model.config
    # The module is everybody's: only here.
    with monkeypatch.context() as here:
        here.setattr(load.tempfile, "mkdtemp", lambda *_, **__: str(tmp_path))
        tokenizer = load.load_tokenizer(str(bucket / "model"))
    assert tokenizer.vocab_size == model.tokenizer.vocab_size
    copied = {path.name for path in tmp_path.glob("model/*")}
    assert "tokenizer.json" in copied and not any("safetensors" in name for name in copied)
    # Nothing of the model before is left.
    export.save_pretrained(LLAMA, params, bucket / "model", overwrite=True)
    assert not [*bucket.glob("model/tokenizer*")]
    with pytest.raises(CheckpointError, match="nothing does not exist, or cannot be seen"):
        load.load_model(str(bucket / "nothing"))


def test_an_object_is_written_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "is_bucket", lambda path: True)
    with files.atomic_path(tmp_path / "a.json") as path:
        assert path == epath.Path(tmp_path / "a.json")
    files.write_json(tmp_path / "a.json", {"x": 1})
    assert files.read_json(tmp_path / "a.json") == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_is_missing_for_a_bucket_is_named_first(monkeypatch):
    """Before, the error was "Please install gcsfs", without the reason."""

    def without(scheme):
        raise ImportError(f"Please install what {scheme} needs")

    monkeypatch.setattr(fsspec, "get_filesystem_class", without)
    expected = r"gs://b/x cannot be opened \(Please install what gs .*'ffn-heterogeneity\[gcs\]'"
    with pytest.raises(ImportError, match=expected), working_in("gs://b/x", {}):
        raise AssertionError("nothing runs there")
    refused(expected, load.load_model, "gs://b/x", error=ImportError)
    files.check_opens("/a/directory")
