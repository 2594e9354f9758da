"""Appends records to the open shard of one kind: roll-over, and what a full disk leaves behind.

What a shard looks like is `shard`'s, what a record holds is `record`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftmill.manifests import files
from draftmill.manifests.errors import BudgetError
from draftmill.manifests.shards import record
from draftmill.manifests.shards.record import Draft, Record
from draftmill.manifests.shards.shard import (
    ENTRY_BYTES,
    Kind,
    entry_bytes,
    first_record,
    header_bytes_for,
    scan,
    seal,
    shard_path,
    unsealed_header,
)
from draftmill.manifests.types import Location

# Room that is left free in a header: its own first fields, and the length before it.
_SLACK_BYTES = 4096
_SMALL_BYTES = 64 << 10


class ShardWriter:
    """Appends records to the open shard of one kind and seals it when payload or header is full.

    `next_number` must be above every number ever used, evicted ones included. A record larger than
    `shard_bytes` gets a shard of its own. Not thread-safe: one writer, one thread.
    """

    def __init__(
        self, folder: Path, kind: Kind, shard_bytes: int, *, next_number: int, resume: Path | None
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.shard_bytes = shard_bytes
        self.sealed: list[int] = []
        self._next = next_number
        self._file: files.File | None = None
        self._number = -1
        self._dirty = False
        if resume is not None:
            self._resume(resume)

    def _resume(self, path: Path) -> None:
        self._number = int(path.name.partition(".")[0])
        self._file = files.File(path, self.kind)
        self._end = self._file.size()
        self._start = first_record(path, self._number)
        self._entries = sum(entry_bytes(found) for found in scan(path, self._number, verify=False))

    def _open_next(self, entries: int) -> None:
        path = shard_path(self.folder, self._next, sealed=False)
        reserved = max(header_bytes_for(self.shard_bytes), entries + 2 * _SLACK_BYTES)
        header = unsealed_header(self.kind, self._next, reserved)
        with files.disk_full_is_budget(path):
            file = files.File(path, self.kind, create=True)
        try:
            with files.disk_full_is_budget(path):
                file.write_at(header, 0)
                file.sync()
                files.sync_folder(self.folder, self.kind)
        except BaseException:
            file.close()
            files.unlink(path, self.kind)
            raise
        self._file, self._number = file, self._next
        self._start = self._end = len(header)
        self._entries = 0
        self._next += 1

    def append(self, item: Draft) -> tuple[Record, Location]:
        """Write one record (not yet synced) and say where it lies.

        Raises BudgetError when the disk is full; the shard is as it was before then. An OSError of
        sealing the last shard says that its records may not be durable.
        """
        head_estimate = 1024 + 64 * len(item.payloads)
        length = head_estimate + sum(len(data) for _, data in item.payloads)
        entries = (1 + len(item.payloads)) * (ENTRY_BYTES + 48)
        if self._file is not None and self._end > self._start:
            header_full = self._start < self._entries + entries + _SLACK_BYTES
            if header_full or self._end + length > self.shard_bytes:
                self.seal()
        if self._file is None:
            self._open_next(entries)
        assert self._file is not None
        found, head = record.pack(item, self._number, self._end)
        self._dirty = True
        try:
            with files.disk_full_is_budget(self._file.path):
                at = self._end
                for data in _pieces([head, *(data for _, data in item.payloads)]):
                    self._file.write_at(data, at)
                    at += len(data)
        except BudgetError:
            self._file.truncate(self._end)
            raise
        location = Location(self._number, self._end, at - self._end)
        self._end = at
        self._entries += entry_bytes(found)
        return found, location

    def sync(self) -> None:
        """Make every appended record durable."""
        if self._file is not None and self._dirty:
            self._file.sync()
            self._dirty = False

    def seal(self) -> None:
        """Seal the open shard, if there is one with records."""
        if self._file is None or self._end == self._start:
            return
        path = self._file.path
        self.sync()
        self._file.close()
        self._file = None
        seal(path, self.kind, self._number)
        self.sealed.append(self._number)

    def close(self) -> None:
        """Sync and close; the shard stays open on disk and is continued by the next writer."""
        if self._file is not None:
            try:
                self.sync()
            finally:
                self._file.close()
                self._file = None


def _pieces(parts: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
    """What to write at a time: a system call costs more than copying small parts together."""
    return [b"".join(parts)] if sum(map(len, parts)) <= _SMALL_BYTES else parts
