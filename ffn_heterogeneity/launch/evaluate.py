"""`scripts/evaluate.py`: a named measurement, or the validation of a training config."""

from typing import Any

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate import run as evaluation


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """Run the measurement of `config`, or the validation of a training config.

    Raises:
      ValueError: an invalid setting or file; the message names it.
    """
    if "losses" not in config:
        return evaluation.run(config, workdir)
    from ffn_heterogeneity.launch.train import validate  # other evaluations need no trainer

    return validate(config, workdir)


def check(config: ConfigDict) -> Any:
    """Validate the config without loading a model; errors as `run`."""
    if "losses" not in config:
        return evaluation.check_config(config)
    from ffn_heterogeneity.train.settings import read

    return read(config)
