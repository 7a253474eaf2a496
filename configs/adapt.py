"""Add adapters to a model's kernels (`lora`, `dora`), or fold them in (`fold`).

Command:   python scripts/compress.py --config=configs/adapt.py:lora --config.model=<any>
           python scripts/compress.py --config=configs/adapt.py:fold --config.model=<run>/model
           What comes out keeps its structure (io/hf/structure.py): a training resumes with it, and
           any other tool reads the folded weights. Training can add them, too:
           configs/nucl_finetune.py:<model>,<data>,dora; with macdrop it trains past the massive
           weights.
Hardware:  any CPU with the model's size in memory three times.
Hours:     seconds for SmolLM2-135M.
Paper:     massive weights: rank = alpha = 16, all linear layers but embedding and head.
"""

from ml_collections import ConfigDict

from configs import perplexity
from configs.parts import adapters


def get_config(surgery: str = "lora") -> ConfigDict:
    if surgery not in ("lora", "dora", "fold"):
        raise ValueError(f"config argument {surgery!r}: lora, dora or fold")
    config = perplexity.get_config()  # model; with a text: before and after, as in prune.py
    config.surgery = surgery  # lora | dora | fold
    if surgery != "fold":
        config.update(adapters.LORA)
        config.seed = 0  # of A
    config.export = "auto"  # auto | native; padded folds
    config.dtype = "as_read"  # or float32 | bfloat16 | float16; masks and scales are never cast
    config.push = ""  # <owner>/<name>: the model goes to the Hugging Face hub, too
    return config
