"""Token shards of scripts/prepare_data.py: every token of every document is predicted."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example, Fields, Task


def example(record: Mapping[str, Any], fields: Fields) -> Example:
    """Raise DataError: shards have no texts; `token_pipeline.TokenPipeline` reads them."""
    raise DataError("task 'tokens' has ids, not texts: use another task for text")


TASK = Task("tokens", example, split_long=True)
