"""Files from elsewhere have the same meaning as in transformers, or are rejected by name."""

import contextlib
import dataclasses
import json
import sys

import numpy as np
import pytest
import theirs
from safetensors.numpy import load_file, save_file
from test_tokenizers_out import BERTS, word_pieces
from tiny_models import LLAMA, byte_tokenizer, config_of, random_params, save_tiny, tiny_of
from tiny_runs import refused, run_program, stop_at_batch, write_rows

import ffn_heterogeneity as fh
from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks import messages
from ffn_heterogeneity.data.tasks.base import Fields
from ffn_heterogeneity.data.tasks.messages import encode_conversation, end_of_turn
from ffn_heterogeneity.io import child
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_config, load_model
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.models.sampling import own_settings

TEXTS = ["a good film", "a bad day", "x"]
PAIRS = [("a good film", "no"), ("bad", "so long a day")]


def rewrite(directory, name: str = "config.json", **changes) -> None:
    """Changes keys of a JSON file; None removes a key."""
    path = directory / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (values | changes).items() if v is not None}))


# ---- rotary embeddings

LINEAR, YARN = {"type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
FIVE = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 5e5}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
READ = [
    {"rope_scaling": LINEAR, "rope_parameters": None},
    {"rope_scaling": LINEAR, "rope_parameters": PLAIN},
    {"rope_scaling": {**LINEAR, "rope_theta": 7e5}, "rope_parameters": FIVE},
    {"rope_scaling": LINEAR, "rope_theta": 3e5, "rope_parameters": None},
    {"rope_scaling": {"rope_type": "default"}, "rope_theta": 5e5, "rope_parameters": FIVE},
    {"rope_scaling": None, "rope_parameters": FIVE},
    {"rope_scaling": {}, "rope_parameters": FIVE, "rope_theta": 3e5},
    {"rope_scaling": LLAMA3, "rope_parameters": {**FIVE}},
]
REJECTED = [
    ({"rope_scaling": YARN}, "rope type 'yarn'"),
    ({"rope_scaling": YARN, "rope_parameters": PLAIN}, "rope type 'yarn'"),
    ({"rope_parameters": YARN, "rope_scaling": None}, "rope type 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ({"rope_scaling": {**LINEAR, "rope_type": "default"}}, "got .'default', 'linear'."),
    ({"rope_scaling": LINEAR, "rope_parameters": FIVE, "rope_theta": None}, "rope_theta=500000"),
    ({"rope_parameters": {"full_attention": FIVE}, "rope_scaling": None}, "per kind of layer"),
    ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("keys", READ)
def test_ropes_are_those_of_transformers(tmp_path, torch, family, keys):
    from transformers import AutoConfig

    save_pretrained(config := tiny_of(family, 1), random_params(config), tmp_path / "m")
    rewrite(tmp_path / "m", rope_theta=None)
    rewrite(tmp_path / "m", **keys)
    want = AutoConfig.from_pretrained(tmp_path / "m").rope_parameters
    rope = load_config(tmp_path / "m").layers[0].rope
    assert rope.theta == want["rope_theta"]
    assert rope.linear_factor == (want["factor"] if want["rope_type"] == "linear" else 1)
    assert (rope.llama3 is not None) == (want["rope_type"] == "llama3")
    assert rope.llama3 is None or rope.llama3[0] == want["factor"]


@pytest.mark.parametrize(("keys", "words"), REJECTED)
def test_other_ropes_are_rejected(tmp_path, keys, words):
    save_pretrained(config := tiny_of("llama", 1), random_params(config), tmp_path / "m")
    rewrite(tmp_path / "m", rope_theta=None)
    rewrite(tmp_path / "m", **keys)
    refused(words, load_config, tmp_path / "m", error=CheckpointError)


def test_gemma_3_reads_scaling_as_transformers(tmp_path, torch):
    from transformers import AutoConfig

    save_pretrained(config := tiny_of("gemma3"), random_params(config), tmp_path / "m")
    rewrite(tmp_path / "m", rope_scaling={"rope_type": "linear", "factor": 8.0})
    want = AutoConfig.from_pretrained(tmp_path / "m").rope_parameters["full_attention"]
    full = [layer.rope for layer in load_config(tmp_path / "m").layers if layer.window is None]
    assert {(rope.linear_factor, rope.theta) for rope in full} == {(8.0, want["rope_theta"])}
    assert want["factor"] == 8.0
    rewrite(tmp_path / "m", rope_scaling=YARN)
    refused("rope type 'yarn'", load_config, tmp_path / "m", error=CheckpointError)


# ---- classifiers


def torch_classifier(torch, directory, kind: str = "Bert", **settings):
    """A classifier of transformers with random weights, saved with a BERT-like tokenizer."""
    import transformers as tf

    made = word_pieces(True)
    tokens = tf.PreTrainedTokenizerFast(tokenizer_object=made, **BERTS)
    sizes = {"vocab_size": made.get_vocab_size(), "pad_token_id": 0}
    if kind == "GPT2":
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        sizes |= {"bos_token_id": 2, "eos_token_id": 3}
        tokens.bos_token = "[CLS]"
        made.post_processor = word_pieces(True).post_processor
    else:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 48, "max_position_embeddings": 64, "type_vocab_size": 2}
    torch.manual_seed(0)
    config = getattr(tf, f"{kind}Config")(**sizes, **settings)
    model = getattr(tf, f"{kind}ForSequenceClassification")(config).eval()
    for leaf in model.parameters():
        torch.nn.init.normal_(leaf, std=0.4) if leaf.ndim > 1 else None
    model.save_pretrained(directory)
    tokens.save_pretrained(directory)
    return directory


def scores(directory) -> list[dict]:
    """The results of transformers' pipeline for texts and pairs: label -> score."""
    from transformers import pipeline

    ask = pipeline("text-classification", model=str(directory), top_k=None)
    given = [*TEXTS, *({"text": a, "text_pair": b} for a, b in PAIRS)]
    return [{one["label"]: one["score"] for one in ask([text])[0]} for text in given]


NAMES = ("toxic", "rude", "kind")
PROBLEMS = [
    ("multi_label_classification", NAMES),
    ("multi_label_classification", NAMES[:1]),
    ("single_label_classification", NAMES),
    (None, NAMES),
    ("regression", NAMES),
    ("regression", NAMES[:1]),
]


@pytest.mark.parametrize("kind", ["Bert", "GPT2"])
@pytest.mark.parametrize(("problem", "names"), PROBLEMS)
def test_every_problem_type_is_answered_and_exported(tmp_path, torch, kind, problem, names):
    """Texts and pairs use the ids and token types of the file's tokenizer, and its label names."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {x: i for i, x in enumerate(names)}}
    directory = torch_classifier(torch, tmp_path / "m", kind, problem_type=problem, **labels)
    want, model = scores(directory), load_model(directory)
    fh.save_model(model, tmp_path / "copy")
    assert scores(tmp_path / "copy") == [pytest.approx(row, abs=1e-6) for row in want]
    answers = []
    for one in (model, load_model(tmp_path / "copy")):
        answers += [*fh.classify(one, TEXTS), *fh.classify(one, PAIRS)]
    for ours, row in zip(answers, want * 2, strict=True):
        if problem == "regression":
            ours = ours.get("values") or {names[0]: ours["value"]}
        else:
            above = [name for name in names if row[name] > 0.5]
            best = max(row, key=row.get)
            assert ours["prediction"] == (above if problem and "multi" in problem else best)
            ours = ours["probabilities"]
        assert ours == pytest.approx(row, abs=1e-5)


def test_what_cannot_be_trained_or_read(tmp_path, torch):
    made = torch_classifier(torch, tmp_path / "m", problem_type="multi_label_classification")
    rows = write_rows(tmp_path / "r.jsonl", [{"text": x, "label": x} for x in "ab"])
    config = config_of("p32_glue", f"{made},labels", data__path=str(rows), fields="text", steps=1)
    config.lengths, config.together = (32,), 1
    refused("multi_label_classification", training.run, config, tmp_path / "run")
    rewrite(made, problem_type="ranking")
    refused("problem_type='ranking'|ranking", load_model, made, error=CheckpointError)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "GPT2"])
@pytest.mark.parametrize("pooler", [False, True])
def test_a_file_without_architectures_goes_by_its_family(tmp_path, torch, kind, pooler):
    """RoBERTa's class ignores a pooler in its file."""
    made = torch_classifier(torch, tmp_path / "m", kind, num_labels=3)
    if kind == "Roberta" and pooler:
        tensors = dict(load_file(made / "model.safetensors"))
        noise = np.random.default_rng(0).normal(size=(32, 32)).astype("f4")
        tensors |= {"roberta.pooler.dense.weight": noise, "roberta.pooler.dense.bias": noise[0]}
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    want = scores(made)
    for _ in range(2):
        answers = [*fh.classify(load_model(made), TEXTS), *fh.classify(load_model(made), PAIRS)]
        for ours, row in zip(answers, want, strict=True):
            assert ours["probabilities"] == pytest.approx(row, abs=1e-5)
        rewrite(made, architectures=None, id2label=None, num_labels=3)


# ---- generation


def new_at(tokens: list[int]) -> int:
    """The index, after the first token, of a token that does not occur before it."""
    return next(i for i in range(1, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("own", [{"eos_token_id": [1, 7]}, {"do_sample": True, "top_p": 0.5}])
def test_generation_config_is_kept_and_used(tmp_path, torch, own, capsys):
    save_tiny(tmp_path / "m")
    rewrite(tmp_path / "m", "generation_config.json", _from_model_config=None, temperature=0.6)
    rewrite(tmp_path / "m", "generation_config.json", **own)
    model = load_model(tmp_path / "m")
    smaller, _ = fh.prune(model, ratio=0.25)
    for export in ("auto", "native"):
        fh.save_model(smaller, tmp_path / export, export=export)
        files = [tmp_path / name / "generation_config.json" for name in ("m", export)]
        assert json.loads(files[0].read_text()) == json.loads(files[1].read_text())
        assert load_model(tmp_path / export).config == smaller.config
    prompt = model.tokenizer.encode("a neuron")
    greedy = Generator(model.config, model.params, model.tokenizer)([prompt], Sampling(12))[0]
    sampled = own_settings(model.config)
    assert sampled == ({"temperature": 0.6, "top_p": 0.5} if "top_p" in own else {})
    # The default of transformers, which no file needs to name.
    assert ("not used here: top_k=50" in capsys.readouterr().err) == ("top_p" in own)
    if "eos_token_id" in own:
        assert model.config.stop_ids == (1, 7)
        i = new_at(greedy.tokens)
        rewrite(tmp_path / "m", "generation_config.json", eos_token_id=[1, greedy.tokens[i]])
        stopping = load_model(tmp_path / "m").config
        (stopped,) = Generator(stopping, model.params)([prompt], Sampling(12))
        assert (stopped.tokens, stopped.finish) == (greedy.tokens[: i + 1], "eos")
        several = dataclasses.replace(load_model(tmp_path / "m"), tokenizer=None)
        fh.save_model(several, tmp_path / "m.gguf")
        assert load_config(tmp_path / "m.gguf").stop_ids == (1,)
        for wrong in ({"eos_token_id": "</s>"}, {"do_sample": "true", "eos_token_id": -1}):
            rewrite(tmp_path / "m", "generation_config.json", **wrong)
            words = f"generation_config.json: {next(iter(wrong))}"
            refused(words, load_model, tmp_path / "m", error=CheckpointError)
        return
    said = fh.generate(model, "a neuron", 12, seed=3)
    assert said == fh.generate(model, "a neuron", 12, seed=3, temperature=0.6, top_p=0.5)
    assert fh.generate(model, "a neuron", 12, temperature=0) == greedy.text != said
    # As in transformers, do_sample=True samples with the file's settings, also of a greedy file.
    rewrite(tmp_path / "m", "generation_config.json", do_sample=False, min_new_tokens=5)
    model = load_model(tmp_path / "m")
    assert fh.generate(model, "a neuron", 12, do_sample=True, seed=3) == said
    assert "min_new_tokens=5" in capsys.readouterr().err
    refused(
        "do_sample=True at temperature=0", fh.generate, model, "a", do_sample=True, temperature=0
    )


def test_a_chat_stops_where_the_template_ends_a_turn(tmp_path):
    """The template ends turns with "!", which config.json does not name."""
    model = load_model(save_tiny(tmp_path / "m"))
    asked = model.tokenizer.encode("hello", add_special_tokens=False)  # nor does it write a bos
    table = model.params["embed"]["embedding"]
    greedy = Generator(model.config, model.params)([asked], Sampling(12))[0].tokens
    model.tokenizer.add_tokens("!", special_tokens=True)
    i, end = new_at(greedy), model.tokenizer.convert_tokens_to_ids("!")
    table[[greedy[i], end]] = table[[end, greedy[i]]]  # now set in the model
    text = "{% for m in messages %}{{ m.content }}"
    ends = "{% if m.role == 'assistant' %}!{% endif %}{% endfor %}"
    model.tokenizer.chat_template = text + ends
    said = fh.generate(model, "hello", 12, chat=True)
    assert said == model.tokenizer.decode(greedy[:i])
    # Ordinary text after a turn is no stop, nor is a template without an answer.
    model.tokenizer.chat_template = text + ends.replace("!", "z")
    assert end_of_turn(Encoder(model.tokenizer)) is None
    model.tokenizer.chat_template = text + "{{ raise_exception('no') if messages[1:] }}{% endfor %}"
    assert fh.generate(model, "hello", 12, chat=True)


def test_rows_of_pairs_have_types_where_their_tokenizer_makes_them(tmp_path, torch):
    """Our copies give the same rows with BERT's tokenizer class and with the generic one."""
    for values in ({"tokenizer_class": "BertTokenizer"}, {"tokenizer_class": "TokenizersBackend"}):
        made = torch_classifier(torch, tmp_path / values["tokenizer_class"], num_labels=3)
        rewrite(made, "tokenizer_config.json", **values)
        fh.save_model(load_model(made), tmp_path / "copy", overwrite=True)
        typed = values["tokenizer_class"] == "BertTokenizer"
        assert theirs.rows(tmp_path / "copy")["pairs"] == theirs.rows(made)["pairs"]
        assert ("token_type_ids" in theirs.rows(made)["pairs"]) == typed


# ---- a template that writes the date

CLOCK = """
import datetime, os
class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(os.environ["DAY"])
datetime.datetime = Day
"""
DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
DATED += "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_a_run_resumes_over_midnight_to_the_same_bits(tmp_path, monkeypatch):
    """The clock of the rendering process moves to the next day; the rendered text is unchanged."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = DATED
    model = save_pretrained(LLAMA, random_params(LLAMA), tmp_path / "m", tokenizer=tokenizer)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": talk}] * 8)
    settings = {
        "data__path": str(rows),
        "steps": 3,
        "batch_size": 2,
        "seq_len": 48,
        "accumulation": 1,
    }
    settings |= {"tensorboard": False, "optimizer__warmup_steps": 0}
    config = config_of("jreg_sft", str(model), **settings)

    def on(day: str, name: str, stop: int) -> None:
        monkeypatch.setenv("DAY", day)
        child.kept.cache_clear()
        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            stop_at_batch(patch, stop)
            training.run(config, tmp_path / name)

    on("2026-11-27T23:59", "whole", 9)
    on("2026-11-27T23:59", "cut", 2)
    assert not (tmp_path / "cut" / "results.json").exists()
    on("2026-11-28T00:01", "cut", 9)
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "cut")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    arguments = {"messages": talk[:1], "chat_template": DATED}
    code = "import sys, json; from transformers.utils.chat_template_utils import *; a = json.loads("
    code += "sys.argv[1]); print(render_jinja_template([a.pop('messages')], **a)[0][0])"
    assert "28 Nov 2026" in run_program(sys.executable, "-c", code, json.dumps(arguments)).out
    made = encode_conversation(messages.example({"messages": talk}, Fields()), Encoder(tokenizer))
    assert "26 Jul 2024" in tokenizer.decode(made[0])
    other = Encoder(tokenizer, template_date="2025-01-02")
    made = encode_conversation(messages.example({"messages": talk}, Fields()), other)
    assert "02 Jan 2025" in tokenizer.decode(made[0])
    refused("template_date", Encoder, tokenizer, template_date="today", error=DataError)
