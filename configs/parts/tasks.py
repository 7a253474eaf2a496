"""The keys of tasks with metrics, by lm-evaluation-harness (configs/harness.py)."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            # Model: a directory, a .gguf file, a hub id or the name of a preset.
            "model": "",
            "revision": placeholder(str),  # branch, tag or commit of a hub id
            # Names of tasks, groups and tags of the harness, or with data_root of the pack here:
            # arc_challenge arc_easy boolq cb copa gsm8k hellaswag lambada_openai mbpp mmlu nq_open
            # piqa race sciq sglue_rte social_iqa swag triviaqa wic winogrande, and of LongBench
            # longbench_multi_news minilongbench_qa (prompts too long are cut in the middle).
            "tasks": ("piqa",),
            # Directory of <task's folder>/<split>.jsonl; "": the harness fetches its data sets.
            "data_root": "",
            # Examples before each question, for all tasks; unset: each task's own number.
            "num_fewshot": placeholder(int),
            "fewshot_seed": 1234,  # of the draw of examples
            # auto: from the training file where it is there; train | evaluation.
            "fewshot_from": "auto",
            # Only the first `limit` questions of each task or group; 0: all.
            "limit": 0,
            # bos before every text: auto (the tokenizer's rule) | always | never.
            "add_bos": "auto",
            # Questions as the tokenizer's chat template writes them.
            "chat_template": False,
            # Further strings that end an answer: "('\n[eod]',)" after such training.
            "stop": (),
            # Longest input, of generation with what is generated; 0: the model's positions.
            "max_length": 0,
            # MBPP runs programs that the model wrote, in a sandbox.
            "allow_code_execution": False,
            # Write every question with its answers to <workdir>/samples/<task>.jsonl.
            "save_samples": True,
            "batch_tokens": 2048,  # tokens scored at once
            "generation_batch_size": 8,  # prompts continued at once
            "compute_dtype": "auto",  # dtype of the computation
        }
    )
