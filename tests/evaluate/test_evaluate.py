"""`scripts/evaluate.py`: perplexity as torch computes it; every bad input in one line."""

import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
import tiny_models
from tiny_models import LLAMA, TEXT, config_of, random_params, run_script, tiny_of
from tiny_runs import read_rows, refused, write_halves, write_rows

from ffn_heterogeneity.evaluate.classify import classify, classify_file
from ffn_heterogeneity.evaluate.inputs import read_token_ids
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.evaluate.run import check_config, run
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.report import frame as frames

pytestmark = pytest.mark.usefixtures("compiled_quickly")
GEMMA2 = tiny_of("gemma2", layers=4)


def windows(bos, window, count):
    """The protocol, written again for this test: ids of bytes; `window` predictions in each row."""
    ids = tiny_models.byte_tokenizer().encode(TEXT, add_special_tokens=False)
    assert len(ids) == len(TEXT.encode())
    rows = []
    for i in range(count):
        chunk = ids[i * window : (i + 1) * window]
        before = 0 if bos == "segment" or i == 0 else ids[i * window - 1]
        row = ids[i * window : (i + 1) * window + 1] if bos == "none" else [before, *chunk]
        rows.append(row)
    return rows


@pytest.mark.parametrize("bos", ["segment", "stream", "none"])
def test_text_equals_torch(torch, model, text, tmp_path, bos):
    settings = {"batch_size": 4, "window": 40, "max_windows": 7, "bos": bos}
    results = run(config_of("perplexity", model=str(model), text=str(text), **settings), tmp_path)
    theirs = tiny_models.torch_model(torch, model)
    total, count = tiny_models.torch_nll(torch, theirs, windows(bos, 40, 7))
    assert (results["tokens"], results["windows"], results["bos"]) == (count, 7, bos)
    assert count == 280
    assert abs(results["nll"] - total / count) < 1e-5
    assert math.isclose(results["perplexity"], math.exp(total / count), rel_tol=1e-5)
    assert 20 < results["perplexity"] < 20000, "a random model is worse than guessing, not absurd"
    assert json.loads((tmp_path / "results.json").read_text()) == results
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"results.json", "rows.jsonl"}


