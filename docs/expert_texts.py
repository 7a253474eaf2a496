"""The texts that the mixture of experts in findings/experts.md is trained on and measured with.

    python docs/expert_texts.py <folder of data sets> runs/kinds

writes train/<kind>.jsonl ({"text"} a line), validation/<kind>.txt, calibration.txt (training
documents, one of each kind in turn) and calibration/<kind>.txt (training documents in random
order). Five kinds: encyclopedia (WikiText-2), novels (Project
Gutenberg), web (C4, FineWeb-Edu, news of LongBench), math (GSM8K), code (MBPP, Code-Alpaca, and
the prompts of LongBench's two code tasks). The folder has one subfolder per data set. Validation:
articles, a novel and questions of test sets; every 20th document of web and code.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

NOVELS, HELD_OUT_NOVEL = ("98", "345", "1342", "1400", "1661", "2701"), "11"
EVERY = 20  # every 20th document is held out, of kinds without a test set
DOCUMENT_CHARS = 4000
CHARS = 120_000  # of each validation text, at most
CALIBRATION_CHARS = 400_000


def rows(path: Path) -> list[dict]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def lines(path: Path) -> list[str]:
    """Paragraphs of WikiText; the training file has only those of 50 characters or more."""
    return [line.strip() for line in path.read_text().splitlines() if len(line) >= 50]


def novel(path: Path) -> list[str]:
    """The paragraphs of a book."""
    return path.read_text(encoding="utf-8-sig").split("\n\n")


def joined(pieces: list[str]) -> list[str]:
    """Documents of a little over 4,000 characters: pieces with blank lines between them."""
    documents, text = [], ""
    for piece in pieces:
        text += piece.strip() + "\n\n"
        if len(text) > DOCUMENT_CHARS:
            documents, text = [*documents, text.strip()], ""
    return documents


def kinds(data: Path) -> dict[str, tuple[list[str], list[str]]]:
    """{kind: (training documents, held-out documents)}."""
    wiki = [lines(data / "wikitext2" / name) for name in ("train_part.raw.txt", "test.raw.txt")]
    books = [novel(data / f"pg19/gutenberg_listed/{name}.txt") for name in NOVELS]
    web = [
        row["text"] for name in ("c4", "fineweb_edu") for row in rows(data / name / "train.jsonl")
    ]
    web += [row["context"] for row in rows(data / "longbench/multi_news.jsonl")]
    math = [
        [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows(path)]
        for path in (data / "gsm8k/train.jsonl", data / "gsm8k/test.jsonl")
    ]
    code = [
        f"# {row['text']}\n{row['code']}"
        for name in ("train", "test")
        for row in rows(data / f"mbpp/{name}.jsonl")
    ]
    code += [
        f"# {row['instruction']}\n{row['input']}\n{row['output']}"
        for row in rows(data / "tulu_v1/code_alpaca_2k.jsonl")
    ]
    code += [
        row["origin_prompt"]
        for row in rows(data / "longbench/minilongbench.jsonl")
        if row["dataset"] in ("lcc", "repobench-p")
    ]
    held_out = novel(data / f"pg19/gutenberg_listed/{HELD_OUT_NOVEL}.txt")
    return {
        "encyclopedia": (joined(wiki[0]), joined(wiki[1])),
        "novels": ([*itertools.chain(*map(joined, books))], joined(held_out)),
        "web": split(joined(web)),
        "math": (joined(math[0]), joined(math[1])),
        "code": split(joined(code)),
    }


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """(the other documents, every 20th document)."""
    return [x for i, x in enumerate(documents) if i % EVERY], documents[::EVERY]


def upto(documents: list[str], characters: int) -> str:
    """The first documents, blank lines between them, cut at a number of characters."""
    return "\n\n".join(documents)[:characters]


def main(data: str, out: str) -> None:
    """Write the files and print how large they are."""
    texts, folder = kinds(Path(data)), Path(out)
    for name in ("train", "validation", "calibration"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for kind, (train, held_out) in texts.items():
        written = "".join(json.dumps({"text": text}) + "\n" for text in train)
        (folder / f"train/{kind}.jsonl").write_text(written)
        validation = upto(held_out, CHARS)
        (folder / f"validation/{kind}.txt").write_text(validation)
        drawn = random.Random(0).sample(train, len(train))
        (folder / f"calibration/{kind}.txt").write_text(upto(drawn, CALIBRATION_CHARS))
        sizes = f"{sum(map(len, train)):,} characters in {len(train):,} documents"
        print(f"{kind}: {sizes}, {len(validation):,} held out")
    mixed = itertools.chain(*zip(*(train for train, _ in texts.values()), strict=False))
    (folder / "calibration.txt").write_text(upto([*mixed], CALIBRATION_CHARS))


if __name__ == "__main__":
    main(*sys.argv[1:])
