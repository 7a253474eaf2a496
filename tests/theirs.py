"""Results of transformers on our directories; version 4 runs in a separate process.

python theirs.py logits|rows DIRECTORY...    prints {directory: ...} as JSON.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

PAIRS = [("a good film", "no"), ("bad", "it is a long day, and so on"), ("x", "y")]
# It needs other versions of these than version 5; torch is from the environment.
VERSION_4 = ("transformers==4.57.6", "huggingface_hub==0.36.0", "tokenizers==0.22.1")


def transformers_4(directory: Path) -> Path:
    """A directory for PYTHONPATH in which transformers is 4.57.6; made once (40 MB)."""
    if not (directory / "transformers").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*command, str(directory), *VERSION_4], check=True, capture_output=True)
    return directory


def logits(directory: Path) -> list:
    """Logits [pairs, labels], by the lines of its card if it has some, and of one padded batch."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    code = re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.S)[-1]
    alone = None
    if "logits =" in code:
        scopes = [{"first": first, "second": second} for first, second in PAIRS]
        with torch.no_grad():
            for scope in scopes:
                exec(code.replace("<this directory>", str(directory)), scope)
        alone = torch.cat([scope["logits"] for scope in scopes])
        if "AutoModelForSequenceClassification" not in code:
            return alone.tolist()
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    firsts, seconds = map(list, zip(*PAIRS, strict=True))
    if alone is None:
        batch = tokenizer(firsts, seconds, padding=True, return_tensors="pt")
    else:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
        texts = [f"{tokenizer.bos_token or ''}{a}\n{b}" for a, b in PAIRS]
        batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.no_grad():
        made = model(**batch).logits
    if alone is not None:
        torch.testing.assert_close(made, alone, atol=1e-5, rtol=1e-5)
    return made.tolist()


def rows(directory: Path) -> dict:
    """The tokenizer's results for a text, pairs, a padded batch and a chat; its special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    firsts, seconds = map(list, zip(*PAIRS, strict=True))
    tokenized = {"text": dict(tokenizer(firsts[0])), "pairs": dict(tokenizer(firsts, seconds))}
    tokenized |= {"special": sorted(map(str, tokenizer.all_special_tokens))}
    tokenized |= {"side": tokenizer.padding_side, "longest": tokenizer.model_max_length}
    if tokenizer.pad_token is not None:
        tokenized["padded"] = dict(tokenizer(firsts, padding=True))
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "hi"}]
        tokenized["chat"] = tokenizer.apply_chat_template(chat, tokenize=False)
    return tokenized


if __name__ == "__main__":
    made = {}
    for name in sys.argv[2:]:
        try:
            made[name] = globals()[sys.argv[1]](Path(name))
        except ValueError as error:  # a class that this version lacks
            made[name] = str(error)
    print(json.dumps(made, default=dict))
