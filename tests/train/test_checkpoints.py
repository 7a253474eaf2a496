"""Run checkpoints: round trip, kept steps, rejection of every kind of damage, full disks."""

import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint.path import atomicity, atomicity_defaults
from tiny_models import no_file_beyond
from tiny_runs import refused

from ffn_heterogeneity.io import checkpoints as module
from ffn_heterogeneity.io import seals
from ffn_heterogeneity.io.checkpoints import Checkpoints
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.seals import MANIFEST


def make_state(value=0.0):
    rng = np.random.default_rng(0)
    return {
        "a/b": {"x": jnp.asarray(rng.standard_normal((700, 90)) + value, jnp.float32)},
        "half": jnp.asarray(rng.standard_normal((5, 3)), jnp.bfloat16),
        "key": jnp.array([3, 4], jnp.uint32),
        "step": jnp.int32(7),
    }


def filled(directory, steps=(1, 2, 3), best=(), keep=2):
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        checkpoints.save(step, make_state(step), {"data": {"p": step}}, best=step in best)
    return checkpoints


def largest_file(folder):
    files = [p for p in Path(folder).glob("**/*") if p.is_file() and p.name != MANIFEST]
    return max(files, key=lambda p: p.stat().st_size)


def test_round_trip_is_bit_exact(tmp_path):
    checkpoints = filled(tmp_path)
    state, info = checkpoints.restore(jax.eval_shape(make_state))
    assert info == {"data": {"p": 3}}
    expected = make_state(3)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert checkpoints.restore(make_state(), 2)[1] == {"data": {"p": 2}}


def test_the_latest_and_the_best_are_kept(tmp_path):
    assert filled(tmp_path, range(1, 6), best=(1, 2)).steps() == [2, 4, 5]
    checkpoints = filled(tmp_path, [6, 7])
    assert checkpoints.steps() == [2, 6, 7] and checkpoints.best_step == 2
    assert filled(tmp_path, [8, 9], best=(8,), keep=1).steps() == [8, 9]


def test_saving_a_step_twice_keeps_the_first(tmp_path):
    checkpoints = filled(tmp_path)
    checkpoints.save(3, make_state(99), {"data": {}}, best=True)
    assert checkpoints.restore(make_state())[1] == {"data": {"p": 3}}
    assert checkpoints.best_step == 3


def test_the_best_is_told_by_the_checkpoints_themselves(tmp_path):
    checkpoints = filled(tmp_path, [1, 2, 3], best=(2,), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]  # and no other file
    assert checkpoints.best_step == Checkpoints(tmp_path).best_step == 2
    checkpoints.save(3, make_state(3), {}, best=True)  # known after it was saved
    assert checkpoints.best_step == 3
    # A process that dies here evaluates 3 again: the stored record is older.
    assert Checkpoints(tmp_path).best_step == 2
    checkpoints.save(4, make_state(4), {})
    assert checkpoints.steps() == [3, 4] and Checkpoints(tmp_path).best_step == 3


def test_the_best_of_every_kept_checkpoint_is_kept(tmp_path):
    """If the latest is damaged, the one before it must find its best."""
    checkpoints = filled(tmp_path, [1, 2, 3, 4], best=(1, 4))
    assert checkpoints.steps() == [1, 3, 4] and checkpoints.best_step == 4
    for path in sorted((tmp_path / "4").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "4").rmdir()
    again = Checkpoints(tmp_path, keep=2)
    assert again.best_step == 1 and again.restore(make_state(), 1)[1] == {"data": {"p": 1}}


def test_killed_before_the_seal(tmp_path):
    """A kill between orbax's rename to the second temporary name and our final rename."""
    left = tmp_path / f"3{atomicity.TMP_DIR_SUFFIX}-sealed"
    left.mkdir()
    (left / "half").write_text("half")
    checkpoints = filled(tmp_path, [3])
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    checkpoints.verify(3)


def test_killed_between_the_move_and_the_removal(tmp_path, monkeypatch):
    """The new best is complete before the old one changes, and is marked as best itself."""
    checkpoints = filled(tmp_path, [1, 2], best=(1,), keep=1)

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    monkeypatch.setattr(module._LatestAndBest, "should_preserve", killed)
    with pytest.raises(Killed):
        checkpoints.save(3, make_state(3), {"data": {"p": 3}}, best=True)
    monkeypatch.undo()
    again = Checkpoints(tmp_path, keep=1)
    assert again.steps() == [1, 2, 3] and again.best_step == 3
    assert again.restore(make_state())[1] == {"data": {"p": 3}}
    again.save(4, make_state(4), {})
    assert again.steps() == [3, 4]


