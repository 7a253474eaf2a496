"""Adapters in PEFT's files: PEFT reads our files, and we read PEFT's."""

import dataclasses
import fnmatch
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import LLAMA, byte_tokenizer, our_logits, random_params, save_tiny, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io import load
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.peft import save_adapters
from ffn_heterogeneity.io.safetensors import open_file
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
TOKENS = np.arange(2, 20)[None]
# GPT-2's modules are Conv1D, and one of them holds queries, keys and values.
GPT2 = dataclasses.replace(tiny_of("gpt2", 3), vocab_size=258)
BASES = {"llama": LLAMA, "gpt2": GPT2}


def adapted(config, kind, targets="attention/|ffn/", shared=False):
    """A model with adapters of random B, and lengths; `shared`: one A for each input."""
    rng = np.random.default_rng(0)
    params = random_params(config)
    model = load.Model(config, params, None, "tiny")
    model, _ = SURGERIES[kind](model, {"rank": 3, "alpha": 6.0, "targets": targets})
    tree = unstack(model.params)
    for layer in tree["layers"]:
        for block in ("attention", "cross_attention", "ffn"):
            first = {}
            for name, leaves in layer.get(block, {}).items():
                if "lora_b" not in leaves:
                    continue
                leaves["lora_b"] = rng.normal(size=leaves["lora_b"].shape).astype(np.float32)
                group = "out" if name in ("out", "down") else "in"
                if shared:
                    leaves["lora_a"] = first.setdefault(group, leaves["lora_a"])
                if "dora_m" in leaves:
                    scale = 1 + 0.3 * rng.random(leaves["dora_m"].shape).astype(np.float32)
                    leaves["dora_m"] = np.asarray(leaves["dora_m"]) * scale
    return dataclasses.replace(model, params=restack(config, tree))


@pytest.fixture
def base(tmp_path):
    return save_tiny(tmp_path / "base")


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", "attention/q|ffn/down"), ("gpt2", "attention/|ffn/"), ("gpt2", "ffn/up")],
)
def test_peft_computes_the_same_of_ours(torch, peft, tmp_path, family, targets, kind):
    import transformers

    base = save_tiny(tmp_path / "base", BASES[family])
    model = adapted(BASES[family], kind, targets, shared=True)
    save_adapters(model.config, model.params, tmp_path / "adapter", str(base))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        reference = theirs(torch.tensor(TOKENS)).logits.numpy()
    ours = our_logits(model.config, model.params, TOKENS)
    assert np.abs(ours - reference).max() <= 1e-5 * np.abs(reference).max()
    plain = our_logits(model.config, random_params(model.config), TOKENS)
    assert np.abs(ours - plain).max() > 0.1
    # And back, from a directory that names its base.
    read = load.load_model(tmp_path / "adapter")
    assert {p.split("/")[-1] for p in flatten(read.params)} >= {"lora_a", "lora_b"}
    np.testing.assert_array_equal(our_logits(read.config, read.params, TOKENS), ours)
    merged = theirs.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    folded = load.load_model(tmp_path / "merged")
    ours = our_logits(read.config, SURGERIES["fold"](read)[0].params, TOKENS)
    other = our_logits(folded.config, folded.params, TOKENS)
    assert np.abs(ours - other).max() <= 1e-5 * np.abs(other).max()


def test_peft_computes_the_same_of_an_encoder_decoder(torch, peft, tmp_path):
    """Adapters in both stacks, cross-attention included."""
    import transformers

    config = tiny_of("t5", 4)
    base = save_tiny(tmp_path / "base", config)
    model = adapted(config, "lora", "attention/q|ffn/up", shared=False)
    save_adapters(model.config, model.params, tmp_path / "adapter", str(base))
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_2_SEQ_LM" and len(settings["target_modules"]) == 4 + 4 + 2
    batch = {"encoder_tokens": TOKENS % 29, "tokens": TOKENS[:, ::-1] % 29}
    given = {"input_ids": batch["encoder_tokens"], "decoder_input_ids": batch["tokens"]}
    with torch.no_grad():
        reference = theirs(**{k: torch.tensor(v.copy()) for k, v in given.items()}).logits.numpy()
    read = load.load_model(tmp_path / "adapter")
    for one in (model, read):
        hidden = causal_lm.forward(one.config, one.params, batch)["hidden"]
        ours = causal_lm.logits(one.config, one.params, hidden)
        assert np.abs(ours - reference).max() <= 1e-5 * np.abs(reference).max()


