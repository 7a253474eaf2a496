"""WebNLG: entries as examples and questions; BLEU and TER by hand and by sacrebleu; commands."""

import collections
import itertools
import json
import sys

import numpy as np
import pytest
from etils import epath
from sacrebleu.metrics import BLEU, TER
from tiny_models import byte_tokenizer, config_of, save_tiny
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.data.mixtures import open_task
from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError, read_jsonl
from ffn_heterogeneity.data.tasks import get_task
from ffn_heterogeneity.data.tasks.webnlg import SEEN, UNSEEN
from ffn_heterogeneity.evaluate import answer_metrics as metrics
from ffn_heterogeneity.evaluate.result_rows import read_rows, write_rows
from ffn_heterogeneity.evaluate.run import check_config

pytestmark = pytest.mark.usefixtures("compiled_quickly")
PROMPT = 'Triples: Old_Mill : owner : "Ann B" | Ann_B : age : 7\nText:'
TRIPLES = ['Old_Mill | owner | "Ann B"', "Ann_B | age | 7"]
TEXTS = ("Ann B, aged 7, owns the old mill.", "The old mill is Ann B's, who is 7.")
LEX = [{"comment": "good", "text": text} for text in (" " + TEXTS[0], TEXTS[1])]
BAD = {"comment": "toFix", "text": "?"}


def entry(category="Building", lex=(BAD, *LEX), triples=TRIPLES):
    return json.dumps({"category": category, "modifiedtripleset": triples, "lex": list(lex)})


def file_of(root, *lines):
    path = root / "webnlg" / "test.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def path(tmp_path):
    """Two seen entries, one that is left out, three unseen entries."""
    return file_of(tmp_path, entry(), entry(lex=[BAD]), entry(lex=LEX[:1]), *map(entry, UNSEEN[:3]))


def settings_of(root, split="test"):
    return {"model": "x", "data_root": str(root), "tasks": ("webnlg",), "split": split}


def asked_of(*places):
    config = config_of("answers", **settings_of(*places))
    return next(iter(check_config(config).read().values()))


def by_sacrebleu(predictions, references):
    """{metric: (score, signature)} by one call each for the whole corpus."""
    columns = list(itertools.zip_longest(*(one["texts"] for one in references)))
    ours = {"bleu": BLEU(), "ter": TER()}
    values = {name: one.corpus_score(predictions, columns).score for name, one in ours.items()}
    return {name: (values[name], one.get_signature().format()) for name, one in ours.items()}


def test_the_published_files(shared_data):
    """One question per entry with a good text; one example per good text."""
    parts = collections.Counter(one.reference["part"] for one in asked_of(shared_data))
    assert parts == {"seen": 971, "unseen": 891}
    assert len(asked_of(shared_data, "validation")) == 871, "one has no good text"
    folder = shared_data / "webnlg"
    train = open_task(get_task("webnlg"), str(folder / "train.jsonl"), "train")
    test = read_jsonl([str(folder / "test.jsonl")])
    here, there = ({source[i]["category"] for i in range(len(source))} for source in (train, test))
    assert len(train) == 18_025 and here == set(SEEN) and there - here == set(UNSEEN)


def test_a_good_text_is_an_example_and_its_prompt_is_in_no_loss(path, tmp_path):
    settings = {"task": "webnlg", "path": path, "packing": False, "shuffle": False}
    batch = next(make_pipeline(settings, byte_tokenizer(), 9, 128, seed=0).train_iterator())
    decode = byte_tokenizer().decode
    for row, text in enumerate((*TEXTS, TEXTS[0], *TEXTS * 3)):
        assert decode(batch["targets"][row]).startswith(f"{PROMPT} {text}</s>")
        assert decode(batch["targets"][row][batch["loss_mask"][row] > 0]) == f" {text}</s>"
    asked = asked_of(tmp_path)
    assert [len(one.reference["texts"]) for one in asked] == [2, 1, 2, 2, 2]
    assert (asked[0].prompt, asked[1].where) == (PROMPT, f"{path}, line 3")


