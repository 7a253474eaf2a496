"""Sources for parquet files and `datasets`: hub data sets (stored or streamed), saved folders."""

import contextlib
import itertools
import math
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffn_heterogeneity.data.record_source import DataError, Source, is_saved
from ffn_heterogeneity.wording import first_line, some


class ParquetSource(Source):
    """Rows of parquet files with the same columns; local files are memory-mapped.

    The order of columns and the width of types may differ.
    """

    def __init__(self, paths: Sequence[str]):
        import pyarrow
        import pyarrow.parquet

        tables, parts = [], []
        for path in paths:
            try:
                table = pyarrow.parquet.read_table(path, memory_map="://" not in path)
                for i, column in enumerate(table.schema):
                    if pyarrow.types.is_dictionary(column.type):
                        values = table.column(i).cast(column.type.value_type)
                        table = table.set_column(i, column.name, values)
                tables.append(table)
                self.class_names = _class_names(table.schema)
                parts.append({(x, self.class_names.get(x)) for x in table.schema.names})
            except Exception as error:  # any error in its table or metadata
                why = first_line(error)
                raise DataError(f"{path}: not a readable parquet file ({why})") from error
        self.name = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        if unlike := set.union(*parts) - set.intersection(*parts):
            names = some(sorted({name for name, _ in unlike}))
            raise DataError(f"{self.name}: unlike columns, or names of their classes: {names}")
        try:
            self._table = pyarrow.concat_tables(tables, promote_options="permissive")
        except pyarrow.ArrowException as error:
            raise DataError(f"{self.name}: unlike columns ({first_line(error)})") from error
        if not len(self._table):
            raise DataError(f"{self.name}: no rows")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.named(self._table.slice(index, 1).to_pylist()[0])


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """The names of a table's ClassLabel columns, in the order of their numbers."""
    if b"huggingface" not in (schema.metadata or {}):
        return {}  # without ClassLabel columns the package is not needed
    import datasets

    columns = datasets.Features.from_arrow_schema(schema).items()
    return {name: tuple(x.names) for name, x in columns if isinstance(x, datasets.ClassLabel)}


class HubSource(Source):
    """One split of a memory-mapped `datasets` data set.

    It is a hub data set (by name, cached), or a saved folder (`is_saved`), which may be one split.
    """

    def __init__(self, name: str, split: str, revision: str | None = None):
        import datasets

        repository, _, config = name.partition(":")
        if is_saved(name):
            self._data = _saved(name, split)
        else:
            with hub_errors(name, split):
                self._data = datasets.load_dataset(
                    repository, config or None, split=split, revision=revision
                )
        # Decoding would open image files from any path; a saved format may return tensors.
        self._data = self._data.with_format("arrow")
        self.class_names = _class_names(self._data.features.arrow_schema)
        if not len(self):
            raise DataError(f"data set {name!r}, split {split!r}, has no rows")
        self.name, self.rows = f"{name}[{split}]", len(self)
        self.fingerprint = str(getattr(self._data, "_fingerprint", ""))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.named(self._data[index].to_pylist()[0])

    def read(self, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        """Rows [start, stop)."""
        return map(self.__getitem__, range(start, stop))


class HubStream(Source):
    """One split of a hub data set, streamed without storing it.

    Attributes:
      rows: number of rows; None if the data set does not specify it.
    """

    def __init__(self, name: str, split: str, revision: str | None = None):
        import datasets

        repository, _, config = name.partition(":")
        with hub_errors(name, split):
            builder = datasets.load_dataset_builder(repository, config or None, revision=revision)
            self._data = builder.as_streaming_dataset(split=split)
        if self._data.features is not None:
            self._data = self._data.decode(False)  # as in `HubSource`
        known = (builder.info.splits or {}).get(split)
        self.rows = known.num_examples if known else None
        self.name, self.fingerprint = f"{name}[{split}]", f"{builder.config_id} {builder.hash}"
        self._split, self._at = split, math.inf

    def read(self, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        """Rows [start, stop), if they exist. Reading on is cheap, going back is not."""
        if start < self._at:
            self._rows, self._at = iter(self._data), 0
        before, self._at = self._at, math.inf  # restarted if this is not read to its end
        with hub_errors(self.name, self._split):
            yield from itertools.islice(self._rows, start - before, stop - before)
        self._at = stop


@contextlib.contextmanager
def hub_errors(name: str, split: str) -> Iterator[None]:
    """Convert all errors of `datasets` (network, names, formats) to one message with a solution."""
    try:
        with _offline_without_network():
            yield
    except Exception as error:
        raise DataError(
            f"{name!r} is not a local file, and the hub did not return its split {split!r} "
            f"({type(error).__name__}: {first_line(error)}); try again, or give a local .jsonl, "
            ".parquet or .txt file"
        ) from error


def _saved(path: str, split: str) -> Any:
    import datasets

    try:
        data = datasets.load_from_disk(path)
    except Exception as error:  # any error in its files
        raise DataError(
            f"{path}: not a readable data set of save_to_disk ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error
    if not isinstance(data, datasets.DatasetDict):
        return data
    if split not in data:
        raise DataError(
            f"{path}: no split {split!r}; splits seen: {', '.join(map(str, data))}: name "
            f"the folder of one, {path}/{next(iter(data), '<split>')}"
        )
    return data[split]


@contextlib.contextmanager
def _offline_without_network() -> Iterator[None]:
    """Set offline mode if there is no network: the hub's client would retry for 25 s.

    The cache still works. With a proxy nothing is done, because names may not resolve here although
    the hub can be reached.
    """
    import datasets
    import huggingface_hub

    host = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT).hostname
    flags = (huggingface_hub.constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in flags]
    try:
        if not urllib.request.getproxies():
            socket.getaddrinfo(host, 443)
    except OSError:
        for module in flags:
            module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(flags, before, strict=True):
            module.HF_HUB_OFFLINE = value
