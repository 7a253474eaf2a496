"""Tokenises text, JSONL, parquet or a hub data set into shards that training memory-maps.

Example:
  python scripts/prepare_data.py --config.input="corpus/*.jsonl" --config.processes=8 \\
      --config.tokenizer=HuggingFaceTB/SmolLM2-135M --workdir=runs/corpus
  python scripts/prepare_data.py --config.input=HuggingFaceFW/fineweb-edu:sample-10BT \\
      --config.train_tokenizer.vocab_size=32000 --config.processes=8 --workdir=runs/corpus
  python scripts/prepare_data.py ... --config.dry_run=true       what it would make

Train on the shards with configs/jreg_pretrain.py, or with another config whose key data.task is set
to "tokens" and data.path to <workdir>.

Writes <workdir>/tokens/ (shards and manifest.json), <workdir>/tokenizer/ where one is trained, and
<workdir>/results.json. The same command resumes where it was stopped.
"""

from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.launch.prepare_data import run

if __name__ == "__main__":
    cli.launch(run, "prepare_data", "prepare_data")
