"""Runs a sweep that a config file defines: every point in its own directory, resumably.

Example:
  python scripts/sweep.py --config=configs/nucl_finetune.py:HuggingFaceTB/SmolLM2-135M,gsm8k \\
      --sweep=alpha --workdir=runs/alpha
  python scripts/sweep.py --config=configs/prune_table.py --sweep=criteria --workdir=runs/table4
  python scripts/sweep.py ... --print                  one command a line, for many machines
  python scripts/sweep.py ... --launcher=submitit --submitit=slurm_partition=gpu,gpus_per_node=1

Writes <workdir>/sweep.json and <workdir>/<point>/. The same command again skips what is finished
and continues what was stopped. Points that differ only in weights, rates or seeds share one
compiled program. A point that fails is named at the end (exit code 2); the others run.
"""

import sys

from absl import flags

from ffn_heterogeneity.launch import cli, sweep_run

CONFIG = "nucl_finetune"
SWEEP = flags.DEFINE_string("sweep", "", "Its name in the config file's SWEEPS.")
ONLY = flags.DEFINE_multi_string("only", [], "Run this point alone; may be given several times.")
PRINT = flags.DEFINE_bool("print", False, "Run nothing: print one command a line.")
LAUNCHER = flags.DEFINE_enum(
    "launcher", "local", sweep_run.LAUNCHERS, "In this process, or one job a point."
)
SUBMITIT = flags.DEFINE_string(
    "submitit", "", "Options of the jobs: timeout_min=600,parallel=4,slurm_partition=gpu,..."
)


def main(config, workdir) -> None:
    _, spec = cli.config_first(sys.argv, CONFIG)
    points = {"spec": spec, "sweep": SWEEP.value, "only": ONLY.value, "commands": PRINT.value}
    jobs = {"launcher": LAUNCHER.value, "submitit": SUBMITIT.value}
    sweep_run.run(config, workdir, **points, **jobs)


if __name__ == "__main__":
    # Each point has its own directory: several may run at once, from several commands.
    cli.launch(main, "sweep", CONFIG, alone=False)
