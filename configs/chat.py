"""Answers of a model to the questions of a chat benchmark, for a judge to read.

Command:   python scripts/evaluate.py --config=configs/chat.py --config.benchmark=mt_bench \
             --config.model=<any> --config.data_root=<directory> --workdir=runs/mt_bench
           Answers are in <workdir>/model_answer/<model_id>.jsonl, in the benchmark's own form;
           the same command resumes where it stopped. configs/judge.py has them judged.
Hardware:  one CPU or accelerator.
Hours:     SmolLM2-135M, 12 questions of two turns, 64 tokens each: 2 minutes of one CPU core.
           All of MT-bench with 1,024 tokens is for an accelerator.
Paper:     JREG: MT-bench, Vicuna and WizardLM questions after its fine-tuning. How it generated is
           not stated: MT-bench's temperatures are those of its authors. House of Cards: Spec-Bench.

The questions are no part of this package: data_root is a directory with <benchmark>/test.jsonl or
<benchmark>/question.jsonl, as their authors publish them.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "evaluation": "chat",  # what evaluate.py does with the model
            # Model: a directory, a .gguf file, a hub id or the name of a preset.
            "model": "",
            "revision": placeholder(str),  # branch, tag or commit of a hub id
            # What the answers call it; "": the last part of `model`.
            "model_id": "",
            # mt_bench (80 questions of two turns) | vicuna_bench (80) | wizardlm_testset (218) |
            # spec_bench (480: MT-bench's, and 400 of one turn).
            "benchmark": "mt_bench",
            "data_root": "",  # directory of <benchmark>/test.jsonl or question.jsonl
            # Only the first `limit` questions; 0: all.
            "limit": 0,
            # A message of the system before each conversation; "": none.
            "system": "",
            # auto: the tokenizer's template, else Tulu's form | tokenizer | tulu.
            "chat_template": "auto",
            "template_date": "2024-07-26",  # what a template writes that asks for today's date
            "bos": "auto",  # as of training: auto | segment | document | none
            # Unset: by the question's category (MT-bench, Vicuna), 0 for WizardLM's and for what
            # Spec-Bench adds to MT-bench. Spec-Bench's own runs are all at 0.
            "temperature": placeholder(float),
            "top_p": 1.0,  # below 1: only the likeliest tokens with this total
            "seed": 0,  # of the draws
            # Tokens of an answer, or as many as the model has positions left for.
            "max_new_tokens": 1024,
            "batch_size": 8,  # questions answered at once
            "compute_dtype": "auto",  # dtype of the computation
        }
    )
