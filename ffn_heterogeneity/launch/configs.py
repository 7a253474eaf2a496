"""Config files: finding, loading and listing them, and the command that runs each."""

import contextlib
import inspect
import re
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from ffn_heterogeneity.wording import first_line, nearest

# The commands that run a config (the main one first), by the first of these keys that it has;
# `sweep` runs every config with SWEEPS.
RUN_BY = {"stages": "train", "losses": "train evaluate", "save_model": "sweep compress"}
RUN_BY |= {"export": "compress", "shard_mb": "prepare_data", "repetitions": "benchmark"}
RUN_BY |= {"analysis": "analyze evaluate", "evaluation": "evaluate analyze", "window": "evaluate"}


class UsageError(ValueError):
    """A command line that cannot be understood."""


def home() -> Path:
    """Directory of `configs/` and `scripts/`: in the installed package, or the repository."""
    package = Path(__file__).resolve().parents[1]
    bundled = package / "_bundled"
    return bundled if bundled.is_dir() else package.parent


def config_first(argv: Sequence[str], default: str) -> tuple[list[str], str]:
    """Return (argv with --config=<spec> before its overrides, the spec), whatever their order.

    `find_config` finds the spec's file.
    """
    spec, rest, waiting = default, [], iter(argv[1:])
    for argument in waiting:
        if argument in ("-config", "--config"):
            spec = next(waiting, "")
        elif match := re.match(r"--?config=(.*)", argument):
            spec = match[1]
        else:
            rest.append(argument)
    spec = find_config(spec) or spec
    return [argv[0], f"--config={spec}", *rest], spec


def ours() -> dict[str, Path]:
    """{name: file} of the configs that come with the package."""
    return {path.stem: path for path in sorted((home() / "configs").glob("*.py"))}


def find_config(spec: str) -> str:
    """Return the spec with the path of its file; "" if there is no such file.

    A plain name ("prune") always means one of our configs. A file of the working directory is used
    only if its path is given ("mine.py", "configs/prune.py"); it then takes priority over ours.
    """
    name, colon, argument = spec.partition(":")
    shipped = [home() / "configs" / f"{name}.py"]
    paths = [Path(name).expanduser(), home() / name] if name.endswith(".py") else shipped
    return next((f"{path}{colon}{argument}" for path in paths if path.is_file()), "")


def shown(spec: str) -> str:
    """A spec as users type it: our configs by their names."""
    ours = f"{home()}/configs/"
    return spec.replace(".py", "", 1).removeprefix(ours) if spec.startswith(ours) else spec


def commands_of(config: ConfigDict) -> list[str]:
    """Commands that run such a config, the main one first; [] if it has no key of `RUN_BY`."""
    return next((names for key, names in RUN_BY.items() if key in config), "").split()


def check_command(command: str, config: ConfigDict, spec: str) -> None:
    """Reject a config of another command.

    Raises:
      UsageError: names the command that runs it.
    """
    commands, known = commands_of(config), " ".join(RUN_BY.values()).split()
    if commands and command in {*known} - {"sweep", *commands}:
        right = as_typed(f"python scripts/{commands[0]}.py --config={shown(spec)}")
        raise UsageError(f"{command} cannot run the config {shown(spec)!r}: write {right}")


def as_typed(text: str) -> str:
    """Rewrite commands in a text to the form in which this process was started.

    `python scripts/<name>.py` becomes `ffnh <name>` or `python -m ffn_heterogeneity <name>`, and
    config files become the names of configs.
    """
    before = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    if not before or before[-1].replace("-", "_") != Path(sys.argv[0]).stem:
        return text
    front = "python -m ffn_heterogeneity" if before[-2:-1] == ["ffn_heterogeneity"] else "ffnh"
    text = re.sub(r"python scripts/(\w+)\.py", rf"{front} \1", text)
    return re.sub(r"(--config=)configs/(\w+)\.py", r"\1\2", text)


def summary(path: Path) -> str:
    """The first line of a file's docstring."""
    return path.read_text(encoding="utf-8").split('"""')[1].splitlines()[0]


def listing() -> str:
    """One line per config of ours: its name, its command, the first line of its docstring."""
    rows = [(name, *commands_of(load_config(name))[:1], path) for name, path in ours().items()]
    return "\n".join(f"  {name:<15}{command:<14}{summary(path)}" for name, command, path in rows)


def load_config(spec: str) -> ConfigDict:
    """Load the config that `get_config` of "file.py" or "file.py:argument" returns.

    Raises:
      UsageError: no such file, no such function, an argument that it does not take.
      ValueError: from `get_config`, about its argument.
    """
    name, colon, argument = (find_config(spec) or spec).partition(":")
    if not find_config(spec):
        known = [*ours(), *sorted(map(str, Path(name).parent.glob("*.py")))]
        near = nearest(Path(name).stem, known) or nearest(name, known)
        hint = f", did you mean {near!r}?" if near else "; a model is --config.model=<model>."
        way = f"{hint} Known: {', '.join(known)}; `ffnh configs` describes ours"
        raise UsageError(f"config file {name!r} does not exist{way}")
    if str(home()) not in sys.path:  # config files import configs.parts
        sys.path.append(str(home()))  # last, so that it shadows no installed module
    with _line_of(name):
        get_config = runpy.run_path(name).get("get_config")
    if get_config is None:
        raise UsageError(f"config file {name!r} defines no get_config()")
    if colon and not inspect.signature(get_config).parameters:
        raise UsageError(f"{name!r} takes no argument {argument!r}: use --config.<key>=<value>")
    with _line_of(name):
        return get_config(*([argument] if colon else []))


@contextlib.contextmanager
def _line_of(name: str) -> Iterator[None]:
    """Add the line of a config file to the block's error; users' errors pass unchanged.

    Raises:
      UsageError: for any other error, with the file and the line.
    """
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == name]
        line, said = lines[-1] if lines else 0, first_line(error)
        if isinstance(error, SyntaxError) and error.filename == name:
            line, said = error.lineno, error.msg
        raise UsageError(f"{name}, line {line}: {type(error).__name__}: {said}") from error
