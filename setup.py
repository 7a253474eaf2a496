"""Puts configs/ and scripts/ into the wheel, as `ffn_heterogeneity/_bundled/`; pyproject.toml says
the rest."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class Bundled(build_py):
    def run(self):
        super().run()
        if self.editable_mode:  # the repository's own are used
            return
        for folder in ("configs", "scripts"):
            target = Path(self.build_lib, "ffn_heterogeneity", "_bundled", folder)
            shutil.copytree(
                folder,
                target,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__", "locked"),
            )


setup(cmdclass={"build_py": Bundled})