@pytest.mark.parametrize(
    ("family", "first", "second"), [("llama", "q_proj", "up_proj"), ("gpt2", "c_attn", "c_fc")]
)
def test_what_peft_writes_is_read(torch, peft, tmp_path, family, first, second):
    """PEFT's initialisation and file, ranks by pattern, rank-stabilised."""
    import transformers

    base = save_tiny(tmp_path / "base", BASES[family])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = {"r": 4, "lora_alpha": 8, "use_rslora": True, "use_dora": True}
    settings |= {"target_modules": [first, second], "rank_pattern": {second: 2}}
    settings |= {"init_lora_weights": False, "fan_in_fan_out": family == "gpt2"}
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**settings)).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        reference = theirs(torch.tensor(TOKENS)).logits.numpy()
    read = load.load_model(tmp_path / "adapter")
    ours = our_logits(read.config, read.params, TOKENS)
    assert np.abs(ours - reference).max() <= 1e-5 * np.abs(reference).max()
    assert load.load_config(tmp_path / "adapter") == read.config
    assert load.load_tokenizer(tmp_path / "adapter").vocab_size == 258
    with pytest.raises(CheckpointError, match="holds adapters, no weights: fold them first"):
        load.model_directory(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_fused_projections_share_their_input_side(tmp_path, kind):
    """Phi-3: one torch module for q, k and v, and one for gate and up."""
    config = tiny_of("phi3", 3)
    save_pretrained(config, random_params(config), tmp_path / "base", tokenizer=byte_tokenizer())
    apart = adapted(config, kind)
    with pytest.raises(CheckpointError, match="qkv_proj holds .* whose A differ"):
        save_adapters(config, apart.params, tmp_path / "no", "base")
    model = adapted(config, kind, shared=True)
    save_adapters(config, model.params, tmp_path / "adapter", "../base")
    read = load.load_model(tmp_path / "adapter")
    before, after = (flatten(unstack(one.params)) for one in (model, read))
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        np.testing.assert_array_equal(np.asarray(leaf), after[path])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3 is not read"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not read"),
        ({"bias": "all"}, "bias is not read"),
        ({"base_model_name_or_path": None}, "names no model"),
        ({"base_model_name_or_path": "../adapter"}, "is an adapter itself"),
        ({"base_model_name_or_path": "../wide"}, "are these adapters for another model"),
        ({"base_model_name_or_path": "../deep"}, None),
        ({"base_model_name_or_path": "../short"}, "has no place for .*layers.2"),
        ({"use_dora": True}, "lacks one of"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is not read"),
        ({"use_qalora": True}, "use_qalora is not read"),
        ({"rank_pattern": {"(": 3}}, "q_proj: rank_pattern: '\\(' is no pattern: missing"),
        ({"alpha_pattern": [3]}, "q_proj: alpha_pattern=\\[3\\] must map names to numbers"),
        ({"r": 0}, "r=0 must be A's rank, 3"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4, which changed"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights=lora_ga, which changed the base"),
        ({"lora_alpha": None}, "lora_alpha=None must be a number"),
        ({"lora_alpha": 10**400}, "not JSON .a number of 401 digits"),
        ({"lora_alpha": True and float("inf")}, "not JSON|must be a number"),
        ({"rank_pattern": {"a{1000}": 3}}, "is no pattern: it is not one of names"),
        ({"rank_pattern": {"(?R)": 3}}, "is no pattern: it is not one of names"),
        ({"rank_pattern": {"x" * 201: 3}}, "is no pattern: it is not one of names"),
        ({"rank_pattern": {"(a|b|[a-z_.0-9]|.)*[A-Z]": 3}}, "takes too long to match"),
        ({"alpha_pattern": {f"m{i}": 3 for i in range(100_000)}}, "must map names to numbers"),
    ],
)
def test_what_cannot_be_read(base, tmp_path, changes, message):
    model = adapted(LLAMA, "lora")
    wide = tuple(dataclasses.replace(x, ffn_width=25) for x in LLAMA.layers)
    sizes = {"wide": wide, "deep": LLAMA.layers * 2, "short": LLAMA.layers[:2]}
    for name, layers in sizes.items():
        if changes.get("base_model_name_or_path") == f"../{name}":
            save_tiny(tmp_path / name, dataclasses.replace(LLAMA, layers=layers))
    save_adapters(LLAMA, model.params, tmp_path / "adapter", str(base))
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if message is None:  # the layers that have none stay as they are
        assert load.load_model(tmp_path / "adapter").config.n_layers == 8
        return
    refused(message, load.load_model, tmp_path / "adapter", error=CheckpointError)


