"""Common parts of the launchers: flags, help, the work directory, one-line errors."""

import contextlib
import datetime
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from etils import epath
from ml_collections import ConfigDict, FieldReference, config_flags

from ffn_heterogeneity.io.errors import passes
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.io.workdir import working_in
from ffn_heterogeneity.launch import configs
from ffn_heterogeneity.launch.compilation import keep_compiled
from ffn_heterogeneity.launch.configs import UsageError, config_first, load_config
from ffn_heterogeneity.launch.help import help_text
from ffn_heterogeneity.launch.huge_pages import restart_with_huge_pages
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.parallel import processes as distributed
from ffn_heterogeneity.wording import check_known, naming, nearest, unknown

# Errors that a user can cause and fix; all others show a traceback.
USER_ERRORS = (ValueError, OSError, KeyError, ImportError)
# Optional packages and the extras that install them.
EXTRAS = {
    "grain": "train",
    "tensorboardX": "train",
    "datasets": "data",
    "pyarrow": "data",
    "matplotlib": "plots",
    "wandb": "wandb",
}
HELP_FLAGS = ("-h", "-help", "--help", "--helpshort", "-?")


def launch(
    run: Callable[[ConfigDict, epath.Path], Any],
    name: str,
    default_config: str,
    positional: str | None = None,
    processes: bool = False,
    alone: bool = True,
) -> None:
    """Parse --config, --config.<key>=<value> and --workdir, claim the directory and call `run`.

    An error that a user can fix ends the program with one line and exit code 2.

    Args:
      run: (config, work directory) -> anything; it must write `<workdir>/results.json`.
      name: the script's name, for the default work directory.
      default_config: name of one of our configs, with its argument if any.
      positional: the config key that is set by an argument without dashes.
      processes: whether `run` may be one of several processes; adds the flag --distributed.
      alone: as in `working_in`.
    """
    workdir_flag = flags.DEFINE_string(
        "workdir", None, f"Directory for all outputs; default: runs/{name}-<date>-<time>."
    )
    distributed_flag = None
    if processes:
        distributed_flag = flags.DEFINE_string(
            "distributed", "", f"Several processes, one run: {distributed.WAYS}."
        )

    with errors_in_one_line():
        argv, holder = prepare(sys.argv, default_config)
    restart_with_huge_pages()

    def main() -> None:
        config = holder.value
        if processes:
            distributed.initialize(distributed_flag.value)
            print(distributed.devices_seen(distributed_flag.value), file=sys.stderr)
        path = workdir_flag.value or _new_workdir(name)
        dtype = config.get("compute_dtype", "float32")
        with working_in(path, config.to_dict(), alone=alone), products(dtype):
            if distributed.is_main():
                print(f"work directory: {path}", file=sys.stderr)
            run(config, epath.Path(path))

    def name_given(value: str) -> None:
        holder.value[positional] = value

    launch_flags(main, argv, name_given if positional else None)


def _new_workdir(name: str) -> str:
    """Name a work directory by the time, and add it to the command line that resumes the run.

    Raises:
      UsageError: several processes, each of which would choose another name.
    """
    if jax.process_count() > 1:
        raise UsageError("several processes need one --workdir, the same for all of them")
    path = f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    sys.argv.append(f"--workdir={path}")
    return path


def prepare(argv: Sequence[str], default: str, values: flags.FlagValues = flags.FLAGS) -> tuple:
    """Return (the arguments for absl's parser, the flag of the config that they override).

    Raises:
      UsageError: no such config file or key, or a config of another command; and as `load_config`.
    """
    argv, spec = config_first([*map(at_home, argv)], default)
    for i in reversed(range(1, len(argv))):  # --config.key None, as --config.key=None
        if argv[i] == "None" and re.fullmatch(r"--?config\.[^=]+", argv[i - 1]):
            argv[i - 1 : i + 1] = [f"{argv[i - 1]}=None"]
    config = load_config(spec)
    if set(HELP_FLAGS) & set(argv):
        show_help(config, spec)
    configs.check_command(Path(argv[0]).stem, config, spec)
    add_stage_keys(argv, config)
    check_keys(argv, config)
    argv = set_nones([one for one in argv if not re.match(r"--?config=", one)], config)
    define = config_flags.DEFINE_config_dict
    return argv, define("config", config, flag_values=values, sys_argv=argv)


