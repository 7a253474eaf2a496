"""Mistyped config keys: each is rejected, and the error suggests the right key."""

import re
from collections.abc import Iterator

import pytest
from absl.flags._helpers import _damerau_levenshtein as distance
from tiny_models import REPOSITORY, config_of, run_script
from tiny_runs import flags_of, refused

from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.launch.cli import UsageError, add_stage_keys, check_keys

CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py"))


def typos_of(key: str, at: int) -> list[str]:
    """One slip of each kind; those of a letter at a place of the key."""
    before, letter, after = key[:at], key[at], key[at + 1 :]
    swapped = before + after[:1] + letter + after[1:]
    made = [before + after, before + letter + letter + after, swapped, f"{before}7{after}"]
    made += [before + letter.upper() + after, key.upper(), key.replace("_", "-")]
    return [*made, key.partition(".")[2], key.replace(".", ""), key.replace(".", "_")]


def make_typos() -> Iterator[tuple[str, str, str]]:
    """(config, the key that was meant, typo): a kind for each key, in turn."""
    for config in CONFIGS:
        keys = flatten_config(config_of(config).to_dict())
        known = {*keys, *(key.rsplit(".", i)[0] for key in keys for i in (1, 2))}
        for number, key in enumerate(keys):
            letters = [i for i, letter in enumerate(key) if letter.isalpha()]
            typos = typos_of(key, letters[number % len(letters)])
            typos = typos[number % len(typos) :] + typos
            yield config, key, next(typo for typo in typos if typo and typo not in known)


def distance_to_key(typo: str, key: str) -> int:
    """To the key, or to what is left of it without its groups, whichever is nearer."""
    parts = key.split(".")
    return min(distance(typo, ".".join(parts[i:])) for i in range(len(parts)))


def test_every_typo_is_refused_with_the_nearest_key():
    wrong = []
    for config_name, key, typo in make_typos():
        config = config_of(config_name)
        with pytest.raises(UsageError) as caught:
            check_keys(["x", f"--config.{typo}=1"], config)
        message = str(caught.value)
        assert "\n" not in message and f"unknown config key {typo!r}" in message
        suggested = re.search(r"did you mean '([^']+)'\?", message)
        if suggested is None:
            wrong.append((config_name, typo, "nothing", key))
        elif suggested[1] != key:
            assert suggested[1] in flatten_config(config.to_dict())
            if distance_to_key(typo, suggested[1]) > distance_to_key(typo, key):
                wrong.append((config_name, typo, suggested[1], key))
    assert not wrong, f"{len(wrong)}: {wrong}"


def test_what_is_near_nothing_gets_no_suggestion():
    for typo in ("xyzzy", "q", "lr"):
        with pytest.raises(UsageError, match=f"unknown config key '{typo}'. Known: ") as caught:
            check_keys(["x", f"--config.{typo}=1"], config_of("prune"))
        assert "did you mean" not in str(caught.value)


def test_stages_take_the_keys_of_the_files_they_start_from():
    """With their types and references; keys that those files do not have are still rejected."""
    config = config_of("prune_recover", "model,text")
    before = flatten_config(config.to_dict())
    set_here = {"recover.checkpoint.at_end": True, "recover.revision": None, "prune.protect": ""}
    argv = ["train", *(f"--config.{key}=x" for key in set_here), "--config.score.window=4"]
    add_stage_keys(argv, config)
    check_keys(argv, config)
    assert flatten_config(config.to_dict()) == before | set_here
    assert config.recover.get_type("revision") is str
    for key in ("recover.checkpoint.at_ends", "recover.nothing.at_end", "seeds.x", "prune.base.x"):
        wrong = ["train", f"--config.{key}=x"]
        add_stage_keys(wrong, config)
        refused("config key", check_keys, wrong, config, error=UsageError)
    assert flatten_config(config.to_dict()) == before | set_here


def test_a_stage_computes_with_such_a_key():
    settings = {"recover.optimizer.b2": 2, "dry_run": "h100:1"}
    flags = flags_of("configs/prune_recover.py:smollm2_135m,text", "runs/never", **settings)
    assert "b2" in run_script("train", *flags).error
    assert not (REPOSITORY / "runs/never").exists()
