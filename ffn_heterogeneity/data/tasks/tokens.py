"""Token shards of scripts/prepare_data.py: every token of every document is predicted."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example, Fields, Task


def example(record: Mapping[str, Any], fields: Fields) -> Example:
    """There are no texts in shards: `token_pipeline.TokenPipeline` reads them."""
    raise DataError("task 'tokens' has ids, not texts: ask for text with another task")


TASK = Task("tokens", example, split_long=True)
