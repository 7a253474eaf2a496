"""The command `ffnh`: `ffnh <script> ...` runs a launcher of scripts/ wherever it is installed."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import ffn_heterogeneity as fh
from ffn_heterogeneity.launch.cli import HELP_FLAGS, home, reader_may_leave
from ffn_heterogeneity.wording import unknown


def main() -> None:
    """Runs the script named first as if it were called by its path; without one, lists them.

    `--config=` takes the name of a config that came with the package: `ffnh train
    --config=nucl_finetune:smollm2,text`.
    """
    scripts = {path.stem: path for path in sorted((home() / "scripts").glob("*.py"))}
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    script = scripts.get(name.replace("-", "_"))
    if script is not None:
        sys.argv = [str(script), *sys.argv[2:]]
        runpy.run_path(str(script), run_name="__main__")
    elif name == "--version":
        print(f"ffn_heterogeneity {fh.__version__}")
    elif name in HELP_FLAGS:
        with reader_may_leave():
            print(_usage(scripts))
    else:
        print(f"error: {unknown('command', name, scripts)}", file=sys.stderr)
        sys.exit(2)


def _usage(scripts: dict[str, Path]) -> str:
    lines = [f"ffn_heterogeneity {fh.__version__}: ffnh <command> --help says more", ""]
    for name, path in scripts.items():
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[0]
        lines.append(f"  {name:<14}{about}")
    configs = sorted(path.stem for path in (home() / "configs").glob("*.py"))
    return "\n".join([*lines, "", f"--config=<file, or one of {', '.join(configs)}>[:<argument>]"])
