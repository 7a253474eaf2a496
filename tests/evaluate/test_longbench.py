"""LongBench: its prompts over real rows, its two scores, and prompts cut in the middle."""

import collections
import dataclasses
import functools
import json
import re
import string
from pathlib import Path

import numpy as np
import pytest
from task_tools import instance, requests_of
from tiny_models import LLAMA, byte_tokenizer, config_of, random_params
from tiny_runs import read_rows

from ffn_heterogeneity.evaluate.answer_metrics import rouge_l
from ffn_heterogeneity.evaluate.harness_tasks import make_task_pack
from ffn_heterogeneity.evaluate.run import check_config
from ffn_heterogeneity.evaluate.tasks import evaluate_tasks
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.generate import Generation

pytestmark = pytest.mark.usefixtures("compiled_quickly", "no_network", "lm_eval")
SMALL = dataclasses.replace(LLAMA, layers=(LayerConfig(12),) * 2, max_position=160)
# THUDM's lengths of answers, and how many questions MiniLongBench has of each.
QA = {"2wikimqa": (32, 13), "hotpotqa": (32, 13), "multifieldqa_en": (64, 7), "musique": (32, 7)}
QA |= {"narrativeqa": (128, 6), "qasper": (128, 9), "triviaqa": (32, 12)}


@pytest.fixture(scope="module")
def model():
    return Model(SMALL, random_params(SMALL), byte_tokenizer(), "tiny")


def test_news_are_asked_for_as_by_longbench(lm_eval, shared_data):
    """The prompt of a real row equals the stock task's text and length."""
    [task] = make_task_pack(str(shared_data), "longbench_multi_news").tasks
    assert len(task.eval_docs) == 200
    row = read_rows(shared_data / "longbench" / "multi_news.jsonl")[0]
    text = (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        f"{row['context']}\n\nNow, write a one-page summary of all the news.\n\nSummary:"
    )
    kind, prompt, settings = requests_of(task, 1)[0]
    assert (kind, prompt) == ("generate_until", text)
    assert settings == {"until": [], "do_sample": False, "max_gen_toks": 512}
    # Its metrics are not installed, so it is not loaded.
    stock = Path(lm_eval.__file__).parent / "tasks/longbench/multi_news.yaml"
    [line] = [one for one in stock.read_text().split("\n") if one.startswith("doc_to_text")]
    assert json.loads(line.partition(": ")[2]) == task.config.doc_to_text
    assert "max_gen_toks: 512" in stock.read_text()


def test_questions_are_the_published_prompts(model, shared_data):
    """Only English questions, each with its length of answer."""
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    [task] = make_task_pack(str(shared_data), "minilongbench_qa").tasks
    rows = read_rows(shared_data / "longbench" / "minilongbench.jsonl")
    rows = [row for row in rows if row["dataset"] in QA]
    assert collections.Counter(row["dataset"] for row in rows) == {k: n for k, (_, n) in QA.items()}
    requests = requests_of(task, None)
    assert [asked[:2] for asked in requests] == [
        ("generate_until", x["origin_prompt"]) for x in rows
    ]
    lm, asked = HarnessLM(model, max_length=16_000), []
    lm.generator = lambda prompts, samplings, **_: asked.extend(samplings) or []
    with pytest.raises(ValueError, match="zip"):  # nothing is answered
        lm.generate_until(task.instances)
    assert [one.max_new_tokens for one in asked] == [QA[row["dataset"]][0] for row in rows]
    assert [doc["answers"] for doc in task.eval_docs] == [row["gold"] for row in rows]


# ---- scores


def oracle_rouge(prediction, answer):
    """Union of the LCS of every pair of sentences, as sets of words: 2 P R / (P + R)."""

    def lcs(x, y):
        @functools.cache
        def length(i, j):
            if not i or not j:
                return 0
            if x[i - 1] == y[j - 1]:
                return length(i - 1, j - 1) + 1
            return max(length(i - 1, j), length(i, j - 1))

        i, j, words = len(x), len(y), set()
        while i and j:
            if x[i - 1] == y[j - 1]:
                words.add(x[i - 1])
                i, j = i - 1, j - 1
            elif length(i - 1, j) > length(i, j - 1):
                i -= 1
            else:
                j -= 1
        return words

    hyp, ref = ([s.split() for s in text.split(".") if s.strip()] for text in (prediction, answer))
    hits = set()
    for x in ref:
        for y in hyp:
            hits |= lcs(tuple(x), tuple(y))
    precision = len(hits) / len({word for s in hyp for word in s})
    recall = len(hits) / len({word for s in ref for word in s})
    return 2 * precision * recall / (precision + recall)


