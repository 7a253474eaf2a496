"""Calls that users of other libraries type: each works, or its error names the call to use."""

from unittest import mock

import huggingface_hub
import numpy as np
import pytest
from tiny_models import LLAMA, TEXT, our_logits, save_tiny

import ffn_heterogeneity as fh

pytestmark = pytest.mark.usefixtures("compiled_quickly")
# Below "# page", lines of "what the error names | call ;; call"; "works": the calls return; "no": a
# gap, they raise anything. Pages are the libraries' quick starts and first guides, where `fh` is
# the library or the class, and a function of ours replaces a model's method.
CALLS = """
# transformers README
fh.generate | fh.pipeline(task="text-generation", model=path) ;; fh.pipeline(model=path)(text)
chat=True | fh.generate(model, chat, max_new_tokens=4) ;; fh.generate(model, [chat, chat])
# transformers quicktour
fh.load_model | fh.AutoModelForCausalLM.from_pretrained(path) ;; fh.AutoModel.from_pretrained(path)
fh.load_model | fh.AutoModelForSequenceClassification.from_pretrained(path)
fh.io.load.load_config | fh.AutoConfig.from_pretrained(path)
give dtype | fh.load_model(path, torch_dtype="auto")
leave it out | fh.load_model(path, device_map="auto")
model.tokenizer | fh.AutoTokenizer.from_pretrained(path) ;; model.batch_decode(ids)
not needed | model.to("cuda") ;; model.device ;; model.eval() ;; model.cuda()
works | fh.load_model(path) ;; fh.load_model(path, dtype="auto") ;; fh.load_model(path, dtype="f2")
works | model.tokenizer(text) ;; model.tokenizer(texts) ;; model.tokenizer.batch_decode(ids)
works | model.tokenizer(text, return_tensors="np")["input_ids"] ;; model(**inputs) ;; model(ids)
fh.generate | model.generate(**inputs, max_length=30) ;; model.generate(**inputs, max_new_tokens=4)
give max_new_tokens | fh.generate(model, "The secret", max_length=30)
decode | fh.generate(model, ids, max_new_tokens=4) ;; fh.generate(model, **inputs)
works | fh.generate(model, texts, max_new_tokens=4) ;; np.exp(model(ids)[0]).sum(-1)
fh.fit | fh.TrainingArguments(output_dir=out) ;; fh.Trainer(model=model) ;; model.train()
fh.save_model | model.save_pretrained(out) ;; fh.save_pretrained(model, out)
works | fh.save_model(model, out / "saved") ;; fh.push(path, "me/a") ;; fh.push(model, "me/a")
fh.push | model.push_to_hub("me/tiny")
fh.hidden_states | model(**inputs, output_hidden_states=True)
no | model(**inputs).logits ;; fh.train(model) ;; fh.evaluate(model, text)
# transformers text generation
works | fh.generate(model, "A cat", do_sample=True) ;; fh.generate(model, "A cat", do_sample=False)
works | fh.generate(model, "I am", 4, do_sample=True, temperature=0.7, top_p=0.9)
give top_p | fh.generate(model, "I am", top_k=50) ;; fh.generate(model, "I am", num_beams=2)
give top_p | fh.generate(model, "I", penalty_alpha=0.6) ;; fh.generate(model, "", min_p=0.1)
repeat | fh.generate(model, "I am", num_return_sequences=2)
give stop | fh.generate(model, "I am", stop_strings=["."])
give eos | fh.generate(model, "I am", eos_token_id=1)
leave it out | fh.generate(model, "I am", stream=True) ;; fh.generate(model, "I am", streamer=print)
fh.generate | fh.set_seed(42) ;; fh.GenerationConfig(top_k=5)
fh.surgery | fh.load_model(path, load_in_4bit=True)
model.params | model.parameters() ;; model.state_dict() ;; model.named_parameters()
# transformers configuration
works | model.config.hidden_size ;; model.config.num_hidden_layers ;; model.config.vocab_size
works | model.config.intermediate_size ;; model.config.num_attention_heads ;; model.config.head_dim
works | model.config.num_key_value_heads ;; model.config.max_position_embeddings
works | model.config.eos_token_id ;; model.config.bos_token_id ;; model.config.tie_word_embeddings
ffn_widths | smaller.config.intermediate_size ;; model.config.ffn_dim
# transformers perplexity
works | fh.perplexity(model, text) ;; fh.perplexity(model, path=file)
works | fh.perplexity(model, texts * 99) ;; fh.perplexity(model, text, window=64, max_windows=2)
give window | fh.perplexity(model, text, stride=512) ;; fh.perplexity(model, text, max_length=1024)
fh.perplexity | model(ids, labels=ids) ;; model.evaluate(text) ;; model.loss(ids)
read_text | fh.perplexity(model, file)
give either text or path | fh.perplexity(model, text, path=file) ;; fh.perplexity(model)
# PEFT quicktour
fh.lora | fh.LoraConfig(r=8, lora_alpha=32) ;; fh.get_peft_model(model, None)
fh.lora | model.add_adapter(adapter_name="new") ;; model.set_adapter("new")
, rank, alpha, dropout | fh.lora(model, r=8) ;; fh.lora(model, 8, lora_alpha=32, lora_dropout=0.1)
'targets' | fh.lora(model, target_modules=["q_proj"])
works | fh.lora(model, rank=8, alpha=32.0, dropout=0.1) ;; fh.lora(model, 8, targets="attention/q")
count_parameters | adapted.print_trainable_parameters() ;; model.num_parameters()
fh.load_model | fh.PeftModel.from_pretrained(model, path) ;; fh.AutoPeftModel.from_pretrained(path)
fh.fold | adapted.merge_and_unload() ;; adapted.merge_adapter()
works | fh.fold(adapted) ;; fh.generate(adapted, "Preheat", 4) ;; fh.push(adapted, "me/lora")
# OptiPFair README
fh.analyze | fh.analyze_layer_importance(model, None)
works | fh.analyze(model, text=text) ;; fh.analyze(model) ;; fh.prune(model, layers="top")
fh.prune | fh.prune_model(model, pruning_ratio=0.2)
drop_layers | fh.prune_model_depth(model, [1])
Known: criterion, ratio | fh.prune(model, pruning_ratio=0.2) ;; fh.prune(model, method="PPM")
, layers, budget | fh.prune(model, layers_to_prune=[0, 1]) ;; fh.prune(model, layer_indices=[1])
report | fh.prune(model, return_stats=True)
fh.fit | fh.distill_model(student_model=smaller, teacher_model=model)
"""


