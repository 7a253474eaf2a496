"""Questions of SuperGLUE or WebNLG answered by a model and scored, with bootstrap intervals.

Command:   python scripts/evaluate.py --config=configs/answers.py --config.model=<any> \
             --config.data_root=<directory> --config.tasks="('superglue_rte', 'superglue_cb')" \
             --workdir=runs/superglue
           Answers are in <workdir>/answers/<task>.jsonl, scores in <workdir>/results.json; the
           same command resumes where it stopped. WebNLG (BLEU, TER: extra `text`), all of it and
           its seen and unseen categories: --config.tasks="('webnlg',)" --config.split=test
           --config.max_new_tokens=100
Hardware:  one CPU or accelerator.
Hours:     SmolLM2-135M, 293 questions of four tasks: 6 minutes on 2 CPU cores.
Paper:     NUCL: SuperGLUE's average in percent, of a task with several scores their mean first;
           PaLM 2 and no Gemma. How it generated, and on which split, is not stated.
           MLP Fusion's Table IV: GPT-2 on WebNLG, BLEU 57.93 seen, 22.55 unseen, 42.17 all, by the
           official script; METEOR, which it prints too, is not here.

A question's form is the training data's (configs/nucl_finetune.py:<model>,superglue): an untuned
model hardly ever answers with a label word.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "evaluation": "answers",  # what evaluate.py does with the model
            # Model: a directory, a .gguf file, a hub id or the name of a preset.
            "model": "",
            "revision": placeholder(str),  # branch, tag or commit of a hub id
            # superglue: all eight and their average; or superglue_ and boolq, cb, copa, multirc,
            # record, rte, wic, wsc (dpr: accuracy, no part of the average); or webnlg.
            "tasks": ("superglue",),
            # Directory of <task's folder>/<split>.jsonl or .parquet; "": the hub (not webnlg).
            "data_root": "",
            # SuperGLUE's test sets have no labels; WebNLG's has all references.
            "split": "validation",
            # Only the first `limit` questions of each task, with all answers of MultiRC's; 0: all.
            "limit": 0,
            "bos": "auto",  # as of training: auto | segment | document | none
            "max_new_tokens": 32,  # of an answer
            "batch_size": 8,  # prompts answered at once
            "compute_dtype": "auto",  # dtype of the computation
            "bootstrap": 1000,  # resamples of the questions, for the 95% intervals
            "seed": 0,  # of these draws
        }
    )
