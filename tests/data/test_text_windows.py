"""Perplexity windows: the targets and contexts of each policy."""

import numpy as np
import pytest
from tiny_runs import refused

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.windows import text_windows, window_bos, window_documents


@pytest.mark.parametrize("bos", ["segment", "stream", "none"])
@pytest.mark.parametrize("window", [1, 7, 512])
def test_windows_of_wikitext(shared_data, bpe, bos, window):
    text = (shared_data / "wikitext2" / "test.raw.txt").read_bytes().decode()[:40_000]
    ids = bpe.encode(text, add_special_tokens=False)
    rows = text_windows(text, bpe, window, bos=bos)
    predicted = ids[1:] if bos == "none" else ids
    count = len(predicted) // window
    assert rows.shape == (count, window + 1) and rows.dtype == np.int32
    assert rows[:, 1:].reshape(-1).tolist() == predicted[: count * window]  # each exactly once
    context = {
        "segment": [0] * count,
        "stream": [0, *(ids[i * window - 1] for i in range(1, count))],
        "none": [ids[i * window] for i in range(count)],
    }[bos]
    assert rows[:, 0].tolist() == context


def test_max_windows_and_no_special_tokens(characters):
    tokenizer = characters()
    two = text_windows("abcdefgh", tokenizer, 2, max_windows=2).tolist()
    assert two == [[1, 100, 101], [1, 102, 103]]
    assert len(text_windows("abcdefgh", tokenizer, 2, max_windows=99)) == 4
    assert text_windows("abc", characters(bos=None), 2, bos="none").tolist() == [[100, 101, 102]]


@pytest.mark.parametrize(
    "text, window, options, message",
    [
        ("abc", 4, {}, r"the text has 3 tokens.*one window of 4 predictions needs \(4\)"),
        ("abc", 3, {"bos": "none"}, r"the text has 3 tokens.*needs \(4\)"),
        ("", 4, {}, "the text is empty"),
        ("abc", 0, {}, "window=0"),
        ("abc", 1, {"max_windows": -1}, "max_windows=-1"),
        ("abc", 1, {"every": 0}, "window_every=0"),
        ("abc", 1, {"bos": "first"}, "bos='first': choose one of"),
    ],
)
def test_bad_windows(characters, text, window, options, message):
    refused(message, text_windows, text, characters(), window, error=DataError, **options)


def test_bos_asked_of_a_tokenizer_without(characters):
    for bos in ("segment", "stream"):
        with pytest.raises(DataError, match="no bos token"):
            text_windows("abc", characters(bos=None), 1, bos=bos)


def test_auto_is_the_tokenizers_rule(bpe, bos_first):
    """A tokenizer may have a bos and put none before a text (Qwen2.5's, SmolLM2's)."""
    assert bpe.bos_token_id == bos_first.bos_token_id == 0
    for tokenizer, rule in ((bpe, "none"), (bos_first, "segment")):
        assert (tokenizer("a b")["input_ids"][0] == 0) == (rule == "segment")
        assert window_bos("auto", tokenizer) == rule
        rows = text_windows("to be or not to be", tokenizer, 2, bos="auto")
        np.testing.assert_array_equal(
            rows, text_windows("to be or not to be", tokenizer, 2, bos=rule)
        )
        assert window_bos("stream", tokenizer) == "stream"


HEADING = r"^ = [^=].*[^=] = $"


def test_every_25th_window_and_its_article(shared_data, bpe):
    text = (shared_data / "wikitext2" / "test.raw.txt").read_bytes().decode()[:400_000]
    rows = text_windows(text, bpe, 64)
    spread = text_windows(text, bpe, 64, every=25)
    np.testing.assert_array_equal(spread, rows[::25])
    np.testing.assert_array_equal(text_windows(text, bpe, 64, 3, every=25), rows[:75:25])
    articles = window_documents(text, bpe, HEADING, 64, len(spread), 25)
    ids = bpe.encode(text, add_special_tokens=False)
    for i, article in enumerate(articles):  # counted again without offsets
        before = bpe.decode(ids[: i * 25 * 64 + 33]).split("\n")
        assert article == sum(line.startswith(" = ") and line[3:4] not in "=" for line in before)
    assert articles[0] == 1 and articles[-1] > 10


@pytest.mark.parametrize("heading, message", [("(", "no regular expr"), ("^XX", "matches no line")])
def test_bad_headings(bpe, heading, message):
    with pytest.raises(DataError, match=message):
        window_documents("a text", bpe, heading, 2, 1)
