"""Qwen2.5-Coder-0.5B-Instruct answers MBPP and GSM8K questions as PyTorch does."""

import json
import re

import numpy as np
import pytest
from test_real_models import QWEN

from ffn_heterogeneity.evaluate import code_metrics
from ffn_heterogeneity.evaluate.inputs import prompt_rows
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.generate import Generator
from ffn_heterogeneity.models.sampling import Sampling

# (rows, new tokens, right answers in PyTorch, float32, greedy)
MBPP, GSM8K = (12, 200, 5), (16, 256, 3)
NEAR_TIE = 1e-3  # difference of two logits that float32 may order either way


def first_rows(path, count):
    with path.open() as file:
        return [json.loads(line) for line in file][:count]


def mbpp_passes(row, text):
    program = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.S)
    program, tests = program[1] if program else text, row["test_list"]
    return code_metrics.run_solution(program, tests, row["test_setup_code"], allow=True).passed


def gsm8k_is_right(row, text):
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", text)
    wanted = row["answer"].split("####")[1].replace(",", "")
    return bool(numbers) and float(numbers[-1].replace(",", "")) == float(wanted)


def torchs_answers(torch, prompts, new_tokens):
    """Greedy answers of one batch, padded on the left; pads after an eos are cut off."""
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": QWEN.name, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(QWEN.parent, **options).eval()
    width = max(map(len, prompts))
    ids, mask = (np.zeros((len(prompts), width), np.int64) for _ in range(2))
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = prompt, 1
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    ends = {"eos_token_id": [151_645, 151_643], "pad_token_id": 151_643}
    with torch.no_grad():
        made = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens, **ends)
        answers = []
        for row in made[:, width:].tolist():
            end = next((i for i, token in enumerate(row) if token in ends["eos_token_id"]), None)
            answers.append(row if end is None else row[: end + 1])
    return model, answers


def assert_same(torch, model, prompt, ours, theirs):
    """The same tokens, up to the first place at which PyTorch's two best logits nearly tie."""
    if ours == theirs:
        return
    place = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len({*pair}) > 1)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *theirs[:place]]])).logits[0, -1]
    gap = float(logits[theirs[place]] - logits[ours[place]])
    assert abs(gap) < NEAR_TIE, f"token {place}: {ours[place]}, not {theirs[place]}; {gap} apart"


@pytest.mark.slow
@pytest.mark.skipif(not QWEN.exists(), reason=f"{QWEN} is missing (fetch_models.py)")
@pytest.mark.parametrize("task", ["mbpp", "gsm8k"])
def test_answers_are_those_of_torch(torch, shared_data, task):
    count, new_tokens, right = {"mbpp": MBPP, "gsm8k": GSM8K}[task]
    rows = first_rows(shared_data / task / "test.jsonl", count)
    if task == "mbpp":
        tests = ("\n".join(row["test_list"]) for row in rows)
        asked = [
            f"{row['text']}\nYour code should pass these tests:\n{tests_of_row}"
            for row, tests_of_row in zip(rows, tests, strict=True)
        ]
    else:
        end = 'Think step by step and end with "#### <number>".'
        asked = [f"{row['question']}\n{end}" for row in rows]
    model = load_model(QWEN)
    prompts = prompt_rows(model, asked, chat=True)
    made = Generator(model.config, model.params, model.tokenizer, batch_size=count)
    ours = made(prompts, Sampling(max_new_tokens=new_tokens), progress=None)
    judge = {"mbpp": mbpp_passes, "gsm8k": gsm8k_is_right}[task]
    solved = sum(judge(row, answer.text) for row, answer in zip(rows, ours, strict=True))
    reference, theirs = torchs_answers(torch, prompts, new_tokens)
    same = sum(answer.tokens == tokens for answer, tokens in zip(ours, theirs, strict=True))
    print(f"\n{task}: {solved} of {count} right; {same} answers equal PyTorch's")
    for prompt, answer, tokens in zip(prompts, ours, theirs, strict=True):
        assert_same(torch, reference, prompt, answer.tokens, tokens)
    assert solved == right