def test_every_second_window_is_saved_with_its_document(model, tmp_path):
    text = "".join(f"# {i}\n{'ab' * (30 * i + 20)}\n" for i in range(4))  # a token per byte
    (tmp_path / "text.txt").write_text(text)
    spread = {"window": 20, "window_every": 2, "document": "^# ", "bos": "segment"}
    config = config_of("perplexity", model=str(model), text=str(tmp_path / "text.txt"), **spread)
    results = run(config, tmp_path / "run")
    middles = range(10, len(text) // 20 * 20, 40)
    assert results["window_documents"] == [text[: i + 1].count("# ") for i in middles]
    assert len(results["nll_windows"]) == len(middles) and results["window_documents"][-1] == 4
    config.text, config.token_ids = "", str(tmp_path / "ids.npy")
    np.save(config.token_ids, np.zeros((2, 5), int))
    refused("needs text, got token_ids", run, config, tmp_path / "ids")


def test_a_directory_of_texts_is_measured_together_and_text_by_text(model, tmp_path):
    folder, separate = tmp_path / "texts", {}
    folder.mkdir()
    (folder / "notes.json").write_text("no text")
    spread = {"model": str(model), "window": 20, "window_every": 2, "max_windows": 3}
    config = config_of("perplexity", text=str(folder), **spread)
    refused("a directory with 0 text files", run, config, tmp_path / "empty")
    for name, length in (("a", 50), ("b", 400)):
        (folder / f"{name}.txt").write_text("# 1\n# 2\n" + name * length)
        one = config_of("perplexity", text=str(folder / f"{name}.txt"), **spread)
        separate[name] = run(one, tmp_path / name)
    config.document = "^# "
    results = run(config, tmp_path / "run")
    assert [one["windows"] for one in results["texts"].values()] == [1, 3]
    for name, one in separate.items():
        for what in ("nll", "accuracy"):
            assert results["texts"][name][what] == pytest.approx(one[what], rel=1e-6)
    assert results["nll"] == pytest.approx(np.mean(results["nll_windows"]), rel=1e-6)
    assert len(set(results["window_documents"][1:]) & set(results["window_documents"][:1])) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/rows.jsonl").read_text().splitlines()]
    [units] = [row["units"] for row in rows if row["what"] == "texts/b/nll"]
    its = frames.units(str(tmp_path / "run"), units)
    assert np.mean([*its.values()]) == pytest.approx(results["texts"]["b"]["nll"], rel=1e-6)
    assert [place for _, place in its] == [1, 2, 3]
    assert {"texts/a/nll", "texts/b/accuracy"} <= {row["what"] for row in rows}
    (folder / "README.md").write_text("no data")
    (folder / "a.TXT").write_text("the same name")
    refused("3 text files .* of 2 names", run, config, tmp_path / "names")


@pytest.mark.parametrize("dtype", [np.int64, np.uint16])
def test_token_ids_are_used_whole(torch, model, tmp_path, dtype):
    rows = np.random.default_rng(0).integers(0, 258, (5, 33)).astype(dtype)
    np.save(tmp_path / "ids.npy", rows)
    config = config_of("perplexity", model=str(model), token_ids=str(tmp_path / "ids.npy"))
    results = run(config, tmp_path / "run")
    total, count = tiny_models.torch_nll(torch, tiny_models.torch_model(torch, model), rows)
    assert results["tokens"] == count == 5 * 32
    assert abs(results["nll"] - total / count) < 1e-5
    assert results["bos"] == "in token_ids"


def test_batches_do_not_matter_and_soft_caps_count():
    """Against a float64 sum over our own logits; the final soft-cap of Gemma-2 included."""
    params = random_params(GEMMA2)
    assert GEMMA2.final_softcap is not None
    rows = np.random.default_rng(0).integers(0, 29, (5, 11))
    logits = tiny_models.our_logits(GEMMA2, params, rows[:, :-1]).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows[:, -1] = logits[:, -1].argmax(-1)  # the last prediction is right
    expected = -np.take_along_axis(log_p, rows[:, 1:, None], -1).mean()
    right = logits.argmax(-1) == rows[:, 1:]
    for batch_size in (1, 2, 5, 64):
        result = perplexity(GEMMA2, params, rows, batch_size=batch_size, progress=None)
        assert abs(result["nll"] - expected) < 1e-6
        assert result["tokens"] == 50
        assert np.allclose(result["accuracy_windows"], right.mean(1))
        assert result["accuracy"] == pytest.approx(right.mean())


def test_a_broken_model_has_infinite_perplexity(tmp_path):
    """An infinite perplexity is not an overflow error, because attacks may cause it."""
    params = random_params(LLAMA)
    params["embed"]["embedding"] = params["embed"]["embedding"] * np.float32(3e4)
    rows = np.random.default_rng(0).integers(0, 258, (1, 9))
    result = perplexity(LLAMA, params, rows, progress=None)
    assert result["nll"] > 700 and result["perplexity"] == math.inf


def save_archive(path, ids):
    with path.open("wb") as file:
        np.savez(file, ids=ids)


def save_half(path, ids):
    np.save(path, ids)
    path.write_bytes(path.read_bytes()[:-5])


OBJECTS = np.array([[1, 2], [3]], dtype=object)
BAD_IDS = {
    "pickle": (lambda path, ids: path.write_bytes(pickle.dumps(ids)), "plain .npy array"),
    "objects": (lambda path, _: np.save(path, OBJECTS, allow_pickle=True), "plain .npy array"),
    "archive": (save_archive, "plain .npy array"),
    "truncated": (save_half, "plain .npy array"),
    "text": (lambda path, _: path.write_text("1 2 3"), "plain .npy array"),
    "empty": (lambda path, _: path.write_bytes(b""), "plain .npy array"),
    "nowhere": (lambda *_: None, "ids.npy"),
    "floats": (lambda path, x: np.save(path, x + 0.0), "float64; expected integers"),
    "booleans": (lambda path, x: np.save(path, x > 9), "bool; expected integers"),
    "too large": (lambda path, x: np.save(path, x + 258), "outside the vocabulary of 258"),
    "negative": (lambda path, x: np.save(path, x - 400), "outside the vocabulary of 258"),
    "1-D": (lambda path, x: np.save(path, x[0]), "(8,); expected [windows, length >= 2]"),
    "one column": (
        lambda path, x: np.save(path, x[:, :1]),
        "(2, 1); expected [windows, length >= 2]",
    ),
    "no rows": (lambda path, x: np.save(path, x[:0]), "(0, 8); expected [windows, length >= 2]"),
}


@pytest.mark.parametrize("kind", BAD_IDS)
def test_bad_token_ids(model, tmp_path, kind):
    path, (save, word) = tmp_path / "ids.npy", BAD_IDS[kind]
    save(path, np.random.default_rng(0).integers(0, 258, (2, 8)))
    settings = {"model": model, "token_ids": path, "workdir": tmp_path / "run"}
    error = run_script("evaluate", **settings).error
    assert word in error, error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "flags", "word"),
    [
        (b"", [], "text.txt: the file is empty"),
        (b"short", [], "5 tokens, fewer than one window of 512"),
        (b"caf\xe9 " * 9, ["--config.window=4"], "UTF-8"),
        (b"some text", ["--config.window=0"], "window=0"),
        (b"some text", ["--config.window=4", "--config.max_windows=-1"], "max_windows=-1"),
        (b"some text", ["--config.window=4", "--config.bos=both"], "'both'"),
        (b"some text", ["--config.window=4", "--config.batch_size=0"], "batch_size=0"),
        (b"some text", ["--config.compute_dtype=int8"], "compute_dtype='int8'"),
        (b"some text", ["--config.token_ids=x.npy"], "exactly one of"),
        (None, [], "text.txt"),
    ],
)
def test_bad_text(model, tmp_path, content, flags, word):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    settings = {"model": model, "text": path, "workdir": tmp_path / "run"}
    error = run_script("evaluate", *flags, **settings).error
    assert word in error, error
    assert not (tmp_path / "run").exists()


