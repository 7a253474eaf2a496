"""The programs of the experts' benchmark compute the same."""

import numpy as np

from ffn_heterogeneity.bench.experts import THEIRS, layers
from ffn_heterogeneity.models.dispatch import DISPATCHES


def test_all_programs_compute_the_same(torch):
    shape = {"d_model": 16, "neurons": 24, "experts": 4, "top_k": 2}
    calls = layers(2, 9, "transformers", shape)
    for kind, names in (("dense layer", [""]), ("experts", [f", {d}" for d in DISPATCHES])):
        forward = np.asarray(calls[f"{kind}{names[0]}, forward"]())
        gradient = np.asarray(calls[f"{kind}{names[0]}, step"]()[1][1])
        for name in names:
            step = calls[f"{kind}{name}, step"]()
            np.testing.assert_allclose(calls[f"{kind}{name}, forward"](), forward, atol=1e-6)
            np.testing.assert_allclose(step[1][1], gradient, atol=1e-6)
        for name in ["dense layer"] if kind == "dense layer" else [f"experts, {t}" for t in THEIRS]:
            theirs = calls[f"torch: {name}, forward"](), calls[f"torch: {name}, step"]()
            np.testing.assert_allclose(theirs[0], forward, atol=1e-6)
            np.testing.assert_allclose(theirs[1], gradient, atol=1e-6)