def launch_flags(
    main: Callable[[], Any],
    argv: Sequence[str] | None = None,
    positional: Callable[[str], None] | None = None,
    many: bool = False,
) -> None:
    """Parse the flags that the script defined with absl and call `main()`; errors as `launch`.

    Args:
      argv: default: `sys.argv`.
      positional: called with the argument without dashes, if the script takes one.
      many: allow several such arguments; `positional` is called with each.
    """
    distributed.give_fake_devices_threads()
    argv = [*map(at_home, sys.argv if argv is None else argv)]
    flags.FLAGS.set_gnu_getopt(True)  # flags after an argument without dashes are flags too
    flags.DEFINE_bool("traceback", False, "Show the whole traceback of an error.")
    compiled = flags.DEFINE_bool(
        "compilation_cache", True, "Save compiled programs in the user's cache directory."
    )
    if set(HELP_FLAGS) & set(argv):
        show_help()
    take, limit = (positional, len(argv) if many else 1) if positional else (str, 0)

    def guarded(rest: Sequence[str]) -> None:
        # Libraries log missing accelerators and engines; errors are printed by this program.
        logging.set_verbosity(logging.WARNING)
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        keep_compiled(compiled.value)
        with errors_in_one_line():
            for value in _without_dashes(rest[1:], limit):
                take(value)
            main()

    app.run(guarded, argv=argv, flags_parser=_parse_flags)


def _without_dashes(values: Sequence[str], limit: int) -> Sequence[str]:
    """Return the arguments without dashes, at most `limit` of them.

    Raises:
      UsageError: names the first one beyond the limit.
    """
    if len(values) > limit:
        raise UsageError(f"unexpected argument {values[limit]!r}: {way_out(values[limit])}")
    return values


def add_stage_keys(argv: Sequence[str], config: ConfigDict) -> None:
    """Add to a job's stages the keys of their base configs that the command line sets."""
    bases = {}
    for key in dict.fromkeys(keys_not_there(argv, config)):
        stage, *path = key.split(".")
        group = config.get(stage)
        if not (path and isinstance(group, ConfigDict) and isinstance(group.get("base"), str)):
            continue
        if stage not in bases:
            bases[stage] = load_config(group.base)
        *groups, last = path
        base: Any = bases[stage]
        inside: Any = group
        for name in groups:
            base = base.get(name) if isinstance(base, ConfigDict) else None
        if not isinstance(base, ConfigDict) or isinstance(base.get(last, base), ConfigDict):
            continue  # the base has no such key, or it is a group
        with config.unlocked():
            for name in groups:
                if name not in inside:
                    inside[name] = ConfigDict()
                inside = inside[name]
            inside[last] = dict(base.items(preserve_field_references=True))[last]


def keys_not_there(argv: Sequence[str], config: ConfigDict) -> list[str]:
    """The keys of --config.<key> that the config does not have."""
    names = flatten_config(config.to_dict())
    matches = (re.match(r"--?(no)?config\.([^=]+)", argument) for argument in argv[1:])
    return [match[2] for match in matches if match and match[2] not in names]


def check_keys(argv: Sequence[str], config: ConfigDict) -> None:
    """Check that the config has every --config.<key> of the command line.

    Raises:
      UsageError: an unknown key; the message names the nearest key, and all keys.
    """
    names = flatten_config(config.to_dict())
    for key in keys_not_there(argv, config):
        inside = [name for name in names if name.startswith(f"{key}.")]
        if inside:
            raise UsageError(f"config key {key!r} is a group: set one of {', '.join(inside)}")
        raise UsageError(unknown("config key", key, names))


def at_home(argument: str) -> str:
    """Expand `~/` at the start of an argument's value; shells do not expand it after "="."""
    return re.sub(r"^(-[^=]*=)?~(?=/)", lambda match: (match[1] or "") + str(Path.home()), argument)


def may_be_none(config: ConfigDict, key: str) -> bool:
    """True for a key declared with `placeholder` (or a `FieldReference` that no other key uses).

    A reference shared by several keys comes from `get_ref` and is not a placeholder.
    """
    fields = flatten_config(config.to_dict(preserve_field_references=True))
    mine = fields.get(key)
    return isinstance(mine, FieldReference) and sum(x is mine for x in fields.values()) == 1


