"""The folder that `speculators train` reads: an Arrow table of samples, a file of states for each.

    FOLDER/data-00000-of-00001.arrow, dataset_info.json, state.json     a saved Hugging Face dataset
    FOLDER/hidden_states/hs_ROW.safetensors          hidden_states [T, L, H], token_ids int64 [T]

With fp8 there is also hidden_states_scales, float32 [T, 1, 1]: one scale per token over all layers.
Columns: input_ids, loss_mask, seq_len; and ours, `draftmill`, with what comes back on import. Form
of speculators 0.9 and its hs_connectors. Which samples there are is left to the callers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.manifests import files
from draftmill.manifests.codec.numbers import E4M3_MAX, from_e4m3, to_e4m3, to_floats, to_words
from draftmill.manifests.errors import (
    NOT_UNDERSTOOD,
    DamagedError,
    RejectedError,
    SourceFileError,
    why,
)
from draftmill.manifests.types import StatesTLH

ARROW = "data-00000-of-00001.arrow"
STATES = "hidden_states"
_KEYS = ("input_ids", "loss_mask", "seq_len")
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
        ("draftmill", pa.string()),
    ]
)
_BATCH = 1000
_MOST_ID = 2**31 - 1  # token ids are stored as int32
_MAX_HEADER = 1 << 20
_TYPES = {"BF16": "<u2", "F8_E4M3": "u1", "F32": "<f4", "I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample of the table. `note` is what the column `draftmill` holds; {} in other folders."""

    token_ids: list[int]
    loss_mask: list[int]
    note: dict[str, Any]


def states_file(folder: Path, row: int) -> Path:
    """Where the states of a row lie."""
    return folder / STATES / f"hs_{row}.safetensors"


# -- the table -----------------------------------------------------------------------------------


def write_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Replace the table; each file of it atomically, the one that names the others last."""
    temporary = folder / f".{ARROW}.tmp"
    with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as stream:
        for batch in _batches(rows):
            columns = {
                "input_ids": [row.token_ids for row in batch],
                "loss_mask": [row.loss_mask for row in batch],
                "seq_len": [len(row.token_ids) for row in batch],
                "draftmill": [json.dumps(row.note, sort_keys=True) for row in batch],
            }
            stream.write_batch(pa.RecordBatch.from_pydict(columns, schema=_SCHEMA))
    files.publish(temporary, folder / ARROW, "export")

    def value(kind: str) -> dict[str, str]:
        return {"dtype": kind, "_type": "Value"}

    lists = {"feature": value("int64"), "_type": "List"}
    features = {"input_ids": lists, "loss_mask": lists, "seq_len": value("int64")}
    features["draftmill"] = value("string")
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state = {
        "_data_files": [{"filename": ARROW}],
        "_fingerprint": f"{(folder / ARROW).stat().st_size:016x}",
        "_format_columns": list(_KEYS),
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    files.write_atomic(folder / "dataset_info.json", json.dumps(info, indent=2), "export")
    files.write_atomic(folder / "state.json", json.dumps(state, indent=2), "export")


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class Table:
    """The rows of a folder, mapped into memory: any one costs what it is. SourceFileError if there
    is no such table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            listed = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
            parts = [_mapped(folder / Path(each["filename"]).name) for each in listed]
            self._table = pa.concat_tables(parts)
        except (OSError, *NOT_UNDERSTOOD, pa.ArrowException) as error:
            raise SourceFileError(
                f"{folder}: no dataset that speculators prepared: state.json: {why(error)}"
            ) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> Row:
        return next(self._rows(row, 1))

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _BATCH):
            yield from self._rows(start, _BATCH)

    def _rows(self, start: int, count: int) -> Iterator[Row]:
        for found in self._table.slice(start, count).to_pylist():
            token_ids, loss_mask = found["input_ids"], found["loss_mask"]
            try:
                note = json.loads(found.get("draftmill") or "{}")
                row = Row(token_ids=token_ids, loss_mask=loss_mask, note=note)
                _check_row(row)
            except NOT_UNDERSTOOD as error:
                raise SourceFileError(
                    f"{self._folder}: a row from {start:,} on cannot be used: {error}"
                ) from error
            yield row


def _check_row(row: Row) -> None:
    """Raises ValueError or TypeError for what only looks like a row."""
    counts = len(row.token_ids or ()), len(row.loss_mask or ())
    if not counts[0] or counts[0] != counts[1]:
        raise ValueError(f"it has {counts[0]} input_ids and a loss_mask of {counts[1]}")
    if not isinstance(row.note, dict):
        raise ValueError("its column `draftmill` is no object")
    for name, values in (("input_ids", row.token_ids), ("loss_mask", row.loss_mask)):
        if min(values) < 0 or max(values) > _MOST_ID or not isinstance(values[0], (int, bool)):
            raise ValueError(f"{name} holds what is no token id")


def _mapped(path: Path) -> pa.Table:
    source = pa.memory_map(str(path))
    try:
        table = pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(source).read_all()
    return table.select(
        ["input_ids", "loss_mask", *(["draftmill"] if "draftmill" in table.column_names else [])]
    )


