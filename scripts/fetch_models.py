"""Fetches small real models (four, 933 MB, or those of --only); later runs need no network.

Example:
  python scripts/fetch_models.py --only=smollm2
"""

from absl import flags

from ffn_heterogeneity.io.fetch import SOURCES, fetch_model
from ffn_heterogeneity.launch import cli

_DIRECTORY = flags.DEFINE_string(
    "directory", None, "Where the models are kept: $FFN_MODELS, .cache/models, the user's cache."
)
_ONLY = flags.DEFINE_multi_enum("only", None, list(SOURCES), "Fetch only this one (repeatable).")


def main() -> None:
    for name in _ONLY.value or SOURCES:
        print(fetch_model(name, _DIRECTORY.value))


if __name__ == "__main__":
    cli.launch_flags(main)
