"""A real model compared with the harness's torch model: log-likelihoods, texts, and times."""

import json
import time

import numpy as np
import pytest
from task_tools import hf_model, instance

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.stack import unstack


@pytest.mark.slow
def test_smollm2_agrees_with_the_harness(torch, lm_eval, shared_data, smollm2_gguf, tmp_path):
    """100 questions each of PIQA and HellaSwag, and 20 prompts continued by 64 tokens."""
    from ffn_heterogeneity.evaluate.harness import HarnessLM
    from ffn_heterogeneity.evaluate.harness_tasks import make_task_pack

    model = load_model(smollm2_gguf)
    params = unstack(model.params)
    save_pretrained(model.config, params, tmp_path / "model", tokenizer=model.tokenizer)
    theirs, ours = hf_model(torch, tmp_path / "model", 20), HarnessLM(model, batch_size=20)
    samples = []
    for lm in (ours, theirs):
        pack = make_task_pack(str(shared_data), ["piqa", "hellaswag"], num_fewshot=0)
        start = time.monotonic()
        made = lm_eval.simple_evaluate(lm, **pack._asdict(), limit=100, bootstrap_iters=0)
        samples.append(made["samples"])
        print(f"{type(lm).__name__}: 200 questions in {time.monotonic() - start:.1f} s")
    for task, rows in samples[0].items():
        for one, other in zip(rows, samples[1][task], strict=True):
            a, b = ([float(r[0][0]) for r in row["resps"]] for row in (one, other))
            assert np.max(np.abs(np.subtract(a, b))) <= 1e-3, (task, one["doc_id"])
            assert (one["acc"], one["acc_norm"]) == (other["acc"], other["acc_norm"])
    check_generations(ours, theirs, model, shared_data)


def check_generations(ours, theirs, model, shared_data):
    """Token by token; where they differ, the two tokens' logits may differ by 1e-4 at most."""
    from tiny_models import our_logits

    lines = (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()[:20]
    prompts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    wanted = {"until": [], "do_sample": False, "max_gen_toks": 64}
    texts, encode = [], model.tokenizer.encode
    for lm in (ours, theirs):
        start = time.monotonic()
        texts.append(lm.generate_until([instance(p, dict(wanted)) for p in prompts]))
        print(f"{type(lm).__name__}: {20 * 64 / (time.monotonic() - start):.1f} tokens/s")
    for prompt, a, b in zip(prompts, *texts, strict=True):
        if a == b:
            continue
        a, b = encode(a, add_special_tokens=False), encode(b, add_special_tokens=False)
        same = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        row = np.array([[*encode(prompt), *a[:same]]])
        logits = our_logits(model.config, model.params, row)[0, -1]
        assert abs(logits[a[same]] - logits[b[same]]) <= 1e-4, prompt
