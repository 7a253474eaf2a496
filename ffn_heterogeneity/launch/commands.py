"""Commands, by name: each runs a script's config, a stage of a run or a point of a sweep."""

import dataclasses
from collections.abc import Callable
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.io.load import load_config
from ffn_heterogeneity.launch import evaluate, in_memory
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.train import settings
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.wording import check_choice


@dataclasses.dataclass(frozen=True)
class Command:
    """A function that runs a config, and checks of the config that load no model.

    Attributes:
      check: checks only the config's values.
      examine: also checks the files that it names, without reading weights.
      run: (config, directory, state shared by the process's runs) -> content of results.json.
      script: name of the script for one such config; "": none, and it cannot be a stage.
      makes_model: whether a stage writes a new model to `<directory>/model`, or passes its input
        on.
      together: whether all processes of a run take part, or only the main one.
    """

    check: Callable[[ConfigDict], Any]
    run: Callable[[ConfigDict, epath.Path, Shared], Any]
    script: str = ""
    makes_model: bool = True
    together: bool = False
    examine: Callable[[ConfigDict], Any] = lambda config: load_config(
        config.model, revision=config.get("revision")
    )

    def __call__(self, config: ConfigDict, workdir: epath.Path, shared: Shared | None) -> Any:
        """Call `run` with the matmul precision that the config's `compute_dtype` needs."""
        with products(config.get("compute_dtype", "float32")):
            return self.run(config, workdir, shared)


COMMANDS = {
    "train": Command(
        settings.read, training.run, "train.py", together=True, examine=training.examine
    ),
    "surgery": Command(
        in_memory.check_surgery,
        lambda config, workdir, _: in_memory.surgery(config, workdir),
        "compress.py",
    ),
    "evaluate": Command(
        evaluate.check,
        lambda config, workdir, _: evaluate.run(config, workdir),
        "evaluate.py",
        makes_model=False,
    ),
    "in_memory": Command(
        in_memory.check_config,
        lambda config, workdir, shared: in_memory.run(config, workdir, shared.load),
    ),
}


def command_of(name: str) -> Command:
    """Return the command of that name; a ValueError names the choices."""
    check_choice("command", name, tuple(COMMANDS))
    return COMMANDS[name]