@pytest.mark.parametrize("shape", [(), (4,), (1, 2, 3), (0, 3), (7, 3)])
def test_tensors_of_odd_shapes(base, tmp_path, shape):
    save_adapters(LLAMA, adapted(LLAMA, "lora").params, tmp_path / "adapter", str(base))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {name: np.array(x.load()) for name, x in open_file(path).items()}
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file(tensors | {name: np.zeros(shape, np.float32)}, path)
    with pytest.raises(CheckpointError, match="must be matrices|another model"):
        load.load_model(tmp_path / "adapter")


def test_adapters_of_the_hub_and_their_bases_revision(base, tmp_path, monkeypatch):
    """Only what is asked for is fetched; the base is that of the named revision."""
    model, hub = adapted(LLAMA, "lora"), tmp_path / "hub"
    save_adapters(LLAMA, model.params, hub / "me/adapter", "them/base")
    shutil.copytree(base, hub / "them/base")
    settings = json.loads((hub / "me/adapter/adapter_config.json").read_text())
    (hub / "me/adapter/adapter_config.json").write_text(json.dumps(settings | {"revision": "v2"}))
    asked = {}

    def snapshot_download(repo_id, *, revision, allow_patterns):
        asked.setdefault(repo_id, set()).add(revision)
        cache = tmp_path / "cache" / repo_id
        for path in (hub / repo_id).iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                cache.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, cache / path.name)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load.load_config("me/adapter") == LLAMA
    assert load.load_tokenizer("me/adapter").encode("ab") == byte_tokenizer().encode("ab")
    shapes, _ = load.load_shapes("me/adapter")
    read = load.load_model("me/adapter")
    assert jax.tree.map(np.shape, shapes.params) == jax.tree.map(np.shape, read.params)
    assert asked == {"me/adapter": {None}, "them/base": {"v2"}}


def test_what_cannot_be_written(base, tmp_path):
    with pytest.raises(CheckpointError, match="has no LoRA"):
        save_adapters(LLAMA, random_params(LLAMA), tmp_path / "a", str(base))
    model = adapted(LLAMA, "lora")
    dropping, _ = SURGERIES["macdrop"](
        model, {"k": 2, "layer": 0, "token": None, "scope": "massive"}
    )
    with pytest.raises(CheckpointError, match="no place for .*macdrop_keep"):
        save_adapters(LLAMA, dropping.params, tmp_path / "a", str(base))
    mixed, _ = SURGERIES["lora"](
        load.Model(LLAMA, random_params(LLAMA), None, ""), {"targets": "attention/"}
    )
    mixed, _ = SURGERIES["dora"](mixed, {"targets": "ffn/"})
    with pytest.raises(CheckpointError, match="_proj.* have LoRA, others DoRA: PEFT has one form"):
        save_adapters(LLAMA, mixed.params, tmp_path / "a", str(base))
    factors = {"method": "svd", "ratio": 0.5, "layers": "all"}
    fused, _ = SURGERIES["fuse"](load.Model(LLAMA, random_params(LLAMA), None, ""), factors)
    lora, _ = SURGERIES["lora"](fused, {"rank": 2, "targets": "attention/q"})
    with pytest.raises(CheckpointError, match="no place for .*low_rank"):
        save_adapters(lora.config, lora.params, tmp_path / "a", str(base))
    refused("exists", save_adapters, LLAMA, model.params, base, str(base), error=CheckpointError)
    refused("a local disk", save_adapters, LLAMA, {}, "gs://b/x", "y", error=CheckpointError)
    headed = dataclasses.replace(LLAMA, head=HeadConfig.of("classification", {"outputs": 2}))
    head = unstack(model.params) | {"task_head": {"out": {"kernel": np.ones((16, 2))}}}
    lost = "would lose the head .classification"
    refused(lost, save_adapters, headed, head, tmp_path / "a", "y", error=CheckpointError)
    config = tiny_of("mixtral", 2)
    model = adapted(config, "lora", "attention/q|ffn/up")
    with pytest.raises(CheckpointError, match="experts and routers .*ffn/up/lora_a.*keep"):
        save_adapters(config, model.params, tmp_path / "x", "y")
    model = adapted(config, "lora", "attention/q")
    save_adapters(config, model.params, tmp_path / "adapters", str(tmp_path / "mixtral"))
    save_pretrained(config, random_params(config), tmp_path / "mixtral")
    again = load.load_model(tmp_path / "adapters")
    logits = [our_logits(config, x.params, TOKENS) for x in (model, again)]
    np.testing.assert_allclose(*logits, atol=1e-6)
