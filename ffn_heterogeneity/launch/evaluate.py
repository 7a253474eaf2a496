"""`scripts/evaluate.py`: a measurement by name, or the validation of a training's config."""

from typing import Any

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate import run as evaluation


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """Measures as `config` says; of a training's config, what its validation prints.

    Raises:
      ValueError: a setting or a file is unusable; the message names it.
    """
    if "losses" not in config:
        return evaluation.run(config, workdir)
    from ffn_heterogeneity.launch.train import validate  # evaluations start without the trainer

    return validate(config, workdir)


def check(config: ConfigDict) -> Any:
    """Refuses what is cheap to refuse, before a model is loaded; errors as `run`."""
    if "losses" not in config:
        return evaluation.check_config(config)
    from ffn_heterogeneity.train.settings import read

    return read(config)
