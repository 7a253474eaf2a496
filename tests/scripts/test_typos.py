"""Mistyped config keys: each is refused, and the key that was meant is named."""

from __future__ import annotations

import random
import re
import sys

import pytest
from absl.flags._helpers import _damerau_levenshtein as distance
from tiny_models import REPOSITORY, config_of
from tiny_runs import flags_of, run_program

from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.launch.cli import UsageError, add_stage_keys, check_keys

CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py"))
TRAIN = (sys.executable, REPOSITORY / "scripts" / "train.py")
COUNT = 200


def letters(key: str) -> list[int]:
    return [i for i, letter in enumerate(key) if letter.isalpha()]


def drop(rng, key):
    i = rng.choice(letters(key))
    return key[:i] + key[i + 1 :]


def double(rng, key):
    i = rng.choice(letters(key))
    return key[:i] + key[i] + key[i:]


def swap(rng, key):
    i = rng.randrange(len(key) - 1)
    return key[:i] + key[i + 1] + key[i] + key[i + 2 :]


def replace(rng, key):
    i = rng.choice(letters(key))
    return key[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") + key[i + 1 :]


def capital(rng, key):
    i = rng.choice(letters(key))
    return key[:i] + key[i].upper() + key[i + 1 :]


def shout(rng, key):
    return key.upper()


def hyphens(rng, key):
    return key.replace("_", "-")


def without_group(rng, key):
    return key.partition(".")[2]


def without_dot(rng, key):
    return key.replace(".", "")


def underscored(rng, key):
    return key.replace(".", "_")


KINDS = [drop, double, swap, replace, capital, shout, hyphens]
KINDS += [without_group, without_dot, underscored]


def make_typos() -> list[tuple[str, str, str, str]]:
    """(config, the key that was meant, kind, typo), at least COUNT of them, always the same."""
    rng, turn, found = random.Random(0), 0, {}
    while len(found) < COUNT:
        for config in CONFIGS:
            keys = flatten_config(config_of(config).to_dict())
            groups = {key.rsplit(".", i)[0] for key in keys for i in (1, 2) if "." in key}
            for number, key in enumerate(keys):
                # The kinds take turns; one whose typo is a key or was made before passes on.
                for kind in (KINDS * 2)[(number + turn) % len(KINDS) :]:
                    typo = kind(rng, key)
                    if typo and not ({typo} & {*keys, *groups} or (config, typo) in found):
                        found[config, typo] = (key, kind.__name__)
                        break
        turn += 1
    return [(config, key, kind, typo) for (config, typo), (key, kind) in found.items()]


def distance_to_key(typo: str, key: str) -> int:
    """To the key, or to what is left of it without its groups, whichever is nearer."""
    parts = key.split(".")
    return min(distance(typo, ".".join(parts[i:])) for i in range(len(parts)))


def test_distance_to_key():
    """Letters to drop, add or replace and neighbours to swap, groups left out or not."""
    assert distance_to_key("wieght", "losses.nucl.weight") == 1
    assert distance_to_key("kitten", "sitting") == 3


def test_the_typos_are_many_and_of_every_kind():
    typos = make_typos()
    assert len(typos) >= COUNT and typos == make_typos()
    assert {kind for _, _, kind, _ in typos} == {kind.__name__ for kind in KINDS}
    meant = {(config, key) for config, key, _, _ in typos}
    missed = {(c, key) for c in CONFIGS for key in flatten_config(config_of(c).to_dict())} - meant
    assert not missed, missed


def test_every_typo_is_refused_with_the_nearest_key():
    wrong = []
    for config_name, key, kind, typo in make_typos():
        config = config_of(config_name)
        with pytest.raises(UsageError) as caught:
            check_keys(["x", f"--config.{typo}=1"], config)
        message = str(caught.value)
        assert "\n" not in message and f"unknown config key {typo!r}" in message
        suggested = re.search(r"did you mean '([^']+)'\?", message)
        if suggested is None:
            wrong.append((config_name, kind, typo, "nothing", key))
        elif suggested[1] != key:
            assert suggested[1] in flatten_config(config.to_dict())
            if distance_to_key(typo, suggested[1]) > distance_to_key(typo, key):
                wrong.append((config_name, kind, typo, suggested[1], key))
    assert not wrong, f"{len(wrong)}: {wrong}"


def test_what_is_near_nothing_gets_no_suggestion():
    for typo in ("xyzzy", "q", "lr"):
        with pytest.raises(UsageError, match=f"unknown config key '{typo}'. Known: ") as caught:
            check_keys(["x", f"--config.{typo}=1"], config_of("prune"))
        assert "did you mean" not in str(caught.value)


def test_a_real_process_says_so_in_one_line(tmp_path):
    workdir = tmp_path / "run"
    flags = ("--config.optimizer.Learning-rate=1", f"--workdir={workdir}")
    done = run_program(*TRAIN, *flags, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert done.code == 2 and done.out == ""
    assert len(done.err.splitlines()) == 1, done.err
    start = "error: unknown config key 'optimizer.Learning-rate', did you mean "
    assert done.err.startswith(f"{start}'optimizer.learning_rate'?")
    assert not workdir.exists()


def test_stages_take_the_keys_of_the_files_they_start_from():
    """With their types and references; what those files have not is refused as before."""
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
        with pytest.raises(UsageError, match="config key"):
            check_keys(wrong, config)
    assert flatten_config(config.to_dict()) == before | set_here


def test_a_stage_computes_with_such_a_key():
    own = {"recover.optimizer.b2": 2, "dry_run": "h100:1"}
    flags = flags_of("configs/prune_recover.py:smollm2_135m,text", "runs/never", **own)
    made = run_program(*TRAIN, *flags, JAX_PLATFORMS="cpu")
    assert made.code == 2 and "b2" in made.err.splitlines()[-1]
    assert not (REPOSITORY / "runs/never").exists()