NO_TEXT = LEX[0] | {"text": " "}
REFUSED = {
    "test.jsonl: none of its 1 rows is an example of webnlg": entry(lex=[BAD]),
    "test.jsonl, line 1: not JSON": entry()[:-9],
    "line 1: field 'lex' is empty": entry(lex=[]),
    "line 1: text 2 of the good ones in 'lex' is empty": entry(lex=[BAD, LEX[0], NO_TEXT]),
    "line 1: field 'lex' is int": entry(lex=[3]),
    "line 1: triple 'a . b' is not": entry(triples=["a | b"]),
    "line 1: field 'category' is 'Robot'": entry("Robot"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(tmp_path, message):
    file_of(tmp_path, REFUSED[message])
    refused(message, asked_of, tmp_path, error=DataError)


def test_bleu_and_ter_by_hand():
    """1- to 4-grams of the first: 5 of 6, 4 of 5, 2 of 4, 1 of 3; one edit to the nearer of two
    references of 6 and 3 words. The second is right: 2 of 2, 1 of 1."""
    said = ["the cat sat on the mat", "a dog"]
    meant = [{"texts": ["the cat sat on a mat", "see the mat"]}, {"texts": ["a dog"]}]
    values = [metrics.METRICS[name](said, meant)[name] for name in ("bleu", "ter")]
    bleu = 100 * (7 / 8 * 5 / 6 * 2 / 4 * 1 / 3) ** (1 / 4)
    assert values == pytest.approx([bleu, 100 / (4.5 + 2)], rel=1e-12)
    # One word short; orders that nothing matches count as 1/2, then 1/4 of a match.
    value = metrics.METRICS["bleu"](["a b c d"], [{"texts": ["a b d e f"]}])["bleu"]
    smoothed = (3 / 4 * 1 / 3 * (1 / 2) / 2 * (1 / 4) / 1) ** (1 / 4)
    assert value == pytest.approx(100 * np.exp(1 - 5 / 4) * smoothed, rel=1e-12)


@pytest.mark.parametrize("name", ["bleu", "ter"])
def test_resamples_are_sacrebleus_own_score_of_the_rows_drawn(name):
    rng, words = np.random.default_rng(0), ["a", "b", "c", "A,", "1.5", "d-e"]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(2, 12, 80)]
    said = ["", *texts[:19]]
    meant = [{"texts": texts[20 + 3 * i :][: 1 + i % 3]} for i in range(20)]
    metric, rng = metrics.METRICS[name], np.random.default_rng(7)
    drawn = metrics.bootstrap(metric.counts(said, meant), 9, np.random.default_rng(7))[name]
    for value in drawn:
        rows = rng.integers(0, 20, 20)
        score, _ = by_sacrebleu([said[i] for i in rows], [meant[i] for i in rows])[name]
        assert value == pytest.approx(score, rel=1e-12) and value > 0
    for some in (meant, meant[1::3]):
        assert metric.signature(some) == by_sacrebleu(texts[: len(some)], some)[name][1]


def test_commands(path, tmp_path, tmp_path_factory, capsys):
    """Trains and evaluates a model, then scores the file again with better answers."""
    out = tmp_path_factory.mktemp("out")
    tiny, trained, asked = save_tiny(out / "tiny"), out / "trained", out / "asked"
    data = {"data.path": path, "data.validation_fraction": 0.5}
    small = {"steps": 2, "batch_size": 2, "seq_len": 128, "tensorboard": False}
    fh.run("train", f"nucl_finetune:{tiny},webnlg", trained, data | small)
    ask = settings_of(tmp_path) | {"model": str(trained / "model"), "max_new_tokens": 4}
    fh.run("evaluate", "answers", asked, ask)
    assert "SuperGLUE" not in capsys.readouterr().err
    file = epath.Path(asked / "answers/webnlg.jsonl")
    rows = read_rows(file)
    for row in rows:
        row["prediction"] = "Ann B owns the old mill." if row["id"] in (0, 3, 4) else TEXTS[1]
    write_rows(file, rows)
    scores = fh.run("evaluate", "answers", asked, ask)["tasks"]
    parts = {"webnlg": rows, "webnlg_seen": rows[:2], "webnlg_unseen": rows[2:]}
    for name, subset in parts.items():
        assert scores[name]["n"] == len(subset)
        said, meant = ([row[key] for row in subset] for key in ("prediction", "reference"))
        for metric, (value, signature) in by_sacrebleu(said, meant).items():
            assert scores[name][metric] == pytest.approx(value, rel=1e-12) and 0 < value < 100
            assert scores[name][f"{metric}_low"] <= value <= scores[name][f"{metric}_high"]
            assert scores[name]["signatures"][metric] == signature


def test_without_sacrebleu_nothing_is_loaded(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    refused(r"sacrebleu.*: pip install .*\[text\]", asked_of, tmp_path, error=ImportError)
