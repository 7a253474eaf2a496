"""The tour: neurons removed from a real model without data, then recovery, on two CPU cores.

Example:
  python scripts/demo.py --workdir=runs/demo      (or: make demo)

Writes <workdir>/report.md, figures and <workdir>/results.json. Completed pieces are saved: a second
run prints the report at once; --fresh starts over.
"""

from absl import flags
from etils import epath

from ffn_heterogeneity.launch import cli, demo
from ffn_heterogeneity.launch.huge_pages import restart_with_huge_pages

WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "Directory for all outputs.")
MODELS = flags.DEFINE_string("models", None, "Where the model is kept (as of fetch_models).")
STEPS = flags.DEFINE_integer("steps", 22, "Fine-tuning steps of each run.", lower_bound=2)
FRESH = flags.DEFINE_bool("fresh", False, "Start over.")


def main() -> None:
    restart_with_huge_pages()
    workdir = epath.Path(WORKDIR.value)
    demo.run(workdir, MODELS.value, STEPS.value, fresh=FRESH.value)


if __name__ == "__main__":
    cli.launch_flags(main)