def small_state():
    return {"a": jnp.arange(3.0), "step": jnp.int32(7)}


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["flipped", "truncated", "emptied", "removed"])
def test_damage_to_any_file_is_refused(tmp_path, kind):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, small_state(), {"p": step})
    chance, names = random.Random(0), set()
    for victim in files_of(tmp_path / "2"):
        content = victim.read_bytes()
        assert content  # or truncating it would change nothing
        bad = bytearray(content)
        if kind == "flipped":
            bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        elif kind == "truncated":
            bad = bad[: chance.randrange(1, len(bad)) if len(bad) > 1 else 0]
        elif kind == "emptied":
            bad = b""
        victim.unlink() if kind == "removed" else victim.write_bytes(bad)
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(small_state())
        message, name = str(error.value), str(victim.relative_to(tmp_path / "2"))
        assert f"{tmp_path / '2'} is damaged" in message
        assert f"last good checkpoint is {tmp_path / '1'}" in message
        # A flipped bit may make the manifest name another file; it is rejected in any case.
        assert name in message or (kind == "flipped" and name == MANIFEST)
        names.add(name)
        victim.write_bytes(content)
    assert len(names) > 8 and {MANIFEST, "info/metadata", "commit_success.txt"} < names
    assert checkpoints.restore(small_state())[1] == {"p": 2}


def test_every_flipped_bit_of_the_manifest_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"a": jnp.arange(3.0)}, {})
    path, chance = tmp_path / "1" / MANIFEST, random.Random(0)
    content = path.read_bytes()
    for place in chance.sample(range(8 * len(content)), 300):
        bad = bytearray(content)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        refused("is damaged", checkpoints.verify, 1, error=CheckpointError)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"info/metadata": 3}', "{", "\xff"])
def test_a_manifest_that_is_not_one_is_refused(tmp_path, text):
    checkpoints = filled(tmp_path, [1, 2])
    (tmp_path / "2" / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"{MANIFEST} .*last good checkpoint is .*/1: remove"):
        checkpoints.restore(make_state())


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path):
    checkpoints = filled(tmp_path, [1])
    path = tmp_path / "1" / MANIFEST
    sums = json.loads(path.read_text())
    (lost,) = [name for name in sums if name == "info/metadata"]
    path.write_text(json.dumps({name: entry for name, entry in sums.items() if name != lost}))
    refused("does not list info/metadata", checkpoints.restore, make_state(), error=CheckpointError)


def test_a_bucket_is_sealed_before_orbax_marks_it(tmp_path, monkeypatch):
    """Buckets have no renames; a directory without orbax's mark is an interrupted save."""
    name, kind = "get_default_temporary_path_class", atomicity.CommitFileTemporaryPath
    monkeypatch.setattr(atomicity_defaults, name, lambda *_, **__: kind)
    checkpoints = filled(tmp_path, best=(2,))
    assert checkpoints.restore(make_state())[1] == {"data": {"p": 3}}
    assert Checkpoints(tmp_path).best_step == 2
    listed = json.loads((tmp_path / "3" / MANIFEST).read_text())
    everything = {str(path.relative_to(tmp_path / "3")) for path in files_of(tmp_path / "3")}
    assert everything - {*listed} == {MANIFEST, *seals.LATE}
    (tmp_path / "3" / atomicity.COMMIT_SUCCESS_FILE).unlink()
    assert Checkpoints(tmp_path).steps() == [2]


