"""Fetches the small real models that the demo and the tests use; later runs need no network.

python scripts/fetch_models.py --only=smollm2
"""

from __future__ import annotations

import sys

from absl import app, flags

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.fetch import DEFAULT_DIRECTORY, SOURCES, fetch_model

_DIRECTORY = flags.DEFINE_string("directory", DEFAULT_DIRECTORY, "Where the models are kept.")
_ONLY = flags.DEFINE_multi_enum("only", None, list(SOURCES), "Fetch only this one (repeatable).")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}: use --only=<model>")
    for name in _ONLY.value or SOURCES:
        try:
            print(fetch_model(name, _DIRECTORY.value))
        except CheckpointError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
