"""The keys of a surgery in memory and of what scores its model: of configs/*_table.py."""

from ml_collections import ConfigDict

from configs.parts import tasks


def get_config(surgery: ConfigDict) -> ConfigDict:
    """Those of configs/parts/tasks.py and of the surgery's own file, and what stands here."""
    keys = dict(tasks.get_config().items(preserve_field_references=True))
    config = ConfigDict(keys | dict(surgery.items(preserve_field_references=True)))
    config.compute_dtype = "float32"  # as what docs/results has, on any machine
    config.tasks = ()  # scored in addition to the perplexity
    config.prompts = ()  # questions that the changed model answers: "('What is a neuron?',)"
    config.max_new_tokens = 64  # of an answer
    # Also write the changed model, to <workdir>/<point>/model.
    config.save_model = False
    return config
