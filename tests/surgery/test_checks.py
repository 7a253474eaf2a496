"""Surgeries reject settings before a text is read or generated; equal budgets; no bos."""

import dataclasses

import numpy as np
import pytest
from tiny_models import LLAMA, TEXT, WIDE, byte_tokenizer, random_params, tiny_of, with_experts
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.walk import ffn_blocks
from ffn_heterogeneity.surgery import SURGERIES, experts, reduce
from ffn_heterogeneity.surgery.calibration import calibration_rows
from ffn_heterogeneity.surgery.experts import expert_sums
from ffn_heterogeneity.surgery.merge_experts import Merging
from ffn_heterogeneity.surgery.selection import highest_share

pytestmark = pytest.mark.usefixtures("compiled_quickly")
ROWS = [np.arange(2, 2 + n) * 7 % 250 for n in (19, 30, 11)]


def model_of(config, tokenizer=None, **changes):
    config = dataclasses.replace(config, **changes)
    return Model(config, random_params(config), tokenizer or byte_tokenizer(), "tiny")


@pytest.mark.parametrize(("in_config", "first"), [(0, 0), (None, None)])
def test_a_tokenizer_without_bos(tmp_path, in_config, first):
    """Qwen's has none, but its config.json does; OLMo has none at all."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    (tmp_path / "text.txt").write_text(TEXT * 4)
    model = model_of(LLAMA, tokenizer, bos_id=in_config, max_position=600)
    rows = calibration_rows(model, str(tmp_path / "text.txt"), 1024)
    ids = tokenizer.encode(TEXT * 4)
    wanted = (
        [[first, *ids[:512]], [first, *ids[512:1024]]] if first == 0 else [ids[:513], ids[512:1025]]
    )
    np.testing.assert_array_equal(rows, wanted)
    settings = {"calibration": str(tmp_path / "text.txt"), "calibration_tokens": 512}
    if first == 0:
        smaller, _ = fh.prune(model, criterion="mean_state", ratio=0.5, **settings)
        assert smaller.config.ffn_widths == (12,) * 4


@pytest.fixture
def no_text(monkeypatch):
    """A text that is asked for fails the test."""

    def asked(*_):
        pytest.fail("the text was read before the settings were checked")

    for module in (reduce, experts):
        monkeypatch.setattr(module, "calibration_rows", asked)


def test_errors_come_before_the_text(no_text):
    wide = model_of(
        dataclasses.replace(WIDE, layers=(dataclasses.replace(WIDE.layers[0], ffn_width=20_000),))
    )
    own = {"calibration": "own", "compensation": "state_ridge"}
    words = "8,192 calibration tokens are too few to fit 15,000 kept neurons"
    refused(words, fh.prune, wide, ratio=0.25, **own)
    refused("layer 0 has experts", fh.prune, model_of(with_experts()), ratio=0.25, **own)
    both = {"rule": "reap", "calibration": "own", "count": 3, "top_k": 2}
    refused("1 router columns are left, and top_k=2", fh.experts, model_of(with_experts()), **both)
    refused("top_k=0", fh.experts, model_of(with_experts()), top_k=0)


@pytest.mark.parametrize(
    ("method", "setting"),
    [("resmoe", {"columns": "dominant"}), ("m_smoe", {"share": 0.5}), ("m_smoe", {"group": 4})]
    + [("ream", {"residual": "svd"})],
)
def test_settings_of_another_way_to_merge_are_refused(method, setting):
    (name,) = setting
    refused(f"{name}=.* has no effect on {method}", Merging, method=method, **setting)


def test_random_removal_over_all_layers_takes_the_same_share_of_each():
    widths = (100, 1000, 100, 1000)
    layers = [dataclasses.replace(LLAMA.layers[0], ffn_width=width) for width in widths]
    model = model_of(LLAMA, layers=tuple(layers))
    smaller, _ = fh.prune(model, criterion="random", budget="global", ratio=0.25, seed=1)
    left = np.divide(smaller.config.ffn_widths, widths)
    np.testing.assert_allclose(left, 0.75, atol=0.05)


def test_a_share_of_values_is_exact_also_among_ties():
    values = [np.array([[0.0, 0, 3], [0, 1, 0]]), np.array([0.0, 2])]
    for share, kept in ((1.0, 8), (0.75, 6), (0.25, 2), (0.0, 0)):
        stays = highest_share(values, share)
        assert sum(part.sum() for part in stays) == kept
        assert [part.shape for part in stays] == [(2, 3), (2,)]
    assert highest_share(values, 0.5)[0].tolist() == [[True, False, True], [False, True, False]]


def test_a_masked_model_is_pruned_further():
    """More than the share is 0 already; only zeros go, then weights."""
    model = model_of(WIDE)
    masked, _ = fh.fuse(model, "unstructured", ratio=0.5)
    folded, _ = fh.fold(masked)
    for ratio in (0.25, 0.75):
        again, _ = fh.fuse(folded, "unstructured", ratio=ratio)
        masks = [
            leaves["mask"] for _, ffn in ffn_blocks(WIDE, again.params) for leaves in ffn.values()
        ]
        assert sum(mask.sum() for mask in masks) / sum(mask.size for mask in masks) == 1 - ratio


def test_rescale_leaves_codes_and_masks_alone():
    factors = {"factors": (("layers/1/ffn/", 0.5),)}
    masked, _ = fh.fuse(model_of(WIDE), "unstructured", ratio=0.5)
    quantised, _ = SURGERIES["nf4"](model_of(WIDE), {"targets": "ffn/"})
    for model in (masked, quantised):
        refused("has no weights", SURGERIES["rescale"], model, factors)


def test_protected_experts_never_go(monkeypatch):
    model = model_of(with_experts())
    monkeypatch.setattr(experts, "bos_experts", lambda _: {0: np.array([0, 1, 2])})
    monkeypatch.setattr(experts, "massive_weights", lambda *_: type("Found", (), {"states": []}))
    keep = {"protect": "massive", "layers": "0", "rule": "aimer", "top_k": 2}
    refused("2 experts are to go, and expert . is one of 3", fh.experts, model, count=2, **keep)
    _, report = fh.experts(model, count=1, **keep)
    assert report["removed_experts"][0] == [3]


def test_both_stacks_of_a_switch_are_observed():
    config = dataclasses.replace(tiny_of("switch"), vocab_size=258)
    sums = expert_sums(config, random_params(config), ROWS)
    sparse = [i for i, layer in enumerate(config.layers) if layer.experts]
    assert list(sums) == sparse and {config.n_encoder_layers > i for i in sparse} == {True, False}
    assert all(0 < sums[i]["tokens"].sum() <= sum(map(len, ROWS)) for i in sparse)


def test_layers_can_be_split_into_experts_one_after_the_other(tmp_path):
    """Layers that have experts already do not matter to the others."""
    (tmp_path / "text.txt").write_text(TEXT * 4)
    text = {"calibration": str(tmp_path / "text.txt"), "calibration_tokens": 512}
    model = model_of(LLAMA, max_position=600)
    once, _ = fh.partition(model, 4, 2, "zeros", layers="1", shared=1, **text)
    twice, _ = fh.partition(model, 4, 4, "zeros", layers="0")
    twice, _ = fh.partition(twice, 4, 2, "zeros", layers="1", shared=1, **text)
    assert [layer.experts for layer in twice.config.layers[:2]] == [4, 4]
    trained, _ = fh.partition(twice, 4, 2, "trained", layers="2", **text)
    assert trained.config.layers[2].experts == 4 and once.config.layers[1].experts == 4
