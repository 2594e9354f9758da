"""Shards: append-only files of records that become valid safetensors files when they are sealed.

Owns names, layout, sealing and scanning of shard files. Appending is left to `shard_writer`, which
records count to `recovery` and `manifest`, reading single samples to `reader`. Layout:
docs/format.md.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftmill.manifests import files
from draftmill.manifests.codec import codec
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.shards import record
from draftmill.manifests.shards.record import Record
from draftmill.manifests.types import Stage

Kind = Literal["completions", "hidden_states"]
KINDS: tuple[Kind, ...] = ("completions", "hidden_states")
KIND_OF_STAGE: dict[Stage, Kind] = {"generate": "completions", "extract": "hidden_states"}
STAGE_OF_KIND: dict[Kind, Stage] = {"completions": "generate", "hidden_states": "extract"}

_LENGTH = struct.Struct("<Q")
_SEALED = ".safetensors"
_OPEN = ".safetensors.open"
# Room that one tensor takes in the header beside its name: punctuation, dtype, three numbers.
ENTRY_BYTES = 96
# safetensors refuses headers above 100 MB; a shard is sealed long before.
_MAX_HEADER = 100_000_000


def shard_path(folder: Path, number: int, *, sealed: bool) -> Path:
    """Path of shard `number` in its folder."""
    return folder / f"{number:06d}{_SEALED if sealed else _OPEN}"


def list_shards(folder: Path) -> dict[int, Path]:
    """Shard files by number, in order; a sealed file wins over an open one of the same number.

    Other files, and other names of the same number, are not the dataset's.
    """
    found: dict[int, Path] = {}
    for suffix in (_OPEN, _SEALED):
        found |= files.numbered(folder, suffix)
    return dict(sorted(found.items()))


def is_open(path: Path) -> bool:
    """Whether the file still has the name of an open shard."""
    return path.name.endswith(_OPEN)


def header_bytes_for(shard_bytes: int) -> int:
    """Bytes reserved for the safetensors header of a shard: 1/64 of it, 16 KiB to 1 MiB."""
    return max(16 << 10, min(1 << 20, shard_bytes // 64))


def data_start(file_head: bytes, size: int) -> int:
    """Offset of the first record, from the first 8 bytes of a shard; raises DamagedError."""
    if len(file_head) < _LENGTH.size:
        raise DamagedError("the file ends before its header")
    (reserved,) = _LENGTH.unpack_from(file_head)
    if reserved > _MAX_HEADER or _LENGTH.size + reserved > size:
        raise DamagedError(f"header claims {reserved} bytes")
    return _LENGTH.size + int(reserved)


def first_record(path: Path, number: int) -> int:
    """Offset of the first record of a shard file; raises DamagedError where nothing tells it."""
    with open(path, "rb") as file:
        if path.stat().st_size == 0:
            raise DamagedError("the file ends before its header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _first_record(data, number)


def _first_record(data: mmap.mmap, number: int) -> int:
    """What the header's length says, unless the records say otherwise.

    Those 8 bytes have no checksum, and every record would hang on them. A record knows its own
    place: one before the claimed end of the header, or behind it with only header between, is
    right and the length is not.
    """
    size = len(data)
    found = _next_record(data, number, _LENGTH.size, size)
    try:
        claimed = data_start(data[: _LENGTH.size], size)
    except DamagedError:
        if found == size:
            raise
        return found
    if found > claimed:
        is_header = found <= _MAX_HEADER and _is_header(data[_LENGTH.size : found])
        return found if is_header else claimed
    return found


def _is_header(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text.rstrip(b" ")), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a shard that are no valid record. `record` is set if its header could be read."""

    offset: int
    length: int
    reason: str
    record: Record | None = None


def scan(
    path: Path, number: int, *, start: int | None = None, verify: bool = True
) -> Iterator[Record | Damage]:
    """Every record of a shard from byte `start` on (default: the first), and what is between.

    With `verify` every payload is checked against its xxh3. Damage that reaches the end of the
    file may be a torn write; what it means is for the caller to say.
    """
    with open(path, "rb") as file:
        size = path.stat().st_size
        if size == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            position = _first_record(data, number) if start is None else start
            while position < size:
                found = _read_one(data, number, position, size, verify)
                yield found
                position = found.offset + found.length


