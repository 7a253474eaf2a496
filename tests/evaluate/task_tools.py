"""Task files, and the requests that a task makes from them."""


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
    """A task that is a class, not a configuration of the harness."""
