"""Removes inner neurons of a model's feed-forward layers and writes the smaller model.

Example:
  python scripts/compress.py --config=configs/prune.py --config.model=HuggingFaceTB/SmolLM2-135M \\
      --config.criterion=entropy --config.ratio=0.25 --config.layers=all --workdir=runs/pruned

Writes <workdir>/model/ (a directory that transformers loads where it can express the result),
<workdir>/results.json with `removed` (one index list per layer) and the parameter counts.
"""

from ffn_heterogeneity import cli
from ffn_heterogeneity.surgery.compress import run

if __name__ == "__main__":
    cli.launch(run, "prune", "configs/prune.py")