def test_rouge_against_the_formula(shared_data):
    rows = read_rows(shared_data / "longbench" / "multi_news.jsonl")[:6]
    seen = []
    for row, other in zip(rows, rows[1:], strict=False):
        answer = row["answers"][0]
        for said in (other["answers"][0], " ".join(row["context"].split()[:120])):
            seen.append(rouge_l(said, answer))
            assert seen[-1] == pytest.approx(oracle_rouge(said, answer), abs=1e-9)
    assert 0.05 < min(seen) < max(seen) < 0.6
    # In common: the, cat, dog; of 5 distinct words and of 3.
    assert rouge_l("the cat sat. a dog", "the dog. the cat") == pytest.approx(6 / 8)
    assert rouge_l("a b. c", "a b. c") == 1.0
    assert [rouge_l(text, "a b") for text in ("", ".", " ", "c")] == [0.0] * 4


def oracle_f1(prediction, answer):
    def words(text):
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in re.split(r"\s+", text) if word and word not in ("a", "an", "the")]

    said, meant = words(prediction), words(answer)
    same = sum(min(said.count(word), meant.count(word)) for word in set(said))
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(meant)
    return 2 * precision * recall / (precision + recall)


def test_answers_are_scored_as_by_longbench(shared_data):
    """The best score over the answers; for TriviaQA, of the first line that is not empty."""
    [task] = make_task_pack(str(shared_data), "minilongbench_qa").tasks
    seen = collections.Counter()
    for doc in task.eval_docs:
        gold = doc["answers"][-1]
        for said in (gold, f" The {gold}, the city of Rome.", "nothing"):
            scores = task.process_results(doc, [said])
            best = max(oracle_f1(said, answer) for answer in doc["answers"])
            assert scores == {"f1": pytest.approx(best, abs=1e-12)}
            seen[round(best, 1)] += 1
        lines = task.process_results(doc, [f"\n{gold}\nQuestion: who?"])["f1"]
        assert (lines == 1.0) == (doc["dataset"] == "triviaqa")
    assert seen[1.0] >= 67 and seen[0.0] >= 60 and len(seen) > 4
    [news] = make_task_pack(str(shared_data), "longbench_multi_news").tasks
    doc = {"answers": ["a b", "c d"]}
    assert news.process_results(doc, ["c d e"]) == {"rouge_l": pytest.approx(4 / 5)}


# ---- long prompts


def test_long_prompts_lose_their_middle(model, shared_data):
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    lm = HarnessLM(model, max_length=100)
    ids = lm.tok_encode("".join(map(chr, range(48, 123))) * 4)
    text = lm.tokenizer.decode(ids)
    for new, first, last in ((80, 10, 10), (79, 11, 10), (99, 1, 0)):
        prompt = lm._prompt(text, new, middle=True)
        assert prompt == [*ids[:first], *ids[len(ids) - last :]]
    assert lm._prompt("short", 80, middle=True) == lm.tok_encode("short")
    # Given in the row.
    asked, answer = [], Generation("x", [5], "eos")
    lm.generator = lambda prompts, *_, **__: asked.extend(prompts) or [answer] * len(prompts)
    requests = [instance(text, {"max_gen_toks": 80}) for _ in range(2)]
    requests[1].doc = {"cut": "middle"}
    lm.generate_until(requests)
    assert asked == [ids[-20:], [*ids[:10], *ids[-10:]]]


def test_a_run(model, shared_data, tmp_path):
    """Real rows, thousands of tokens, in a model of 160 positions."""
    settings = {"data_root": str(shared_data), "tasks": ("minilongbench_qa",)}
    config = config_of("harness", model="x", limit=2, **settings)
    scores = evaluate_tasks(check_config(config), model, tmp_path)["tasks"]["minilongbench_qa"]
    assert scores["n"] == 2 and scores["shots"] == 0 and 0 <= scores["f1"] <= 1
    assert np.isfinite(scores["f1"]) and "f1_low" not in scores
