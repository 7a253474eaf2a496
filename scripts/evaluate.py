"""Evaluates a model: perplexity of a text, and all that configs/ measures by name.

Example:
  python scripts/evaluate.py --config=configs/perplexity.py --config.model=runs/pruned/model \\
      --config.text=wiki.test.raw --config.window=512 --config.max_windows=40
  python scripts/evaluate.py --config=configs/nucl_finetune.py:runs/nucl/model,gsm8k
                                                 what that training would print of its held-out data

Writes <workdir>/results.json with `perplexity`, `nll` (nats a token) and `tokens`.
"""

from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.launch.evaluate import run

if __name__ == "__main__":
    cli.launch(run, "evaluate", "perplexity")
