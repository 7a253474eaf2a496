"""Ratings and verdicts in a judge's text; the last one counts."""

import pytest
from tiny_runs import refused

from ffn_heterogeneity.evaluate.chat import judge_prompts


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("[[8]]", 8.0),
        ("so [[7.5]].", 7.5),
        ("I thought [[3]], no: [[9]]", 9.0),
        ("[[ 10/10 ]]", 10.0),
        ("Rating: [6]", 6.0),
        ("[[0]]", "outside 1 to 10"),
        ("[[11]]", "outside 1 to 10"),
        ("[[nan]] [[-3]] [[8", "no rating"),
        ("8", "no rating"),
        ("[[rating]]", "no rating"),
    ],
)
def test_reading_ratings(text, score):
    if isinstance(score, float):
        assert judge_prompts.rating(text) == score
    else:
        refused(score, judge_prompts.rating, text)


def test_reading_verdicts():
    assert judge_prompts.verdict("not [[A]] but [[ B ]]") == "B"
    assert judge_prompts.verdict("[[C]]") == "C"
    for text in ("[[D]]", "A", "[A]", "[[AB]]", ""):
        refused("no verdict", judge_prompts.verdict, text)