# Orbax leaves coroutines that are not awaited, and reports errors on its threads.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", [100_000, 1000, 60, 0])  # the arrays; smaller and smaller files
def test_a_full_disk_leaves_the_old_checkpoints(tmp_path, monkeypatch, size, background):
    if background:  # as on an accelerator
        monkeypatch.setattr(module.jax, "default_backend", lambda: "gpu")
    checkpoints = filled(tmp_path, [1, 2], best=(1,), keep=1)
    checkpoints.wait()
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    with no_file_beyond(size), pytest.raises(CheckpointError) as error:
        checkpoints.save(3, make_state(3), {"data": {"p": 3}}, best=True)
        checkpoints.wait()
    message = str(error.value)
    assert f"{tmp_path / '3'} could not be written: File too large;" in message
    assert f"last good checkpoint is {tmp_path / '2'}" in message and "\n" not in message
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before
    assert checkpoints.steps() == [1, 2] and checkpoints.best_step == 1
    assert checkpoints.restore(make_state())[1] == {"data": {"p": 2}}
    checkpoints.save(3, make_state(3), {"data": {"p": 3}}, best=True)  # there is space again
    assert checkpoints.steps() == [3] and checkpoints.best_step == 3
    checkpoints.close()


def test_a_manifest_that_cannot_be_written_fails_the_save(tmp_path, monkeypatch):
    checkpoints = filled(tmp_path, [1])

    def full(folder):
        raise OSError(28, "No space left on device", str(folder / MANIFEST))

    monkeypatch.setattr(seals, "_seal", full)
    with pytest.raises(CheckpointError, match="2 could not be written: No space left on device;"):
        checkpoints.save(2, make_state(2), {})
    assert [path.name for path in tmp_path.iterdir()] == ["1"] and checkpoints.steps() == [1]


def test_a_flipped_bit_is_seen(tmp_path):
    checkpoints = filled(tmp_path, keep=3)
    for step in (3, 2):
        victim = largest_file(tmp_path / str(step))
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 16
        victim.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=f"altered.*good checkpoint is {tmp_path / '1'}"):
        checkpoints.restore(make_state())
    assert checkpoints.restore(make_state(), 1)[1] == {"data": {"p": 1}}


def test_a_missing_file_is_named(tmp_path):
    checkpoints = filled(tmp_path, [1])
    victim = largest_file(tmp_path / "1")
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name} is missing.*no other good"):
        checkpoints.restore(make_state())


def test_another_tree_is_refused_by_leaf(tmp_path):
    checkpoints = filled(tmp_path)
    other, more = make_state(), make_state() | {"new": jnp.zeros(2)}
    other["a/b"]["x"] = jnp.zeros((700, 91))
    words = (r"leaf 'a.b.x' is float32\[700, 90\] there and", "leaf 'new' is absent there")
    for wrong, message in zip((other, more), words, strict=True):
        refused(message, checkpoints.restore, wrong, error=CheckpointError)


def test_nothing_to_restore(tmp_path):
    lost = {"error": CheckpointError}
    empty, state = Checkpoints(tmp_path), make_state()
    refused("holds no checkpoint; there are none", empty.restore, state, **lost)
    refused(r"no checkpoint 9; there are \[2, 3\]", filled(tmp_path).restore, state, 9, **lost)
    refused("keep=0", Checkpoints, tmp_path, keep=0)


# ---- leaves that never change

FROZEN = ("a/b/x", "half")


def saved_apart(directory, steps=(1, 2, 3)):
    checkpoints = Checkpoints(directory, keep=2)
    for step in steps:
        state = make_state() | {"step": jnp.int32(step)}
        checkpoints.save(step, state, {}, frozen=FROZEN)
    return checkpoints


def test_frozen_leaves_are_written_once_and_come_back(tmp_path):
    restored, _ = saved_apart(tmp_path / "c").restore(make_state())
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(make_state()), strict=True):
        assert a.dtype == b.dtype and (np.array_equal(a, b) or int(a) == 3)
    sealed = largest_file(tmp_path / "c_frozen")
    assert sealed.stat().st_size > 20 * largest_file(tmp_path / "c").stat().st_size


def test_frozen_leaves_that_are_damaged_or_anothers_are_refused(tmp_path):
    checkpoints = saved_apart(tmp_path / "c")
    other = Checkpoints(tmp_path / "d")
    other.save(1, make_state(9.0), {}, frozen=FROZEN)
    shutil.rmtree(tmp_path / "c_frozen")
    with pytest.raises(CheckpointError, match="c_frozen holds no checkpoint 0"):
        checkpoints.restore(make_state())
    shutil.copytree(tmp_path / "d_frozen", tmp_path / "c_frozen", dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="c_frozen is not what checkpoint .*3 was written"):
        checkpoints.restore(make_state())
    file = largest_file(tmp_path / "c_frozen")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="c_frozen/0 is damaged: .* bytes instead of"):
        checkpoints.restore(make_state())
