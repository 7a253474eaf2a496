"""The mixture: exact proportions, one stream for all processes, resumable, split by rows."""

import collections
import json
import logging

import numpy as np
import pytest
from batch_tools import check_resumes, same, take, texts_of
from tiny_runs import refused

from ffn_heterogeneity.data import mixtures
from ffn_heterogeneity.data.mixtures import EvenDraws, MixedSource, open_task
from ffn_heterogeneity.data.pipeline import make_pipeline, split_records
from ffn_heterogeneity.data.sources import DataError, ListSource, Subset, open_source
from ffn_heterogeneity.data.tasks import get_task

SIZES = {"boolq": 9427, "cb": 250, "copa": 400, "multirc": 27243, "record": 138854}
SIZES |= {"rte": 2490, "wic": 5428, "wsc": 259, "dpr": 1322}


def rows_of(name, number):
    """A row in the official form with a unique text."""
    text, tag = f"{name} {number}", {"idx": number}
    if name == "multirc":
        answers = [{"text": f"a{i}", "idx": i, "label": i % 2} for i in range(3)]
        questions = [{"question": text, "idx": number, "answers": answers}]
        return tag | {"passage": {"text": text, "questions": questions}}
    if name == "record":
        passage = {"text": f"Ann Bob {number}", "entities": [{"start": 0, "end": 2}]}
        answers = [{"start": 0, "end": 2, "text": "Ann"}, {"start": 4, "end": 6, "text": "Bob"}]
        asked = [{"query": text, "idx": number, "answers": answers}]
        return tag | {"passage": passage, "qas": asked}
    span = {"span1_text": "Ann", "span2_text": "she", "span2_index": 1}
    she = f"Ann she {number}"
    named = {"sentence": she, "pronoun": "she", "candidates": ["Ann", "Bob"], "label": 0}
    cause = {"choice1": "a", "choice2": "b", "question": "cause", "label": 0}
    rows = {
        "boolq": {"passage": text, "question": "q", "label": True},
        "cb": {"premise": text, "hypothesis": "h", "label": "neutral"},
        "copa": {"premise": text, **cause},
        "rte": {"premise": text, "hypothesis": "h", "label": "entailment"},
        "wic": {"sentence1": text, "sentence2": "s", "word": "w", "label": False},
        "wsc": {"text": she, "target": span, "label": number % 2 == 0},
    }
    return named if name == "dpr" else tag | rows[name]


OFFICIAL = {"boolq": "BoolQ", "multirc": "MultiRC", "record": "ReCoRD", "wsc": "WSC"}


@pytest.fixture
def root(write):
    """All nine tasks, six rows each, under the three kinds of folder names."""
    for name in SIZES:
        folder = OFFICIAL.get(name, f"superglue_{name}" if name < "e" else name)
        rows = [rows_of(name, number) for number in range(6)]
        path = write(f"root/{folder}/train.jsonl", rows)
        if name != "dpr":
            write(f"root/{folder}/{'val' if name in OFFICIAL else 'validation'}.jsonl", rows[:2])
    return path.rsplit("/", 2)[0]


# ---- proportions


@pytest.mark.parametrize("weights", [[1], [3, 1], [7, 7, 2], [1, 1000, 13], [5, 3, 2, 1]])
def test_draws_are_exact_and_even(weights):
    draws, total = EvenDraws(weights), sum(weights)
    taken = collections.Counter()
    for k in range(3 * total):
        member, turn = draws[k]
        assert turn == taken[member], "draws of a member count 0, 1, 2, ..."
        taken[member] += 1
        for i, weight in enumerate(weights):
            # Each member is at most one draw from its exact share.
            assert abs(taken[i] - (k + 1) * weight / total) <= len(weights), (k, i)
    assert [taken[i] for i in range(len(weights))] == [3 * weight for weight in weights]


def test_a_stretch_of_the_real_weights():
    draws, names = EvenDraws(list(SIZES.values())), list(SIZES)
    total = sum(SIZES.values())
    for start in (5 * total,):
        seen = collections.Counter(names[draws[start + k][0]] for k in range(total))
        assert seen == SIZES
    first = collections.Counter(names[draws[k][0]] for k in range(1000))
    assert abs(first["record"] - 748) <= 4 and first["cb"] >= 1 and first["wsc"] >= 1


def mixed(**sizes_and_weights):
    members = [
        (name, weight, ListSource(name, [{"n": i} for i in range(size)], [name] * size))
        for name, (size, weight) in sizes_and_weights.items()
    ]
    return MixedSource("mixture", members)


def draws_of(source, count, seeds):
    records = mixtures.mixed_records(source, Subset(source, range(len(source))), seeds)
    drawn = [records[k]["record"] for k in range(count)]
    return [(record["member"], record["record"]["n"]) for record in drawn]


