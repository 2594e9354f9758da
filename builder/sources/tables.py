"""Rows of Parquet and Arrow files, batch by batch. What a row means is left to `conversations`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.builder.sources.conversations import CONTENT_KEYS, ROW_KEYS, BadRow
from draftmill.manifests.errors import SourceFileError, why

BATCH_ROWS = 512


def check_table(path: Path, kind: str) -> None:
    """Raises SourceFileError unless the file opens and has a column that can be a prompt."""
    try:
        schema = _parquet(path).schema_arrow if kind == "parquet" else _arrow(path).schema
    except (OSError, pa.ArrowException) as error:
        raise SourceFileError(f"{path}: not a readable {kind} file ({why(error)}).") from error
    if not any(name in CONTENT_KEYS for name in schema.names):
        wanted = ", ".join(CONTENT_KEYS)
        raise SourceFileError(
            f"{path}: no column that holds prompts. It has {', '.join(schema.names) or 'none'}; "
            f"one of {wanted} is needed."
        )


def table_rows(path: Path, kind: str) -> Iterator[dict[str, Any] | BadRow]:
    """The rows as Python objects, without the nulls that a common schema puts into structs.

    A BadRow stands for a row that has no such form: writers do not check that text is UTF-8.
    Raises OSError or ArrowException where the file is damaged.
    """
    batches = _parquet_batches(path) if kind == "parquet" else _arrow_batches(path)
    for batch in batches:
        for row in _objects(batch):
            if isinstance(row, BadRow):
                yield row
            else:
                yield {key: _without_nulls(value) for key, value in row.items()}


def _objects(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadRow]:
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError):  # in which of the rows?
        pass
    for number in range(batch.num_rows):
        try:
            yield from batch.slice(number, 1).to_pylist()
        except (ValueError, OverflowError) as error:
            yield BadRow(f"cannot be read: {error}")


def _parquet(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(path, pre_buffer=False)


def _parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with _parquet(path) as file:
        columns = [name for name in file.schema_arrow.names if name in ROW_KEYS]
        # One thread: decoding row groups ahead would hold them all in memory.
        yield from file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)


def _arrow(path: Path) -> Any:
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(source)  # what `save_to_disk` and the datasets cache write
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source)


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    reader = _arrow(path)
    keep = [index for index, name in enumerate(reader.schema.names) if name in ROW_KEYS]
    if isinstance(reader, pa.RecordBatchFileReader):
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = iter(reader)
    for batch in batches:
        batch = batch.select(keep)
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _without_nulls(value: Any) -> Any:
    """Structs of a table have all keys of all rows; a null there means that the key is absent."""
    if isinstance(value, dict):
        return {
            key: _without_nulls(item)
            for key, item in value.items()
            if item is not None or key == "content"
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