def _read_one(
    data: mmap.mmap, number: int, position: int, size: int, verify: bool
) -> Record | Damage:
    try:
        length = record.header_length(data[position : position + record.HEADER_MIN])
        found = record.parse(data[position : position + length], number, position)
        if position + found.length > size:
            raise DamagedError("the file ends inside a payload")
    except DamagedError as error:
        following = _next_record(data, number, position + 1, size)
        return Damage(position, following - position, error.reason)
    if verify:
        at = position + found.header_length
        with memoryview(data) as view:
            for payload in found.payloads:
                with view[at : at + payload.length] as part:
                    intact = codec.checksum(part) == payload.xxh3
                if not intact:
                    reason = f"payload {payload.name} fails its checksum"
                    return Damage(position, found.length, reason, found)
                at += payload.length
    return found


def _next_record(data: mmap.mmap, number: int, position: int, size: int) -> int:
    """Offset of the next valid record header at or after `position`, or `size`."""
    while True:
        position = data.find(record.MAGIC, position)
        if position < 0:
            return size
        try:
            length = record.header_length(data[position : position + record.HEADER_MIN])
            record.parse(data[position : position + length], number, position)
            return position
        except DamagedError:
            position += 1


def header_for(kind: str, number: int, start: int, found: list[Record | Damage]) -> bytes:
    """The safetensors header of a shard with these records (JSON, not padded)."""
    tensors: dict[str, object] = {
        "__metadata__": {"format": "draftmill", "version": "1", "kind": kind, "shard": str(number)}
    }

    def add(name: str, offset: int, length: int) -> None:
        span = [offset - start, offset - start + length]
        tensors[name] = {"dtype": "U8", "shape": [length], "data_offsets": span}

    for item in found:
        whole = item if isinstance(item, Record) else item.record
        if whole is None:
            # safetensors allows no holes, so bytes that are no record get a tensor of their own.
            add(f"damaged@{item.offset}", item.offset, item.length)
            continue
        add(f"{whole.name}/record", whole.offset, whole.header_length)
        at = whole.offset + whole.header_length
        for payload in whole.payloads:
            add(f"{whole.name}/{payload.name}", at, payload.length)
            at += payload.length
    return json.dumps(tensors, separators=(",", ":")).encode()


def entry_bytes(found: Record | Damage) -> int:
    """Room for a record in the header, at most."""
    whole = found if isinstance(found, Record) else found.record
    if whole is None:
        return ENTRY_BYTES + 32
    names = [len(p.name) for p in whole.payloads] + [len("record")]
    return sum(ENTRY_BYTES + len(whole.name) + 1 + name for name in names)


def unsealed_header(kind: Kind, number: int, reserved: int) -> bytes:
    """The first bytes of an open shard: a header without records, padded to `reserved` bytes."""
    header = header_for(kind, number, _LENGTH.size + reserved, [])
    return _LENGTH.pack(reserved) + header.ljust(reserved)


def seal(path: Path, kind: Kind, number: int) -> Path:
    """Turn an open shard into a valid safetensors file; can be repeated after a crash at any point.

    The header is derived from the records alone. Returns the sealed file's path.
    """
    found = list(scan(path, number, verify=False))
    file = files.File(path, f"{kind}.seal")
    try:
        start = first_record(path, number)
        reserved = start - _LENGTH.size
        header = header_for(kind, number, start, found)
        if len(header) > reserved:
            raise DamagedError(
                f"its header needs {len(header)} bytes, {reserved} are reserved",
                shard=path.name,
                offset=0,
            )
        file.sync()
        if file.read_at(_LENGTH.size, 0) != _LENGTH.pack(reserved):
            file.write_at(_LENGTH.pack(reserved), 0)
        file.write_at(header.ljust(reserved), _LENGTH.size)
        file.sync()
    finally:
        file.close()
    sealed = shard_path(path.parent, number, sealed=True)
    files.rename(path, sealed, f"{kind}.seal")
    return sealed
