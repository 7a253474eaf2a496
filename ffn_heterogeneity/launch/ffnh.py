"""The command `ffnh`: `ffnh <script> ...` runs a launcher of scripts/ from any directory."""

import runpy
import sys
from pathlib import Path

import ffn_heterogeneity as fh
from ffn_heterogeneity.launch import cli, configs
from ffn_heterogeneity.wording import unknown


def main() -> None:
    """Run the script that the first argument names; without arguments, list the scripts.

    `ffnh configs` lists the configs. `--config=` also takes the name of a packaged config: `ffnh
    train --config=nucl_finetune:smollm2,text`.
    """
    scripts = {path.stem: path for path in sorted((configs.home() / "scripts").glob("*.py"))}
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        print(f"ffn_heterogeneity {fh.__version__}")
    elif name in (*cli.HELP_FLAGS, "help", "configs"):
        with cli.reader_may_leave():
            print(configs.listing() if name == "configs" else _usage(scripts))
    else:
        with cli.errors_in_one_line():
            script = str(_script(name, scripts))
        sys.argv = [script, *sys.argv[2:]]
        runpy.run_path(script, run_name="__main__")


def _script(name: str, scripts: dict[str, Path]) -> Path:
    """Return the script that a command names.

    Raises:
      UsageError: no such script; the message names the nearest, or the command of a config.
    """
    if script := scripts.get(name.replace("-", "_")):
        return script
    spec = name.removeprefix("--config=")
    if configs.find_config(spec):
        command = (*configs.commands_of(configs.load_config(spec)), "<command>")[0]
        raise cli.UsageError(f"{name!r} is a config: write ffnh {command} --config={spec}")
    raise cli.UsageError(unknown("command", name, [*scripts, "configs"]))


def _usage(scripts: dict[str, Path]) -> str:
    lines = [f"ffn_heterogeneity {fh.__version__}: see ffnh <command> --help", ""]
    for name, path in scripts.items():
        lines.append(f"  {name:<14}{configs.summary(path)}")
    lines.append(f"  {'configs':<14}Lists the configs: name, command and purpose.")
    return "\n".join([*lines, "", "--config=<file, or a name from `ffnh configs`>[:<argument>]"])
