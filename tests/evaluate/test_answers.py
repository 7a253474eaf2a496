"""Tasks answered and scored: scores by hand, intervals, whole questions, resuming."""

import collections
import dataclasses
import json
import zlib

import numpy as np
import pytest
from etils import epath
from tiny_models import LLAMA, byte_tokenizer, config_of, run_script, save_tiny
from tiny_runs import read_rows, refused, write_rows

from ffn_heterogeneity.evaluate import answer_metrics as metrics
from ffn_heterogeneity.evaluate import answers
from ffn_heterogeneity.evaluate.run import check_config
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.io.rows import rows_of
from ffn_heterogeneity.models import generate
from ffn_heterogeneity.models.generate import Generation
from ffn_heterogeneity.wording import settings_from

pytestmark = pytest.mark.usefixtures("compiled_quickly")
CB = ("entailment", "contradiction", "neutral")
TINY = dataclasses.replace(LLAMA, max_position=128)
FOLDERS = ("BoolQ", "superglue_cb", "copa", "MultiRC", "record", "RTE", "superglue_wic", "WSC")
WORDS = {"cb": (*CB, "maybe"), "copa": ("choice1", "choice2"), "record": ("Ann", "Bob Lee", "x")}
WORDS |= {"rte": ("entailment", "not_entailment"), "wsc": ("Bob Lee", "x", "y")}
FIELDS = ("premise", "hypothesis", "choice1", "choice2", "question", "passage", "word")
FIELDS += ("sentence1", "sentence2")


def row_of(task, i):
    """Row i in the official form: two questions of MultiRC with three answers, two of ReCoRD."""
    if task == "multirc":
        said = [{"text": f"a{j}", "label": int((i + j) % 3 > 0)} for j in range(3)]
        asked = [{"question": f"q{k}", "idx": k, "answers": said} for k in range(2)]
        return {"idx": i, "passage": {"text": f"p{i}", "questions": asked}}
    if task == "record":
        golds = [{"start": 0, "end": 2, "text": "Ann"}, {"start": 4, "end": 10, "text": "Bob Lee"}]
        asked = [{"query": f"@p {i}", "idx": k, "answers": golds[k:]} for k in range(2)]
        return {"idx": i, "passage": {"text": "Ann Bob Lee went.", "entities": golds}, "qas": asked}
    target = {"span1_text": "Bob Lee", "span2_text": "she", "span2_index": 1}
    label = {"cb": CB[i % 3], "rte": WORDS["rte"][i % 2]}.get(task, i % 2)
    row = {name: f"{name[0]}{10**i}" for name in FIELDS}
    return row | {"text": f"Ann she {i}", "target": target, "label": label}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Twelve rows of each task, in folders of all three kinds of names; RTE's test has no label."""
    root = tmp_path_factory.mktemp("data")
    for name, folder in zip(metrics.SUPERGLUE, FOLDERS, strict=True):
        file = root / folder / f"{'val' if folder[0].isupper() else 'validation'}.jsonl"
        write_rows(file, [row_of(name, i) for i in range(12)])
    (root / "RTE" / "test.jsonl").write_text('{"premise": "p", "hypothesis": "h"}\n')
    return root


def config_for(root, *tasks, **changes):
    settings = {"batch_size": 2, "max_new_tokens": 6, "bootstrap": 200, "data_root": str(root)}
    settings |= {"tasks": tasks or ("superglue",), "model": "x"}
    return config_of("answers", **{**settings, **changes})


@pytest.fixture(scope="module")
def model():
    return Model(TINY, {}, byte_tokenizer(), "tiny")


