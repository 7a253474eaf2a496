"""Answers of configs/chat.py, judged by a language model behind an OpenAI-compatible endpoint.

Command:   python scripts/evaluate.py --config=configs/judge.py --config.benchmark=mt_bench \
             --config.answers=runs/mt_bench/model_answer/<model>.jsonl --config.data_root=<dir> \
             --config.url=http://localhost:8000 --config.judge_model=<name> --workdir=runs/judged
           --config.mode=pairwise --config.baseline=<other answers>: which of two models is better,
           asked twice with the places swapped. The same command asks again what failed.
Hardware:  none but a network (and the extra `judge`); a judge of one's own (vLLM, llama.cpp and
           others serve the endpoint) needs what it needs.
Hours:     MT-bench is 160 calls, 320 pairwise.
Paper:     JREG: MT-bench, Vicuna and WizardLM questions judged by GPT-4. The prompts here are ours
           (MT-bench's protocol of "[[8]]" and "[[A]]"): scores are comparable among runs of this
           judge, not with published ones.

Judgments are in <workdir>/model_judgment/<judge>_single.jsonl (or _pair), in FastChat's form;
calls without one in <workdir>/failed.jsonl, with the reason and what came back.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    temperature = placeholder(float)
    temperature.set(0.0)
    return ConfigDict(
        {
            "evaluation": "judge",  # what evaluate.py does with the model
            # single: a rating from 1 to 10 | pairwise: against `baseline`.
            "mode": "single",
            "benchmark": "mt_bench",  # as in configs/chat.py
            # As in configs/chat.py; MT-bench's reference answers (reference_gpt4.jsonl, or
            # reference_answer/gpt-4.jsonl) are read from there.
            "data_root": "",
            "limit": 0,  # judge only the first `limit` questions; 0: all
            "answers": "",  # a file of configs/chat.py's answers
            "baseline": "",  # another, of pairwise
            "url": "",  # the endpoint's address before /v1/chat/completions
            "judge_model": "",  # the judge's name there
            # The environment variable that holds the key; "": the endpoint wants none.
            "key_env": "OPENAI_API_KEY",
            "temperature": temperature,  # None: not sent
            "max_tokens": 2048,  # 0: not sent
            "timeout": 120.0,  # seconds for each try
            "retries": 5,  # further tries, after 0.5 s, then twice as long, up to 8 s
            "workers": 4,  # calls at once
            # Consecutive failures that end the run (0: never).
            "give_up_after": 10,
        }
    )
