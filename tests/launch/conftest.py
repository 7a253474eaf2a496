"""A tiny model and a text for every sweep."""

from __future__ import annotations

import pytest
from tiny_models import TEXT, save_tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    (root / "text.txt").write_text(TEXT)
    return save_tiny(root / "tiny"), root / "text.txt"
