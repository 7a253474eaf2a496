"""Run checkpoints: round trip, what is kept, and every kind of damage refused by name."""

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ffn_heterogeneity.io.checkpoints import MANIFEST, Checkpoints
from ffn_heterogeneity.io.errors import CheckpointError


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


# A read that fails inside orbax leaves coroutines behind that were never awaited.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sealed", [True, False])
def test_a_truncated_checkpoint_names_the_last_good_one(tmp_path, sealed):
    checkpoints = filled(tmp_path)
    victim = largest_file(tmp_path / "3")
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    if not sealed:
        (tmp_path / "3" / MANIFEST).unlink()
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(make_state())
    message = str(error.value)
    del error
    for _ in range(3):
        gc.collect()
    assert str(tmp_path / "3") in message and f"last good checkpoint is {tmp_path / '2'}" in message
    if sealed:
        assert "bytes instead of" in message and victim.name in message
    checkpoints.close()
    del checkpoints
    gc.collect()


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
    other = make_state()
    other["a/b"]["x"] = jnp.zeros((700, 91))
    with pytest.raises(CheckpointError, match=r"leaf 'a.b.x' is float32\[700, 90\] there and"):
        checkpoints.restore(other)
    more = make_state() | {"new": jnp.zeros(2)}
    with pytest.raises(CheckpointError, match="leaf 'new' is absent there"):
        checkpoints.restore(more)


def test_nothing_to_restore(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint; there are none"):
        Checkpoints(tmp_path).restore(make_state())
    with pytest.raises(CheckpointError, match=r"no checkpoint 9; there are \[2, 3\]"):
        filled(tmp_path).restore(make_state(), 9)
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