def test_a_member_as_large_as_its_weight_is_read_once_a_stretch():
    source = mixed(a=(12, 12), b=(3, 3), c=(5, 5))
    assert source.where(0) == "a" and source.where(12) == "b" and source.where(19) == "c"
    stretches = draws_of(source, 40, [1, 2, 3])
    sizes = {"a": 12, "b": 3, "c": 5}
    everything = [(name, i) for name, size in sizes.items() for i in range(size)]
    assert sorted(stretches[:20]) == sorted(stretches[20:]) == everything
    assert stretches[:20] != stretches[20:], "a new order each time"
    assert draws_of(source, 40, [1, 2, 3]) == stretches != draws_of(source, 40, [1, 2, 4])
    unshuffled = draws_of(source, 20, None)
    assert [n for name, n in unshuffled if name == "a"] == list(range(12))


def test_a_small_member_starts_again_and_a_large_one_goes_on():
    source = mixed(small=(2, 6), large=(50, 6))
    seen = draws_of(source, 24, [1, 2])
    assert collections.Counter(n for name, n in seen if name == "small") == {0: 6, 1: 6}
    large = [n for name, n in seen if name == "large"]
    assert len(set(large)) == 12


# ---- the pipeline


def pipeline_of(root, tokenizer, seed=0, batch_size=4, seq_len=96, rows=None, **config):
    config = {"task": "superglue", "path": root, **config}
    return make_pipeline(config, tokenizer, batch_size, seq_len, seed, rows=rows)


def prompts_of(batches):
    return texts_of(batches, "tokens")


def test_first_draws_and_targets(root, characters):
    pipeline = pipeline_of(root, characters(), packing=False)
    assert len(pipeline.train) == 9 * 6 + 2 * 6 + 6 - 3  # multirc x 3, record x 2, half of wsc
    iterator = pipeline.train_iterator()
    prompts = prompts_of(take(iterator, 60))
    iterator.close()
    seen = collections.Counter(prompt.split(" ")[0] for prompt in prompts)
    assert len(prompts) == 240 and seen["record"] in range(178, 182) and seen["multirc"] > 30


def test_resumes_to_the_very_next_batch(root, characters):
    def make():
        return pipeline_of(root, characters(), seed=3).train_iterator()

    iterator, _, batches = check_resumes(make, 14, (0, 1, 5, 12))
    iterator.close()
    other = pipeline_of(root, characters(), seed=4).train_iterator()
    assert not same(next(other), batches[0])
    other.close()


def test_processes_share_the_rows_and_any_number_goes_on(root, characters):
    def processes(count):
        shares = np.arange(8).reshape(count, -1)
        return [
            pipeline_of(root, characters(), batch_size=8, rows=share).train_iterator()
            for share in shares
        ]

    def step(iterators):
        parts = [next(iterator) for iterator in iterators]
        states = [iterator.get_state() for iterator in iterators]
        assert all(state == states[0] for state in states)
        return {key: np.concatenate([shard[key] for shard in parts]) for key in parts[0]}, states[0]

    [alone] = processes(1)
    batches = [step([alone])[0] for _ in range(8)]
    two, four = processes(2), processes(4)
    for batch in batches[:5]:
        joined, state = step(two)
        assert same(batch, joined)
    for iterator in four:
        iterator.set_state(json.loads(json.dumps(state)))
    for batch in batches[5:]:
        assert same(batch, step(four)[0])
    for iterator in (alone, *two, *four):
        iterator.close()


def test_a_finite_pass_is_as_many_draws_as_records(root, characters):
    pipeline = pipeline_of(root, characters(), packing=False)
    iterator = pipeline.train_iterator(epochs=1)
    list(iterator)
    assert iterator.counts.documents == iterator.counts.kept == len(pipeline.train)
    batches = list(pipeline.train_iterator(epochs=2))
    assert len(prompts_of(batches)) == 2 * len(pipeline.train)


def test_a_state_of_another_mixture_is_refused(root, characters):
    state = pipeline_of(root, characters()).train_iterator().get_state()
    with pytest.raises(DataError, match="another pipeline.*members was"):
        pipeline_of(root, characters(), with_dpr=False).train_iterator().set_state(state)


# ---- held-out rows


