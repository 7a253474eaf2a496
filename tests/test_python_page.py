"""docs/python.md runs, line by line; the public functions are light, typed and complete."""

import pickle
import re
import sys

import jax
import numpy as np
import pytest
from tiny_models import LLAMA, REPOSITORY, TEXT, random_params, save_tiny, structured
from tiny_runs import refused, run_program

import ffn_heterogeneity as fh
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
BLOCKS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/python.md").read_text(), re.DOTALL)


def run_page(model, out, text):
    names = {"MODEL": str(model), "OUT": out, "TEXT": text}
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), names)
    return names


def check(names):
    assert names["fh"] is fh and len(BLOCKS) > 8
    one, other = (flatten(names[name].params) for name in ("trained", "again"))
    assert list(one) == list(other)
    assert all(np.asarray(x).tobytes() == other[p].tobytes() for p, x in one.items())
    assert any(p.endswith("lora_b") and np.any(x) for p, x in one.items()), "LoRA moved"
    before = flatten(names["model"].params)
    assert all(np.array_equal(x, one[p]) for p, x in before.items()), "and nothing else"
    assert np.isfinite(names["before"]) and names["report"]["parameters_removed_percent"] > 1


def test_every_line_runs(tmp_path, capsys):
    names = run_page(save_tiny(tmp_path / "model"), tmp_path, TEXT)
    check(names)
    assert str(LLAMA.n_layers) in capsys.readouterr().out


@pytest.mark.slow
def test_every_line_runs_on_smollm2(smollm2_gguf, tmp_path):
    check(run_page(smollm2_gguf, tmp_path, TEXT))


def test_a_models_table(tmp_path):
    save_tiny(tmp_path / "plain")
    model = fh.load_model(tmp_path / "plain")
    table = repr(model)
    assert len(table.splitlines()) <= 20 and "plain weights" in table
    total = sum(x.size for x in flatten(model.params).values())
    assert f"{total:,}" in table and "array" not in table
    params = structured(LLAMA, random_params(LLAMA))
    shown = repr(type(model)(LLAMA, params, None, "x"))
    assert "lora_a, lora_b, lora_scale, mask, neuron_scale" in shown and "none" in shown


def test_import_is_light():
    """Less than 0.3 s after `import jax`, in one of three tries."""
    code = (
        "import jax, time; start = time.perf_counter(); import ffn_heterogeneity; "
        "print(time.perf_counter() - start)"
    )
    assert any(float(run_program(sys.executable, "-c", code).out) < 0.3 for _ in range(3))


def test_the_face_is_whole(tmp_path):
    assert {"load_model", "save_model", "generate", "perplexity", "losses"} <= set(dir(fh))
    assert all(getattr(fh, name) is not None for name in dir(fh))
    reference = (REPOSITORY / "docs" / "reference" / "face.md").read_text()
    assert set(re.findall(r"autofunction:: (\w+)", reference)) == {*fh._FACE}
    with pytest.raises(AttributeError, match="'load_modle': there are .*load_model"):
        fh.load_modle  # noqa: B018
    assert (REPOSITORY / "ffn_heterogeneity" / "py.typed").exists()
    silent = fh.io.load.Model(LLAMA, random_params(LLAMA), None, "here")
    for use in (fh.generate, fh.perplexity):
        refused("here has no tokenizer", use, silent, "text")


def test_chat_and_several_prompts(tmp_path):
    model = fh.load_model(save_tiny(tmp_path / "model"))
    one, two = fh.generate(model, ["ab", "cd"], 4)
    assert fh.generate(model, "ab", 4) == one and isinstance(two, str)
    assert isinstance(fh.generate(model, "ab", 4, chat=True), str)
    assert fh.generate(model, "ab", 4, temperature=5.0, seed=2) != one


def test_verbs_are_the_surgeries(tmp_path):
    model = fh.load_model(save_tiny(tmp_path / "model"))
    named = {
        "prune": {"criterion": "gini", "ratio": 0.5, "layers": "top"},
        "fuse": {"method": "merged", "ratio": 0.5, "seed": 3},
        "partition": {"experts": 4, "top_k": 2, "router": "means", "layers": "top"},
        "upcycle": {"experts": 2, "top_k": 1, "noise": 1.0},
        "attack": {"k": 1, "attack": "retain"},
        "lora": {"rank": 2, "targets": "ffn/"},
    }
    made = {}
    for name, settings in named.items():
        made[name], report = getattr(fh, name)(model, **settings)
        key = jax.random.key(0) if name == "lora" else None
        wanted, expected_report = fh.surgery.SURGERIES[name](model, settings, key=key)
        assert report == expected_report
        one, other = flatten(made[name].params), flatten(wanted.params)
        assert all(np.array_equal(x, other[path]) for path, x in one.items()) and len(one)
        refused("unknown setting 'rato'", getattr(fh, name), model, rato=0.5)
    ffn = fh.ffn(made["lora"], 2)
    assert set(ffn["down"]) == {"kernel", "lora_a", "lora_b", "lora_scale"}
    expected = unstack(made["lora"].params)["layers"][2]["ffn"]
    jax.tree.map(np.testing.assert_array_equal, ffn, expected)
    for layer in (-1, 4, "down"):
        refused(f"layer={layer!r}: the model has layers 0 to 3", fh.ffn, model, layer)
    plain, _ = fh.fold(made["lora"])
    assert not [path for path in flatten(plain.params) if "lora" in path]


