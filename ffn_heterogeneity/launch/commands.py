"""The commands by name: each runs a script's config, a stage of a run, a point of a sweep."""

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
    """A function of a config, and what refuses the config before anything is loaded.

    Attributes:
      check: of the config's values alone.
      examine: of what it names as well, without reading any weights.
      run: (config, directory, what the process's runs share) -> what it wrote to results.json.
      script: that runs one such config by itself; "": none, so it is no stage either.
      makes_model: a stage maps a model to a model, at `<directory>/model`; False: to itself.
      together: all processes of a run take part, not the main one alone.
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
        """`run`, with products made as the config's `compute_dtype` wants them."""
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
