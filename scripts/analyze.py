"""Analyses a model's feed-forward layers.

Example:
  python scripts/analyze.py --config=configs/analyze.py:connectivity --config.model=gemma3_270m

Writes <workdir>/results.json (`layers`: a list of entropy, gini and mstd, each summed over the
layer's neurons) and <workdir>/connectivity.png.
"""

from ffn_heterogeneity.evaluate.run import run
from ffn_heterogeneity.launch import cli

if __name__ == "__main__":
    cli.launch(run, "analyze", "analyze:connectivity")