@pytest.fixture
def evaluate(monkeypatch, root, model, tmp_path):
    """evaluate(out, *tasks), with a generator whose answer depends on the prompt's crc."""

    class Generator:
        config, tokenizer, asked, dies_after = TINY, model.tokenizer, [], 10**6
        room = generate.Generator.room

        def __call__(self, prompts, sampling, *, progress):
            assert len(self.asked) < self.dies_after, "killed"
            progress(len(prompts))
            assert sampling.stop == ("\n",) and sampling.eos == (1,) and not sampling.temperature
            texts = [model.tokenizer.decode(ids) for ids in prompts]
            self.asked.extend(texts)
            words = [WORDS.get(t[3:].split()[0].strip(":"), ("True", "False", "?")) for t in texts]
            said = [w[zlib.crc32(t.encode()) % len(w)] for t, w in zip(texts, words, strict=True)]
            return [Generation(f" {word}", [5], "stop") for word in said]

    def run(out, *tasks, **changes):
        config = config_for(root, *tasks, **changes)
        return answers.evaluate_answers(
            settings_from(answers.AnswerSettings, config), model, epath.Path(tmp_path / out)
        )

    run.generator = Generator
    monkeypatch.setattr(answers, "Generator", lambda *a, **k: Generator())
    return run


def by_hand(task, path):
    """Scores of a file of answers, computed only from the file."""
    rows = read_rows(path)
    said, gold = ([row[key] for row in rows] for key in ("prediction", "reference"))
    pairs = list(zip(said, gold, strict=True))
    if task == "multirc":
        true, groups = np.array([g["label"] == "True" for g in gold]), collections.defaultdict(set)
        right = np.array([s == g["label"] for s, g in pairs])
        for ok, one in zip(right, gold, strict=True):
            groups[tuple(one["group"])].add(bool(ok))
        precision, recall = right[true == right].mean(), right[true].mean()
        exact_questions = np.mean([outcomes == {True} for outcomes in groups.values()])
        return {"f1_answers": 2 / (1 / precision + 1 / recall), "exact_questions": exact_questions}
    if task == "record":
        exact = np.mean([s in g["answers"] for s, g in pairs])
        return {"exact_match": exact, "f1": exact}  # no name is a part of another
    if task == "wsc":
        return {"accuracy": np.mean([(s == g["referent"]) == g["label"] for s, g in pairs])}
    f1 = [2 * pairs.count((c, c)) / max(1, said.count(c) + gold.count(c)) for c in CB]
    more = {"macro_f1": np.mean(f1)} if task == "cb" else {}
    return {"accuracy": np.mean([s == g for s, g in pairs]), **more}


def test_scores_are_those_of_the_answers(evaluate, tmp_path):
    results, means = evaluate("out"), []
    assert len(list((tmp_path / "out" / "answers").iterdir())) == 8, "DPR is not asked"
    for name in metrics.SUPERGLUE:
        row = results["tasks"][f"superglue_{name}"]
        assert row["n"] == (24 if name in ("multirc", "record") else 12), name
        scores = by_hand(name, tmp_path / f"out/answers/superglue_{name}.jsonl")
        means.append(np.mean(list(scores.values())))
        for metric, value in scores.items():
            assert row[metric] == pytest.approx(value, abs=1e-12), (name, metric)
            assert 0 <= row[f"{metric}_low"] <= value <= row[f"{metric}_high"] <= 1
    assert 0 < min(means) < max(means) < 1, "scores that say something"
    assert results["superglue"] == pytest.approx(np.mean(means), abs=1e-12)
    reported = {(row.get("task"), row["what"]): row for row in rows_of(results)}
    assert reported["superglue", "average"]["how"] == "bootstrap"
    assert reported["superglue_multirc", "f1_answers"]["n"] == 24
    # As in training: bos, the prompt, the end of its line. A prompt without room is not asked.
    assert "<s>rte hypothesis: h1000 premise: p1000\n" in evaluate.generator.asked
    row = evaluate("long", "superglue_copa", max_new_tokens=60)["tasks"]["superglue_copa"]
    assert row["finish"]["stop"] and row["finish"]["stop"] + row["finish"]["no room"] == 12


def test_one_command(root, tmp_path):
    model = save_tiny(tmp_path / "model", TINY)
    settings = {"limit": 2, "max_new_tokens": 4, "bootstrap": 50, "workdir": tmp_path / "out"}
    settings |= {"data_root": root, "tasks": ("superglue_rte", "superglue_multirc"), "model": model}
    done = run_script("evaluate", config="configs/answers.py", **settings)
    assert done.code == 0 and "missing superglue_boolq, superglue_cb" in done.err, done
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "superglue" not in results
    row = results["tasks"]["superglue_multirc"]
    assert row["n"] == 2 and sum(row["finish"].values()) == 6, "whole questions"
    assert row["exact_questions"] == row["f1_answers_high"] == 0, "a random model"