def set_nones(argv: Sequence[str], config: ConfigDict) -> list[str]:
    """Set the keys of `--config.<key>=None` that `may_be_none`; return the other arguments.

    Number flags cannot parse None, and string flags would read it as text.
    """
    pattern = r"^--?config\.([^=]+)=(.*)"
    pairs = [(re.findall(pattern, one, re.S) or [("", "")])[0] for one in argv]
    free = {key for key, text in pairs if text == "None" and may_be_none(config, key)}
    config.update_from_flattened_dict(dict.fromkeys(free))
    mine, last = zip(argv, pairs, strict=True), dict(pairs)
    return [x for x, (key, text) in mine if key not in free or "None" not in (text, last[key])]


def _parse_flags(argv: Sequence[str]) -> list[str]:
    with errors_in_one_line():
        try:
            return flags.FLAGS(list(argv))
        except flags.UnrecognizedFlagError as error:
            raise UsageError(f"unknown flag {(x := error.flagvalue)!r}: {way_out(x)}") from None
        except flags.IllegalFlagValueError as error:
            name = str(error).removeprefix("flag --").partition("=")[0]
            error.add_note(f"its default: --{name}={flags.FLAGS[name].default}")
            raise


def way_out(typed: str) -> str:
    """Suggest a correction of an argument that is neither a flag nor a flag's value."""
    if configs.find_config(typed):
        return f"write --config={typed}"
    config = flags.FLAGS["config"].value.to_dict() if "config" in flags.FLAGS else {}
    name, equals, value = typed.lstrip("-–—").partition("=")
    names, keys = [x.name for x in _own_flags()], [f"config.{x}" for x in flatten_config(config)]
    near = nearest(name, [*names, *keys]) if equals or name != typed else None
    if near and (keys or name != "config"):
        return f"write --{near}{equals}{value} (--help lists all)"
    known = [*names, *(["config.<key>", "config.model"] if keys else [])]
    return f"options are {', '.join(f'--{name}' for name in known)} (--help lists all)"


def _own_flags() -> list[flags.Flag]:
    """Flags that the script and this file define."""
    by_module = flags.FLAGS.flags_by_module_dict()
    return [flag for name in (__name__, sys.argv[0]) for flag in by_module.get(name, ())]


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the program with one line if the block raises a user's error.

    The exit code is 2, or 1 if its cause may have passed at the next start (`passes`).
    """
    try:
        yield
    except (*USER_ERRORS, flags.Error) as error:
        if {"--traceback", "-traceback"} & set(sys.argv):
            traceback.print_exception(error)
        where = " (--traceback shows where)" if isinstance(error, KeyError) else ""
        print(f"error: {one_line(error)}{where}", file=sys.stderr)
        sys.exit(1 if passes(error) else 2)


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, with its type if it is not a user's error or vague."""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        text += f": pip install 'ffn-heterogeneity[{EXTRAS[error.name]}]'"
    enough = isinstance(error, (*USER_ERRORS, flags.Error)) and not isinstance(error, KeyError)
    text = text if text and enough else f"{type(error).__name__}: {text}"
    return "; ".join([text, *getattr(error, "__notes__", ())])


def show_help(config: ConfigDict | None = None, spec: str = "") -> NoReturn:
    """Print the help text (launch/help.py) and end the process."""
    with reader_may_leave():
        print(help_text(sys.modules["__main__"].__doc__ or "", _own_flags(), config, spec))
    sys.exit(0)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the process quietly if the pipe that it prints to is closed (`--help | head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def set_keys(config: ConfigDict, settings: Mapping[str, Any], owner: str, source: str) -> None:
    """Set dotted keys of a config in place.

    Args:
      owner, source: names of the settings' origin and of the config, for the error.

    Raises:
      ValueError: an unknown key (the message names the nearest), or a value of another type.
    """
    with naming(f"{owner}, {source}"):
        check_known(settings, flatten_config(config.to_dict()), "key")
    for key, value in settings.items():
        with naming(f"{owner}, key {key!r}", TypeError):
            value = at_home(value) if isinstance(value, str) else value
            config.update_from_flattened_dict({key: value})
