"""Task files and the requests a task makes of them."""

from __future__ import annotations

import json
from pathlib import Path


def rows_of(path, count=None):
    # Not splitlines(): JSON strings may hold U+2028 as it is.
    lines = Path(path).read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines if line][:count]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def requests_of(task, limit=8):
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return [(one.request_type, *one.args) for one in task.instances]


def instance(*arguments):
    from lm_eval.api.instance import Instance

    return Instance("loglikelihood", {}, tuple(arguments), 0)


def hf_model(torch, directory, batch_size=8):
    import transformers
    from lm_eval.models.huggingface import HFLM

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=batch_size, device="cpu")


class OwnTask:
    """A task that is no configuration of the harness's."""
