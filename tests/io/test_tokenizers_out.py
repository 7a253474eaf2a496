"""Exported tokenizers give the results of the original, in transformers 5 and 4."""

import json
import sys
from pathlib import Path

import pytest
import theirs
from tiny_models import byte_tokenizer, random_params, tiny_of
from tiny_runs import REPOSITORY, run_program
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model, load_tokenizer
from ffn_heterogeneity.io.tokenizer_files import save_tokenizer

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
BERTS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
PLAIN = {"model_input_names": ["input_ids", "attention_mask"]}
# name -> (family, tokenizer_config.json), with what real ones have that is easily lost.
KINDS = {
    "gpt2": ("gpt2", {"tokenizer_class": "GPT2TokenizerFast", **ENDS}),
    "gpt2_slow": ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **ENDS}),
    "gpt2_without_class": ("gpt2", ENDS),
    "smollm2": ("llama", {"tokenizer_class": "GPT2Tokenizer", "pad_token": "</s>", **ENDS}),
    "llama_3": (
        "llama",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "additional_special_tokens": ["<|user|>", "<|assistant|>"],
            "chat_template": CHAT,
            "model_max_length": 100,
            "clean_up_tokenization_spaces": True,
            **PLAIN,
            **ENDS,
        },
    ),
    "qwen2": (
        "qwen2",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "pad_token": "</s>",
            "padding_side": "left",
            "additional_special_tokens": ["<|user|>"],
            "chat_template": CHAT,
            "auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]},
            **ENDS,
        },
    ),
    "bert": ("bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": False, **BERTS}),
    "bert_without_class": ("bert", {"do_lower_case": True, **BERTS}),
    "roberta": (
        "roberta",
        {"tokenizer_class": "RobertaTokenizerFast", "cls_token": "<s>", "sep_token": "</s>"}
        | {"pad_token": "</s>", "unk_token": "<s>", "mask_token": "<s>", **ENDS},
    ),
    "transformers_5": ("bert", {"tokenizer_class": "TokenizersBackend", **BERTS}),
}


def word_pieces(lower: bool) -> Tokenizer:
    """BERT's pipeline on a small vocabulary."""
    pieces = "abcdefghijklmnopqrstuvwxyz,"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *pieces, *(f"##{x}" for x in pieces)]
    table = {token: i for i, token in enumerate(vocabulary)}
    made = Tokenizer(models.WordPiece(table, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pair, special = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair=pair, special_tokens=special
    )
    return made


def write_original(directory: Path, name: str) -> None:
    """Writes a model in the form of other libraries, with tokenizer files."""
    family, values = KINDS[name]
    config = tiny_of(family, 1)
    save_pretrained(config, random_params(config), directory)
    made = byte_tokenizer().backend_tokenizer
    if family == "bert":
        made = word_pieces(values.get("do_lower_case", True))
        (directory / "vocab.txt").write_text("\n".join(made.get_vocab()) + "\n")
    elif family == "roberta":
        made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    if special := values.get("additional_special_tokens"):
        made.add_special_tokens(special)
    made.save(str(directory / "tokenizer.json"))
    if family != "bert":
        table = json.loads((directory / "tokenizer.json").read_text())["model"]
        (directory / "vocab.json").write_text(json.dumps(table["vocab"]))
        (directory / "merges.txt").write_text("#version: 0.2\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """{kind: (the original, our copy)}."""
    root, pairs = tmp_path_factory.mktemp("tokenizers"), {}
    for name in KINDS:
        write_original(root / name, name)
        model = load_model(root / name)
        copy = root / f"{name}_copy"
        save_pretrained(model.config, model.params, copy, tokenizer=model.tokenizer)
        pairs[name] = (root / name, copy)
    return pairs


@pytest.mark.parametrize("name", KINDS)
def test_copies_make_what_the_original_made(copies, name):
    original, copy = map(theirs.rows, copies[name])
    assert copy == original
    assert ("token_type_ids" in copy["pairs"]) == name.startswith("bert")
    assert "auto_map" not in (copies[name][1] / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_special_tokens_that_only_the_class_knows(name, tmp_path):
    """The tokenizer_config.json of openai-community/gpt2 names none."""
    from transformers import AutoTokenizer

    config = tiny_of(name, 1)
    save_pretrained(config, random_params(config), tmp_path)
    made = word_pieces(True)
    if name == "gpt2":
        made = byte_tokenizer().backend_tokenizer
        made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    ours, theirs_ = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for token in ("bos", "eos", "unk", "pad", "cls", "sep"):
        wanted = getattr(theirs_, f"{token}_token_id")
        if getattr(theirs_, f"{token}_token") in made.get_vocab():
            assert getattr(ours, f"{token}_token_id") == wanted, token
    assert (ours.eos_token or ours.sep_token) in ("<|endoftext|>", "[SEP]")
    # What is null stays so.
    values = {"tokenizer_class": theirs_.__class__.__name__, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    assert load_tokenizer(tmp_path).unk_token is None


def test_what_a_gguf_file_holds_is_written_for_both_versions(smollm2_gguf, tmp_path):
    tokenizer = load_tokenizer(smollm2_gguf)
    save_tokenizer(tokenizer, tmp_path, types=False)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert values["model_input_names"] == ["input_ids", "attention_mask"]
    assert values["clean_up_tokenization_spaces"] is False
    read = load_tokenizer(tmp_path)
    text = "it 's <|im_start|> a\n test"
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read.decode(read(text)["input_ids"]) == text
    assert read.chat_template == tokenizer.chat_template


@pytest.mark.slow
def test_in_transformers_4_too(copies):
    names = [name for name in KINDS if name != "transformers_5"]  # it does not know that class
    folder = theirs.transformers_4(REPOSITORY / ".cache" / "transformers-4")
    paths = [str(path) for name in names for path in copies[name]]
    paths.append(str(copies["transformers_5"][1]))
    program = (sys.executable, REPOSITORY / "tests" / "theirs.py", "rows", *paths)
    done = run_program(*program, PYTHONPATH=str(folder))
    assert done.code == 0, done.err
    rows = json.loads(done.out.splitlines()[-1])
    for name in names:
        original, copy = (rows[str(path)] for path in copies[name])
        assert copy == original, name
    five = theirs.rows(copies["transformers_5"][0])
    assert rows[paths[-1]]["pairs"] == five["pairs"]
