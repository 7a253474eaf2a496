"""Evaluates a model: perplexity of a text.

Example:
  python scripts/evaluate.py --config=configs/perplexity.py --config.model=runs/pruned/model \\
      --config.text=wiki.test.raw --config.window=512 --config.max_windows=40 --config.bos=segment

Writes <workdir>/results.json with `perplexity`, `nll` (nats a token) and `tokens`.
"""

from ffn_heterogeneity.evaluate.run import run
from ffn_heterogeneity.launch import cli

if __name__ == "__main__":
    cli.launch(run, "evaluate", "configs/perplexity.py")
