"""Figures are readable: useful ticks, no overlaps."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ffn_heterogeneity.report.figures import Line, Panel, draw
from ffn_heterogeneity.wording import markdown_table


def drawn(x, y, lines=1):
    names = [f"a setting, with a name as long as they get, {i}" for i in range(lines)]
    made = [Line(name, x, np.array([y])) for name in names]
    figure = draw([Panel("a", made, "step")])
    figure.draw_without_rendering()  # a Figure without pyplot has a canvas that draws nothing
    return figure, figure.axes[0]


@pytest.mark.parametrize(("x", "whole"), [((0, 1, 2), True), ((0.0, 0.5, 1.0), False)])
def test_layers_and_steps_have_whole_ticks(x, whole):
    _, axis = drawn(x, (1.0, 2.0, 3.0))
    assert all(float(tick).is_integer() for tick in axis.get_xticks()) == whole


def test_what_hardly_differs_is_level_and_has_no_offset():
    _, axis = drawn((0, 1, 2), (6.0551, 6.0551001, 6.0551))
    assert axis.yaxis.get_offset_text().get_text() == ""
    assert np.ptp(axis.get_ylim()) > 0.01
    _, axis = drawn((0, 1, 2), (1.0, 2.0, 3.0))
    assert axis.get_ylim() == pytest.approx((0.9, 3.1))


@pytest.mark.parametrize("lines", [2, 5, 8])
def test_the_legend_stands_outside(lines):
    _, axis = drawn((0, 1), (1.0, 2.0), lines)
    box = axis.get_legend().get_window_extent()
    assert not box.overlaps(axis.patch.get_window_extent())
    assert not box.overlaps(axis.xaxis.label.get_window_extent())


def test_no_line_joins_dots():
    lines = [Line("a", [3, 1, 2], np.array([[1.0, 2.0, 3.0]]))]
    axes = [draw([Panel("", lines, dots=dots)]).axes[0] for dots in (True, False)]
    dotted, lined = (axis.lines[0] for axis in axes)
    assert dotted.get_linestyle() == "None" and dotted.get_marker() == "."
    assert lined.get_linestyle() == "-" and lined.get_marker() == "o"


def test_names_and_values_are_shown_as_text():
    """HTML, links and cell ends in names and values; our own links stay links."""
    hostile = '<img src=x>|[a](b)\n# "c"'
    table = markdown_table(("run", "value"), [(hostile, "<b>")])
    assert len(table.splitlines()) == 3 and "](" not in table
    assert not re.search(r"(?<!\\)[<]", table) and table.count("\\|") == 1
    assert "[a](b)" in markdown_table(("run",), [("[a](b)",)], links=True)
