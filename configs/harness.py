"""Tasks with metrics, by lm-evaluation-harness (extra `eval`; no torch).

Command:   python scripts/evaluate.py --config=configs/harness.py --config.model=<any> \
             --config.tasks="('piqa', 'gsm8k', 'mmlu')" --config.data_root=<directory>
           The results of a name are in <workdir>/tasks/<name>.json as soon as it is done; the same
           command with --workdir resumes where it stopped.
Hardware:  one CPU or accelerator.
Hours:     SmolLM2-135M, 100 questions of PIQA on 2 cores: half a minute; all of MMLU with 5 shots
           is for an accelerator.
Paper:     NUCL's Table 4: MMLU 5 shots, HellaSwag 10, ARC-e, PIQA, SIQA 0, TriviaQA, NQ-open 5.
"""

from ml_collections import ConfigDict

from configs.parts import tasks


def get_config() -> ConfigDict:
    config = tasks.get_config()  # whose keys are explained there
    config.evaluation = "tasks"  # what evaluate.py does with the model
    return config