def test_a_model_with_its_report_is_told_from_a_model(tmp_path):
    model = fh.load_model(save_tiny(tmp_path / "model"))
    pair = fh.fold(model)
    uses = {fh.prune: (), fh.fold: (), fh.analyze: ("massive",), fh.generate: ("a",)}
    uses |= {fh.perplexity: (TEXT,), fh.save_model: (tmp_path / "x",)}
    uses |= {fh.hidden_states: (["a"],), fh.classify: (["a"],), fh.ffn: (0,)}
    for use, arguments in uses.items():
        refused("take the first of the two", use, pair, *arguments)
        refused("fh.load_model reads one", use, "smollm2", *arguments)


def test_analyze_is_the_command(tmp_path):
    model = fh.load_model(save_tiny(tmp_path / "model"))
    results = fh.analyze(model, "connectivity", tmp_path / "kept")
    assert (tmp_path / "kept" / "connectivity.png").exists()
    assert fh.results(tmp_path / "kept").what.str.contains("entropy").any()
    sums = fh.losses.nucl.layer_statistics(model.params)
    assert results["layers"][0]["gini"] == pytest.approx(sums[0]["gini"])
    smaller, _ = fh.prune(model, ratio=0.5)
    wanted = fh.losses.nucl.layer_statistics(smaller.params)[0]["gini"]
    assert fh.analyze(smaller, "connectivity")["layers"][0]["gini"] == pytest.approx(wanted)
    refused("analysis", fh.analyze, model, "massiv")
    refused("unknown key 'lyer'", fh.analyze, model, "massive", lyer=1)


def test_the_guesses_of_the_page(tmp_path):
    """Each call works, or its error has the name in the page; few have no answer."""
    page = (REPOSITORY / "docs/python.md").read_text().partition("## Calls from other libraries")[2]
    guesses = re.findall(r"^\| `(.+?)` \| (.+?) \|$", page, re.M)
    path = save_tiny(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 3)
    names = {"fh": fh, "MODEL": str(path), "TEXT": TEXT, "OUT": tmp_path}
    names |= {"TEXT_FILE": str(tmp_path / "text.txt"), "model": fh.load_model(path)}
    names["adapted"] = fh.lora(names["model"], rank=2)[0]
    unanswered = [code for code, answer in guesses if answer.startswith("no")]
    for code, answer in guesses:
        if answer == "works":
            exec(code, names)
            continue
        with pytest.raises(TypeError if code in unanswered else AttributeError) as said:
            exec(code, names)
        assert code in unanswered or answer.strip("`") in str(said.value), code
    assert len(guesses) >= 30 and len(unanswered) <= 4


def test_guesses_are_answered_by_the_right_name():
    """Every suggested name exists; a method of other libraries is a function here."""
    assert set(fh.GUESSES).isdisjoint(dir(fh))
    for name, hint in fh.GUESSES.items():
        refused(re.escape(f"that is {hint}"), getattr, fh, name, error=AttributeError)
        for word in re.findall(r"fh\.(\w+)", hint):
            assert hasattr(fh, word)
    model = fh.io.load.Model(LLAMA, random_params(LLAMA), None, "here")
    for name, hint in (("generate", "fh.generate"), ("save_pretrained", "fh.save_model")):
        refused(f"functions take the model: {hint}", getattr, model, name, error=AttributeError)
    with pytest.raises(AttributeError, match="a Model has no 'x'$"):
        model.x  # noqa: B018
    copied = pickle.loads(pickle.dumps(model))
    assert copied.source == "here" and copied.config == LLAMA


@pytest.mark.parametrize(
    ("config", "settings", "name"),
    [("nucl_finetune:smollm2,text", {"seeds": (0, 1)}, "seeds"), ("shrink", {}, "stages")],
)
def test_fit_is_of_one_training(tmp_path, config, settings, name):
    refused(f"{name}=.*call run", fh.fit, config, tmp_path / "run", **settings)


def test_fit_trains(tmp_path):
    path = save_tiny(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 3)
    text = str(tmp_path / "text.txt")
    settings = {"data__path": text, "data__validation_fraction": 0.3, "data__passage_chars": 50}
    settings |= {"steps": 2, "batch_size": 2, "seq_len": 16, "eval__max_batches": 1}
    config = f"nucl_finetune:{path},text"
    model, results = fh.fit(config, tmp_path / "run", tensorboard=False, **settings)
    assert results["steps"] == 2
    before = flatten(fh.load_model(path).params)
    assert any(not np.array_equal(x, before[name]) for name, x in flatten(model.params).items())
