"""`fh.hidden_states` against transformers: every layer, padded on either side, texts and pairs."""

import dataclasses

import numpy as np
import pytest
from tiny_models import byte_tokenizer, random_params, tiny_of
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.probes.observe import token_batches


@pytest.mark.parametrize("family", ["bert", "llama", "gemma2", "gpt2", "gpt_neox"])
def test_states_are_those_of_transformers(family, torch, tmp_path):
    """The embedding is first; the last state is after the final norm, if there is one."""
    from transformers import AutoModel

    config = dataclasses.replace(tiny_of(family), pad_id=1)
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "out")
    theirs = AutoModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (3, 7))
    right = np.arange(7) < np.array([[7], [4], [2]])
    for mask in (right, right[:, ::-1]):
        states, real = fh.hidden_states(Model(config, params, None, ""), ids, mask, batch_size=2)
        given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask.copy() * 1)}
        if config.position_rows:  # positions count the real tokens; their classes count places
            given["position_ids"] = torch.tensor(np.maximum(mask.cumsum(1) - 1, 0))
        with torch.no_grad():
            made = theirs(**given, output_hidden_states=True).hidden_states
        want = torch.stack(made, 1).numpy()
        assert states.shape == want.shape and np.array_equal(real, mask)
        shown = np.broadcast_to(mask[:, None], want.shape[:3])
        np.testing.assert_allclose(states[shown], want[shown], atol=1e-4, rtol=0)


def test_texts_and_what_is_none(tmp_path):
    config = dataclasses.replace(tiny_of("llama"), vocab_size=258)
    model = Model(config, random_params(config), byte_tokenizer(), "tiny")
    states, mask = fh.hidden_states(model, ["ab", "abcd"])
    assert mask.sum(1).tolist() == [3, 5] and states.shape[:3] == (2, config.n_layers + 1, 5)
    for one in (["ab"], "ab", np.array("ab"), np.array(["ab"])):
        (alone,), _ = fh.hidden_states(model, one)
        np.testing.assert_allclose(alone, states[0, :, :3], atol=1e-5)
    (tmp_path / "text.txt").write_text("ab " * 99)
    for call in (fh.hidden_states, fh.perplexity):
        for path in (tmp_path / "text.txt", str(tmp_path / "text.txt")):
            refused("is the path of a file.*read_text", call, model, path)
    refused("integer ids", fh.hidden_states, model, np.ones((1, 2)))
    for texts, message in (
        ([], "at least one"),
        ([3], "not iterable"),
        (["a", ("a", "b")], "or all"),
    ):
        refused(message, fh.hidden_states, model, texts, error=(ValueError, TypeError))
    masked = (np.zeros((2, 3), int), np.ones((2, 2), bool))
    refused("must be", fh.hidden_states, model, *masked)
    refused("outside the vocabulary", fh.hidden_states, model, np.full((1, 2), 999))


def test_rows_of_tokens_become_batches_of_one_shape():
    rows = [np.array(row) for row in ([5, 6, 7], [8], [9, 10])]
    first, last = token_batches(rows, 2)
    assert first["tokens"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert last["segment_ids"].tolist() == [[1, 1, 0], [0, 0, 0]]
    (all_of_them,) = token_batches(rows, 5, 4)
    assert all_of_them["tokens"].shape == (3, 4) and all_of_them["segment_ids"].sum() == 6