def outcome(call: str, wanted: str, names: dict) -> str:
    """ "" if the call has the result in the table; else a description of the result."""
    try:
        eval(call, names)
    except (TypeError, AttributeError, ValueError) as error:
        return "" if wanted in str(error) else f"{type(error).__name__}: {error}"
    return "" if wanted == "works" else "works"


def test_calls_of_other_libraries(tmp_path, monkeypatch):
    hub = mock.MagicMock()
    hub.return_value.upload_folder = lambda folder_path, **_: fh.load_model(folder_path).source
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    model = fh.load_model(save_tiny(tmp_path / "model"))
    (tmp_path / "text.txt").write_text(TEXT)
    names = {"fh": fh, "np": np, "model": model, "path": str(tmp_path / "model"), "out": tmp_path}
    names |= {"file": str(tmp_path / "text.txt"), "text": TEXT, "texts": ["A list", "Portugal is"]}
    names |= {"adapted": fh.lora(model, 2)[0], "smaller": fh.prune(model, layers="top")[0]}
    names |= {"chat": [{"role": "user", "content": "Hi"}], "ids": np.array([[5, 6, 7]])}
    names["inputs"] = dict(model.tokenizer(["A", "B"], return_tensors="np"))
    rows = [line.split(" | ") for line in CALLS.splitlines() if " | " in line]
    table = [(call, wanted) for wanted, calls in rows for call in calls.split(" ;; ")]
    failed = {call: said for call, wanted in table if (said := outcome(call, wanted, names))}
    assert not failed and sum(wanted != "no" for wanted in dict(table).values()) >= 100


def test_what_they_return(tmp_path):
    model, ids = fh.load_model(save_tiny(tmp_path / "model")), np.array([[5, 6, 7], [8, 9, 10]])
    wanted, config = our_logits(LLAMA, model.params, ids), model.config
    np.testing.assert_allclose(model(ids), wanted, atol=1e-5)
    padded, mask = np.array([[0, 5, 6, 7], [0, 8, 9, 10]]), [[0, 1, 1, 1]] * 2
    np.testing.assert_allclose(model(padded, mask)[:, 1:], wanted, atol=1e-5)
    assert (config.hidden_size, config.intermediate_size) == (
        config.d_model,
        config.layers[0].ffn_width,
    )
    for command, name in {"surgery": "nucl_finetune", "train": "prune", "evaluate": "fuse"}.items():
        with pytest.raises(ValueError, match=f"cannot run the config '{name}': write .*{name}"):
            fh.run(command, name, tmp_path / command)
    greedy = fh.generate(model, "I am", 4, do_sample=False, temperature=5.0)
    assert greedy == fh.generate(model, "I am", 4) != fh.generate(model, "I am", 4, do_sample=True)
    (tmp_path / "text.txt").write_text("a b\n\nc d" * 9)
    result = fh.perplexity(model, path=tmp_path / "text.txt", window=8)
    assert result == fh.perplexity(model, ("a b\n\nc d" * 9).split("\n\n"), window=8)