def test_going_on_asks_only_what_is_missing(evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "PIECE", 1)
    tasks, generator = ("superglue_cb", "superglue_multirc"), evaluate.generator
    expected = evaluate("whole", *tasks)
    for kill in (1, 11, 13, 40):
        generator.asked, generator.dies_after = [], kill
        with pytest.raises(AssertionError, match="killed"):
            evaluate(str(kill), *tasks)
        generator.dies_after = 10**6
        assert evaluate(str(kill), *tasks) == expected and len(generator.asked) == 12 + 72
        for file in (tmp_path / "whole" / "answers").iterdir():
            assert (tmp_path / str(kill) / "answers" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["wic", "cb", "multirc", "record"])
def test_a_resample_is_the_metric_of_whole_questions(root, name):
    """The metric of the drawn questions' rows; each draw counts as a separate question."""
    ((task, asked),) = check_config(config_for(root, f"superglue_{name}")).read().items()
    gold, groups = [one.reference for one in asked], collections.defaultdict(list)
    said = np.random.default_rng(3).choice(WORDS.get(name, ("True", "False")), len(gold)).tolist()
    for i, one in enumerate(gold):
        groups[one["group"] if name in ("multirc", "record") else i].append(i)
    metric, rng = metrics.METRICS[task.metrics[0]], np.random.default_rng(7)
    drawn = metrics.bootstrap(metric.counts(said, gold), 20, np.random.default_rng(7))
    for k in range(20):
        picks = enumerate(rng.integers(0, len(groups), len(groups)))
        rows = [(i, draw) for draw, pick in picks for i in list(groups.values())[pick]]
        references = [
            gold[i] if "group" not in gold[i] else gold[i] | {"group": d} for i, d in rows
        ]
        for score, value in metric([said[i] for i, _ in rows], references).items():
            assert drawn[score][k] == pytest.approx(value, abs=1e-12)


def test_intervals(evaluate):
    right, rng = np.random.default_rng(0).random(800) < 0.3, np.random.default_rng(1)
    counts = metrics.accuracy.counts(list(right), [True] * 800)
    low, high = np.percentile(metrics.bootstrap(counts, 4000, rng)["accuracy"], [2.5, 97.5])
    p, half = right.mean(), 1.96 * right.std() / 800**0.5
    assert (low, high) == pytest.approx((p - half, p + half), abs=0.003)
    gold = [{"label": "True", "group": i // 2} for i in range(6)]
    perfect = metrics.bootstrap(metrics.multirc.counts(["True"] * 6, gold), 50, rng)
    assert all((one == 1).all() for one in perfect.values())

    def interval(out, *tasks, seed=0):
        row = evaluate(out, *tasks, bootstrap=37, seed=seed)["tasks"]["superglue_wic"]
        return row["accuracy_low"], row["accuracy_high"]

    assert interval("a", "superglue_wic") == interval("a", "superglue_wic") == interval("b")
    assert len({interval("a", "superglue_wic", seed=seed) for seed in range(6)}) > 1


@pytest.mark.parametrize(
    "message, changes",
    {
        "did you mean 'superglue_rte'": {"tasks": ("superglue_rtee",)},
        "task 'gsm8k' has no metric; tasks with metrics: .*_cb": {"tasks": ("gsm8k",)},
        "give names": {"tasks": ()},
        "superglue_dpr: no .*dpr": {"tasks": ("superglue_dpr",)},
        "RTE/test.jsonl.*1: no field 'label'": {"tasks": ("superglue_rte",), "split": "test"},
        "/nowhere": {"data_root": "/nowhere"},
        "max_new_tokens=0": {"max_new_tokens": 0},
        "bootstrap=0": {"bootstrap": 0},
        "limit=-1": {"limit": -1},
    }.items(),
)
def test_refused(root, message, changes):
    refused(message, check_config, config_for(root, **changes))


def test_a_model_without_a_tokenizer_is_refused(root, model, tmp_path):
    bare = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="tiny has no tokenizer"):
        answers.evaluate_answers(check_config(config_for(root)), bare, epath.Path(tmp_path))