def test_neither_text_nor_ids(model, tmp_path):
    with pytest.raises(ValueError, match="exactly one of --config.text"):
        run(config_of("perplexity", model=str(model)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_array_that_claims_more_than_there_is(tmp_path):
    with (tmp_path / "ids.npy").open("wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (10**14,)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match="ids.npy is not a plain .npy array") as bad:
        read_token_ids(str(tmp_path / "ids.npy"))
    assert "\n" not in str(bad.value)


def test_labels_in_every_form_of_a_file(tmp_path, capsys):
    """The accuracy does not depend on file format or type; rows without an answer are counted."""
    import datasets

    tiny_models.save_tiny_reader(tmp_path / "bert")
    write_halves(tmp_path, train=60, held_out=21)
    options = {"data__path": str(tmp_path / "train.jsonl"), "fields": "sentence", "lengths": (32,)}
    options |= {
        "labels": "low,high",
        "together": 1,
        "batch_size": 8,
        "steps": 12,
        "tensorboard": False,
    }
    options |= {"optimizer__learning_rate": 1e-2, "data__validation_fraction": 0.2}
    training.run(config_of("p32_glue", f"{tmp_path / 'bert'},labels", **options), tmp_path / "run")
    model, rows = load_model(tmp_path / "run" / "model"), read_rows(tmp_path / "held_out.jsonl")
    names = [row["label"] for row in rows]
    for name, mark in (("a.csv", ","), ("a.tsv", "\t")):
        lines = [mark.join(map(str, one)) + "\n" for one in (rows[0], *(x.values() for x in rows))]
        (tmp_path / name).write_text("".join(lines))
    data = datasets.Dataset.from_list(rows)
    data = data.cast_column("label", datasets.ClassLabel(names=["high", "low"]))
    data.to_parquet(tmp_path / "a.parquet")
    data.with_format("numpy").save_to_disk(tmp_path / "saved")

    def measured(path, labels=(), model=model):
        if labels:
            labels = iter(labels)
            write_rows(tmp_path / path, [row | {"label": next(labels)} for row in rows])
        options = {"input": str(tmp_path / path), "fields": "sentence"}
        return classify_file(
            check_config(config_of("classify", model="m", **options)), model, tmp_path
        )

    results = [
        measured(name) for name in ("held_out.jsonl", "a.csv", "a.tsv", "a.parquet", "saved")
    ]
    for kind in (int, float, bool, lambda number: str(float(number))):
        results.append(measured("b.jsonl", [kind(name == "high") for name in names]))
    assert len({one["accuracy"] for one in results}) == 1 and results[0]["accuracy"] > 0.6
    some = measured("b.jsonl", [None, "", -1, *names[3:]])
    assert (some["n"], some["rows_without_answer"]) == (18, 3)
    assert results[0]["accuracy"] == pytest.approx(np.mean(results[0]["accuracy_rows"]))
    assert some["accuracy_rows"] == results[0]["accuracy_rows"][3:]
    assert "3 of 21 rows have no single answer in 'label'" in capsys.readouterr().err
    none = measured("b.jsonl", [-1] * 21)
    assert "accuracy" not in none and none["rows_without_answer"] == 21
    words = "b.jsonl, line 2: field 'label' is 'maybe'"
    refused(words, measured, "b.jsonl", ["low", "maybe", *names[2:]])
    assert len(classify(model, "abc")) == len(classify(model, np.array(["abc"]))) == 1
    # Somebody else's model of a GLUE task: names are names, numbers are GLUE's.
    settings = model.config.head.settings | {"labels": ["POSITIVE", "NEGATIVE"], "task": ""}
    head = HeadConfig.of("classification", settings)
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, head=head))
    for kind in (["positive", "negative"], [1, 0]):
        again = measured("b.jsonl", [kind[name == "high"] for name in names], other)
        assert again["accuracy"] == results[0]["accuracy"]
    assert "mean 'negative', 'positive'" in capsys.readouterr().err
