"""Token shards from text, JSONL, parquet or a hub data set; a tokenizer too, where one is wanted.

Command:   python scripts/prepare_data.py --config.input=<files, directory, glob or hub name> \
             --config.tokenizer=<model> --config.processes=8 --workdir=runs/corpus
           python scripts/prepare_data.py --config.input=<...> \
             --config.train_tokenizer.vocab_size=32000 --workdir=runs/corpus
Hardware:  CPU cores; disk for 2 bytes a token (4 where the vocabulary is over 65,536).
Hours:     a process tokenises 0.1 to 0.2 million tokens a second (SmolLM2's tokenizer, a 2.8 GHz
           core): a billion tokens with 8 processes in about 15 minutes.

The shards do not depend on the number of processes.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            # Files (text and .jsonl also as .gz), directories (all files, of one kind), globs, hub
            # names (owner/name[:config]); several with commas.
            "input": "",
            "text_field": "text",  # of JSONL, parquet and hub data: where the text is
            "split": "train",  # of hub data
            "data_revision": placeholder(str),  # branch, tag or commit of hub data
            # Hub data are read as they come and not stored; each process reads all of them.
            "stream": False,
            # No shard is added after this number; 0: all. Hub data stop at exactly this row.
            "max_documents": 0,
            "max_tokens": 0,  # as max_documents
            # Of text files, what stands between documents: "" (a file is one) | blank_line | line |
            # the very text ("<|endoftext|>").
            "separator": "",
            # Whose tokenizer: a directory, a .gguf file, a hub id or the name of a preset ...
            "tokenizer": "",
            "revision": placeholder(str),  # branch, tag or commit of a hub id
            # ... or one that is trained here first: byte-level BPE.
            "train_tokenizer": {
                "vocab_size": 0,  # 0: none is trained
                "min_frequency": 2,  # of a pair that is merged
                "max_mb": 1000.0,  # of the input that it is trained on
            },
            # A model that will read the tokens: rejected if its vocabulary is too small.
            "model": "",
            # Documents end with the tokenizer's eos; a bos is added when they are read.
            "eos": True,
            # Longer documents are tokenised in pieces of at most this number of characters.
            "passage_chars": 16_384,
            # Approximate megabytes of input per shard: the work repeated after an interruption.
            "shard_mb": 64.0,
            "processes": 1,  # that tokenise
            # Say what would be made, from a sample; write nothing.
            "dry_run": False,
        }
    )
