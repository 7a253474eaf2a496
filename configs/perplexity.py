"""Perplexity of a text, in non-overlapping windows (formulas: window = number of predictions).

Command:   python scripts/evaluate.py --config=configs/perplexity.py --config.model=<any> \
             --config.text=<file.txt> --config.window=512 --config.max_windows=40
Hardware:  one CPU or accelerator.
Hours:     SmolLM2-135M, 40 windows of 512: about a minute on 2 cores.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            # Model: a directory, a .gguf file, a hub id or the name of a preset.
            "model": "",
            "revision": placeholder(str),  # branch, tag or commit of a hub id
            # A UTF-8 text file, tokenised whole without special tokens; or a directory of such
            # files, measured together and each on its own ...
            "text": "",
            # ... or integers [windows, length] in a .npy file, used whole, bos already in place.
            "token_ids": "",
            "window": 512,  # predictions in a window
            "max_windows": 0,  # how many windows at most, of each text; 0: all
            "window_every": 1,  # 25: every 25th window, spread over the text
            # Regular expression of lines that begin a document: intervals then draw documents.
            "document": "",  # WikiText's articles: "^ = [^=].*[^=] = $"
            # auto: segment if the tokenizer puts bos before a text, else none | segment: bos first
            # in every window (Gemma needs it) | stream: once | none.
            "bos": "auto",
            "batch_size": 4,  # windows computed at once
            "compute_dtype": "auto",  # dtype of the computation
        }
    )
