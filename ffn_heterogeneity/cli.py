"""What launchers in scripts/ share: flags, the work directory, one clear line for an error."""

from __future__ import annotations

import difflib
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags
from etils import epath
from ml_collections import ConfigDict, config_flags

from ffn_heterogeneity.train.workdir import prepare_workdir

# What a user can cause and mend; anything else keeps its traceback.
USER_ERRORS = (ValueError, OSError, KeyError, ImportError)

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory for all outputs; default: runs/<script>-<date>-<time>."
)
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Show the whole traceback of an error.")


class UnknownKey(ValueError):
    """A --config.<key> that the config does not have."""


def launch(run: Callable[[ConfigDict, epath.Path], Any], name: str, default_config: str) -> None:
    """Parses --config, --config.<key>=<value> and --workdir, claims the directory, calls `run`.

    Args:
      run: (config, work directory) -> anything; writes `<workdir>/results.json` itself.
      name: of the script, for the default work directory.
      default_config: path of the config file, relative to the repository's root.
    """
    holder = config_flags.DEFINE_config_file(
        "config", default_config, "Config file, with its argument after a colon where it has one."
    )

    def main(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            _fail(f"unexpected argument {argv[1]!r}: options are written --config.<key>=<value>")
        try:
            config = holder.value
            if not isinstance(config, ConfigDict):
                config.to_dict()  # Raises what went wrong while the config file was read.
            workdir = _WORKDIR.value or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
            prepare_workdir(workdir, config.to_dict())
            print(f"work directory: {workdir}", file=sys.stderr)
            run(config, epath.Path(workdir))
        except USER_ERRORS as error:
            if _TRACEBACK.value:
                traceback.print_exc()
            _fail(_message(error))

    app.run(main, flags_parser=_parse_flags)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return app.parse_flags_with_usage(list(argv))
    except (AttributeError, KeyError) as error:
        key, names = _unknown_key(argv)
        if key is None:
            _fail(f"--config could not be read: {_message(error)}")
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        _fail(f"unknown config key {key!r}{hint} Known keys: {', '.join(names)}")
    except (TypeError, ValueError, OSError, ImportError) as error:
        _fail(f"--config could not be read: {_message(error)}")


def _unknown_key(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The first --config.<key> on the command line that the config lacks, and the keys it has."""
    config = flags.FLAGS["config"].value
    names = leaf_names(config.to_dict()) if isinstance(config, ConfigDict) else []
    for argument in argv[1:]:
        match = re.match(r"--?(?:no)?config\.([^=]+)", argument)
        if match and match[1] not in names:
            return match[1], names
    return None, names


def leaf_names(values: dict, prefix: str = "") -> list[str]:
    """Dotted names of a nested dict's leaves."""
    names = []
    for key, value in values.items():
        nested = leaf_names(value, f"{prefix}{key}.") if isinstance(value, dict) else []
        names += nested or [f"{prefix}{key}"]
    return names


def _message(error: BaseException) -> str:
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return " ".join(text.split()) or type(error).__name__


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
