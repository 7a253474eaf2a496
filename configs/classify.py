"""Predictions of a classifier, or a regression, for the rows of a file (P-32's heads).

Command:   python scripts/evaluate.py --config=configs/classify.py --config.model=<run>/model \
             --config.input=<file.csv|file.jsonl> --workdir=<directory>
           Writes <workdir>/predictions.csv: the columns of the input, then `prediction` and
           `probability_<label>` of each label (`value` of a regression), and results.json, with the
           task's metrics where the rows have answers.
Hardware:  a CPU for encoders and small decoders.
Hours:     seconds to minutes.
Paper:     P-32 prints no predictions.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "evaluation": "classify",  # what evaluate.py does with the model
            "model": "",  # a directory with a head: <run>/model of configs/p32_glue.py
            "revision": placeholder(str),  # branch, tag or commit of a hub id
            "input": "",  # .csv, .tsv, .jsonl or .parquet
            "fields": "",  # <a>[,<b>]: its texts, where they are named otherwise than in training
            "batch_size": 32,  # rows at once
            "compute_dtype": "auto",  # float32 | bfloat16; auto: where it is fast, bfloat16
        }
    )
