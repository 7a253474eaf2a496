"""Removes inner neurons of a model's feed-forward layers and writes the smaller model.

Example:
  python scripts/compress.py --config=configs/prune.py --config.model=HuggingFaceTB/SmolLM2-135M \\
      --config.criterion=entropy --config.ratio=0.25 --config.layers=all --workdir=runs/pruned
  python scripts/compress.py --config.model=gemma2_2b --config.streaming=true \\
      --config.criterion=similarity --config.compensation=sum --workdir=runs/merged

Writes <workdir>/model/ (a directory that transformers loads where it can express the result),
<workdir>/results.json with `removed` (one index list per layer), the parameter counts and, of a
compensation, what it took in each layer. With streaming the model is never in memory. With
--config.text=<file> both models' perplexities are there, and in the model card.
"""

from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.launch.in_memory import surgery

if __name__ == "__main__":
    cli.launch(surgery, "prune", "prune")
