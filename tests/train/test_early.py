"""Early errors: a run that would fail later stops before its model is downloaded or read."""

import sys
import types

import pytest
from tiny_models import config_of

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.launch import experiment

NOWHERE = "nobody/nothing"  # a model whose download would give another error


def refused(tmp_path, config, error=ValueError):
    with pytest.raises(error) as bad:
        experiment.run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists(), "nothing is left of it"
    return str(bad.value)


@pytest.mark.parametrize("key", ["path", "validation_path"])
def test_a_path_of_data_that_is_not_there(tmp_path, key):
    config = config_of("nucl_finetune", f"{NOWHERE},text", **{f"data__{key}": "none/a.txt"})
    assert refused(tmp_path, config, DataError) == f"data.{key}='none/a.txt': no such file"


def test_what_a_run_lacks_is_said_before_its_model_is_read(tmp_path):
    config = config_of("nucl_finetune", f"{NOWHERE},text")
    assert "needs a path: --config.data.path=<file or hub name>" in refused(
        tmp_path, config, DataError
    )
    (tmp_path / "rows.csv").write_text("x,label\na,b\nc,d\n")
    settings = {"fields": "text", "data__path": str(tmp_path / "rows.csv")}
    said = refused(tmp_path, config_of("p32_glue", f"{NOWHERE},labels", **settings), DataError)
    assert "rows.csv, line 2: task 'labels' reads the fields 'text'; this file has 'x'" in said


def test_one_of_several_held_out_sets(tmp_path):
    paths = "matched=none/a.jsonl,mismatched=none/b.jsonl"
    config = config_of("p32_glue", f"{NOWHERE},mnli", data__validation_path=paths)
    message = "data.validation_path='none/a.jsonl': no such file"
    assert refused(tmp_path, config, DataError) == message


FAR = (("seed", -1), ("seed", 2**63), ("batch_size", 2**31), ("seq_len", 2**40), ("steps", 10**12))


@pytest.mark.parametrize(("key", "value"), FAR)
def test_a_number_beyond_any_sense(tmp_path, key, value):
    config = config_of("nucl_finetune", f"{NOWHERE},text", data__path=__file__)
    config[key] = value
    assert f"{key}={value} must be a number in" in refused(tmp_path, config)


def test_of_a_stage_that_comes_later(tmp_path):
    paths = {"recover__data__path": "none/a.txt", "score__text": __file__}
    config = config_of("prune_recover", f"{NOWHERE},text", **paths)
    assert refused(tmp_path, config, DataError) == "data.path='none/a.txt': no such file"
    parts = (("text", "none/a.txt", 0.5), ("jsonl", "none/b.jsonl", 0.5))
    config = config_of("nucl_finetune", f"{NOWHERE},mixture", data__mixture=parts)
    assert refused(tmp_path, config, DataError) == "data.mixture='none/a.txt': no such file"


def test_a_package_or_a_login_that_is_missing(tmp_path, monkeypatch):
    config = config_of("nucl_finetune", f"{NOWHERE},gsm8k", wandb="mine")
    wandb = types.ModuleType("wandb")
    wandb.api = types.SimpleNamespace(api_key=None)
    for name in ("grain", "datasets", "wandb"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "wandb", wandb)
            patched.setitem(sys.modules, name, None)
            assert name in refused(tmp_path, config, ModuleNotFoundError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert "wandb='mine': no login found; run `wandb login`" in refused(tmp_path, config)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert NOWHERE in refused(tmp_path, config), "what comes next is the model"