def test_no_passage_is_on_both_sides(root, characters):
    source = open_task(get_task("superglue"), root, "train")
    train, held = split_records(source, 0.34)
    assert sorted([*train.rows, *held.rows]) == list(range(len(source)))

    def places(subset):
        return {source.where(int(row)) for row in subset.rows}

    assert not places(train) & places(held)
    by_task = collections.Counter(source[int(row)]["member"] for row in held.rows)
    # 0.34 of six rows is two rows of each: 3 answers a row in MultiRC, 2 in ReCoRD; 3 rows of WSC.
    expected = dict.fromkeys([f"superglue_{name}" for name in SIZES], 2)
    expected |= {"superglue_multirc": 6, "superglue_record": 4, "superglue_wsc": 1}
    assert by_task == expected
    pipeline = pipeline_of(root, characters(), validation_fraction=0.34, packing=False)
    assert len(prompts_of(pipeline.validation_iterator())) == len(held)
    one, other = (pipeline_of(root, characters(), s, validation_fraction=0.34) for s in (0, 1))
    assert list(one.held_out.rows) == list(other.held_out.rows) == list(held.rows)


@pytest.mark.parametrize("how", ["validation_split", "validation_path"])
def test_validation_files_of_their_own(root, characters, how):
    held_out = {how: "validation" if how == "validation_split" else root}
    pipeline = pipeline_of(root, characters(), **held_out, packing=False)
    prompts = prompts_of(pipeline.validation_iterator())
    # Two rows of each of the eight tasks; DPR has none. WSC: only the first of them refers.
    assert len(prompts) == 5 * 2 + 2 * 3 + 2 * 2 + 1
    assert len(pipeline.train) == 69


def test_expanded_rows_keep_their_place(root):
    task = get_task("superglue_multirc")
    source = open_task(task, f"{root}/MultiRC/train.jsonl", "train")
    assert isinstance(source, mixtures.ExpandedSource) and len(source) == 18
    assert source.where(4).endswith("train.jsonl, line 2")
    assert list(source.groups[:4]) == [0, 0, 0, 1]
    # The paragraph is one object, however many answers ask about it.
    assert source[0]["paragraph"] is source[2]["paragraph"]


# ---- refusals


def test_a_missing_dpr_names_its_option(root, characters, tmp_path):
    (tmp_path / "root" / "superglue_dpr" / "train.jsonl").unlink()
    message = r"superglue_dpr: no .*root/superglue_dpr/train.jsonl .*leave it out: with_dpr=False"
    refused(message, pipeline_of, root, characters(), error=DataError)
    pipeline = pipeline_of(root, characters(), with_dpr=False)
    assert "superglue_dpr" not in {member.task for member in pipeline.train.source.parts}


def test_a_missing_task_has_no_option(root, characters, tmp_path):
    (tmp_path / "root" / "rte" / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"superglue_rte: no .*superglue_rte, RTE, rte\)$"):
        pipeline_of(root, characters())


def test_a_bad_row_of_a_member_is_placed(root, characters, write):
    write("root/rte/train.jsonl", [rows_of("rte", 0), {"premise": "p", "label": 0}])
    with pytest.raises(DataError, match=r"rte/train.jsonl, line 2: no field 'hypothesis'"):
        pipeline_of(root, characters())
    write("root/MultiRC/train.jsonl", [rows_of("multirc", 0), {"idx": 3}])
    with pytest.raises(DataError, match=r"MultiRC/train.jsonl, line 2: no field 'passage'"):
        pipeline_of(root, characters())


@pytest.mark.parametrize("path", ["nowhere", "a.jsonl", ("x", "y")])
def test_the_path_is_a_root(characters, write, path):
    if path == "a.jsonl":
        path = write(path, [{"a": 1}])
    with pytest.raises(DataError, match="a mixture's path is a directory with a folder for every"):
        pipeline_of(path, characters())


def test_sizes_that_are_not_the_weights_are_reported(root, characters, caplog):
    with caplog.at_level(logging.WARNING):
        pipeline_of(root, characters(), validation_split="validation")
    counts = map(caplog.text.count, ("superglue_record 12 of 138854", "the weight"))
    assert list(counts) == [1, 1]


def test_real_rows(shared_data, bpe):
    """The shared files, which are partial sets without DPR."""
    root = str(shared_data)
    refused("superglue_dpr.*with_dpr=False", pipeline_of, root, bpe, error=DataError, seq_len=256)
    pipeline = pipeline_of(root, bpe, seq_len=1024, with_dpr=False, validation_fraction=0.1)
    batch = next(iterator := pipeline.train_iterator())
    iterator.close()
    text = bpe.decode(batch["tokens"][0])
    assert "record query:" in text or "multirc question:" in text
    learned = bpe.decode(batch["targets"][batch["loss_mask"]])
    assert "query:" not in learned and "<eos>" in learned
    one = open_source(str(shared_data / "superglue_rte" / "train.jsonl"))
    sizes = {member.task: len(member.source) for member in pipeline.train.source.parts}
    assert sizes["superglue_rte"] == len(one)
