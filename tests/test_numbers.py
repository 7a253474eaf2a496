"""The shared check of numbers: ends of intervals, invalid numbers, every interval in the code."""

import ast
import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ffn_heterogeneity.wording import check_number

PACKAGE = Path(__file__).resolve().parents[1] / "ffn_heterogeneity"
BIG = 2**63
INSIDE = [(0, "[0, 1)"), (0.999, "[0, 1)"), (1, "[0, 1]"), (1, "(0, 1]"), (BIG - 1, f"[0, {BIG})")]
INSIDE += [(-1e300, "(-inf, inf)"), (10**400, "[1, inf)"), (math.inf, "(0, inf]")]
INSIDE += [(np.float32(0.5), "(0, 1)"), (np.int64(3), "[1, 3]"), (True, "[1, inf)")]
INSIDE += [(1e-6, "[1e-6, 1e6]"), (np.int64(BIG - 1), f"[0, {BIG})"), (jnp.float32(0.5), "[0, 1)")]
INSIDE += [(0, "[0, inf), 0 for all")]
OUTSIDE = [(1, "[0, 1)"), (0, "(0, 1]"), (-1, "[0, inf)"), (math.nan, "(-inf, inf)")]
OUTSIDE += [(math.inf, "[0, inf)"), (-math.inf, "(-inf, inf)"), (BIG, f"[0, {BIG})")]
OUTSIDE += [("1", "[0, 2]"), (None, "[0, 2]"), ([1], "[0, 2]"), (1 + 0j, "[0, 2]")]
OUTSIDE += [(0, "[0, 0)"), (-1, "[0, inf), 0 for all"), (np.nan, "[0, 1]")]
OUTSIDE += [(np.nextafter(0, -1), "[0, 1]")]


@pytest.mark.parametrize("value, allowed", INSIDE)
def test_a_number_inside_passes(value, allowed):
    check_number("rate", value, allowed)


@pytest.mark.parametrize("value, allowed", OUTSIDE)
def test_what_is_outside_is_refused_with_name_value_and_interval(value, allowed):
    shown = repr(value.item() if isinstance(value, np.generic) else value)
    said = re.escape(f"rate={shown} must be a number in {allowed}")
    with pytest.raises(ArithmeticError, match=f"^{said}$"):
        check_number("rate", value, allowed, ArithmeticError)


def test_every_interval_in_the_package_is_one():
    """A misspelt one would be found by the first user whose setting is checked."""
    intervals = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                intervals += re.findall(r"^[\[(][-\d.einf]+, [-\d.einf]+[\])]", node.value)
    assert len(intervals) > 40
    for text in intervals:
        low, high = map(float, text[1:-1].split(", "))
        assert low < high and (math.isfinite(low) or text[0] == "("), text