# -- states --------------------------------------------------------------------------------------


def states_bytes(num_tokens: int, num_layers: int, hidden_size: int, *, fp8: bool) -> int:
    """Size of one file of states, with room for its header."""
    each = num_layers * hidden_size * (1 if fp8 else 2) + 8 + (4 if fp8 else 0)
    return num_tokens * each + 512


def write_states(
    path: Path, states_TLH: StatesTLH, token_ids: Sequence[int], *, fp8: bool, digest: str
) -> None:
    """One file of states, atomically; `digest` goes into its metadata."""
    tensors: dict[str, tuple[str, NDArray[Any]]] = {"hidden_states": ("BF16", states_TLH)}
    if fp8:
        codes, scales = to_fp8(states_TLH)
        tensors = {"hidden_states": ("F8_E4M3", codes), "hidden_states_scales": ("F32", scales)}
    tensors["token_ids"] = ("I64", np.asarray(token_ids, np.int64))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "draftmill": digest}}
    at = 0
    for name, (dtype, array) in tensors.items():
        end = at + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [np.ascontiguousarray(array).tobytes() for _, array in tensors.values()]
    files.write_atomic(path, b"".join([struct.pack("<Q", len(text)), text, *parts]), "export")


def digest_of(path: Path, *, fp8: bool) -> str | None:
    """The digest in a file that `write_states` has finished; None if it is no such file."""
    try:
        header, start = _header(path)
        end = max(each["data_offsets"][1] for name, each in header.items() if name[:2] != "__")
        kind = header["hidden_states"]["dtype"]
        if path.stat().st_size != start + end or kind != ("F8_E4M3" if fp8 else "BF16"):
            return None
        return str(header["__metadata__"]["draftmill"])
    except (OSError, DamagedError, *NOT_UNDERSTOOD):
        return None


def read_states(path: Path) -> tuple[StatesTLH, NDArray[np.int64]]:
    """(states [T, L, H] as bf16 bit patterns, token ids [T]); fp8 is scaled back.

    Raises FileNotFoundError, DamagedError for what is no such file, RejectedError for what it
    should not hold.
    """
    header, start = _header(path)
    try:
        arrays = {
            name: _array(path, entry, start) for name, entry in header.items() if name[:2] != "__"
        }
        dtype = header["hidden_states"]["dtype"]
        states, token_ids = arrays["hidden_states"], arrays["token_ids"].astype(np.int64)
    except NOT_UNDERSTOOD as error:
        raise DamagedError(f"{path}: not a file of hidden states: {error!r}") from error
    if dtype == "F8_E4M3":
        if "hidden_states_scales" not in arrays:
            raise RejectedError("fp8 states without hidden_states_scales")
        scales = arrays["hidden_states_scales"]
        if states.ndim != 3 or scales.shape != (len(states), 1, 1):
            raise RejectedError(
                f"fp8 states {list(states.shape)} with scales {list(scales.shape)}, which must be "
                "one for each token"
            )
        return from_fp8(states, scales), token_ids
    if dtype != "BF16":
        raise RejectedError(f"the states are {dtype}, not BF16")
    return states, token_ids


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with _opened(path) as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= _MAX_HEADER:
            raise DamagedError(f"{path}: claims a header of {length} bytes")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{path}: its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise DamagedError(f"{path}: its header is no object")
    return header, 8 + length


def _opened(path: Path) -> BinaryIO:
    """A regular file; FileNotFoundError if there is nothing, DamagedError for anything else."""
    try:
        if path.exists() and not path.is_file():
            raise DamagedError(f"{path}: not a file")
        return path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from error


def _array(path: Path, entry: Mapping[str, Any], start: int) -> NDArray[Any]:
    begin, end = (int(each) for each in entry["data_offsets"])
    dtype = np.dtype(_TYPES[entry["dtype"]])
    size = path.stat().st_size
    if not 0 <= begin <= end <= size - start:
        raise ValueError(f"offsets {begin} to {end} in a file of {size} bytes")
    count = (end - begin) // dtype.itemsize
    return np.fromfile(path, dtype, count, offset=start + begin).reshape(entry["shape"])


# -- fp8 -----------------------------------------------------------------------------------------


def to_fp8(states_TLH: StatesTLH) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(e4m3 codes [T, L, H], scales float32 [T, 1, 1]): the largest of a token becomes 448.

    Rounded to nearest, ties to even. The states are finite.
    """
    floats = to_floats(states_TLH)
    peak = np.abs(floats).max(axis=(1, 2), keepdims=True)
    scales = np.maximum(peak / np.float32(E4M3_MAX), np.float32(1e-12))
    return to_e4m3(floats / scales), scales


def from_fp8(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> StatesTLH:
    """bf16 bit patterns of codes times scales, the scale and the product rounded to bf16."""
    return to_words(from_e4m3(codes) * to_floats(to_words(scales)))
