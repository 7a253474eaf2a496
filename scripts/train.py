"""Fine-tunes a model: the text loss and, beside it, NUCL.

Example:
  python scripts/train.py --config=configs/nucl_finetune.py:gemma2_2b,gsm8k \\
      --config.nucl.alpha=1 --workdir=runs/nucl

Writes <workdir>/model/ (a directory that transformers loads), <workdir>/results.json,
metrics.jsonl, TensorBoard events and checkpoints. The same command continues a run that stopped.
"""

from ffn_heterogeneity import cli
from ffn_heterogeneity.experiment import run

if __name__ == "__main__":
    cli.launch(run, "train", "configs/nucl_finetune.py", processes=True)
