"""Fine-tunes a model with the text loss and NUCL, or runs several stages as one job.

Example:
  python scripts/train.py --config=configs/nucl_finetune.py:gemma2_2b,gsm8k \\
      --config.losses.nucl.weight=1 --workdir=runs/nucl
  python scripts/train.py --config=configs/nucl_finetune.py:gemma2_27b,gsm8k \\
      --config.dry_run=v5e:8x8 --config.mesh.tensor=4      what it needs there; nothing is trained
  python scripts/train.py --config=configs/nucl_finetune.py:gemma2_2b,gsm8k \\
      --config.seeds="(0, 1, 2)"                           one run each, and their mean

Writes <workdir>/model/ (a directory that transformers loads), <workdir>/results.json,
metrics.jsonl, TensorBoard events and checkpoints. The same command continues a run that stopped.
configs/prune_recover.py shows a run of stages (prune, recover, score).
"""

from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.launch.experiment import run

if __name__ == "__main__":
    cli.launch(run, "train", "nucl_finetune", processes=True)
