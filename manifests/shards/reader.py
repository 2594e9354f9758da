"""Reads single samples from shards by location, checking every byte it hands out.

Owns open file handles of shards. Which samples there are is the manifest's business.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftmill.manifests import files
from draftmill.manifests.codec import codec
from draftmill.manifests.errors import ConfigError, DamagedError, DraftmillError
from draftmill.manifests.open_files import USED_UP, allow_many
from draftmill.manifests.shards import record
from draftmill.manifests.shards.record import Record
from draftmill.manifests.shards.shard import KIND_OF_STAGE, Kind, shard_path
from draftmill.manifests.types import Completion, Location, Stage, StatesTLH

# Headers are small; one read of this size nearly always gets header and a small record whole.
_FIRST_READ = 16 << 10
# Memory is taken for what a record claims before it is decoded. Real states are never so much
# larger than their bytes; small ones, of zeros for example, may be.
_MOST_RATIO = 64
_SMALL_STATES = 64 << 20


class StatesBlocks(NamedTuple):
    """Stored hidden states of a sample: `shape` (T, L, H) is what was asked for, `lengths` are the
    tokens of each block, whose last may reach beyond it."""

    codec: str
    shape: tuple[int, int, int]
    lengths: list[int]
    payloads: list[memoryview]


def _opened(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except OSError as error:
        # A dataset of a terabyte has more shards than a shell allows files.
        if error.errno not in USED_UP:
            raise
    most = allow_many()
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno not in USED_UP:
            raise
        raise DraftmillError(
            f"{path}: {error.strerror}; this process may have {most}, and every shard that is read "
            "takes one. Raise the limit (ulimit -n) above the number of shards."
        ) from error


class ShardReader:
    """Thread-safe, picklable access to the records of a dataset folder.

    Shards are opened when first needed, sealed or still open. Every payload is checked against
    its xxh3 before it is used; what fails raises DamagedError with shard and offset.
    """

    def __init__(self, dataset: Path) -> None:
        self.dataset = Path(dataset)
        self._fds: dict[tuple[Kind, int], int] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["dataset"])  # type: ignore[misc]

    def close(self) -> None:
        """Close all shard files; the reader may be used again."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def _fd(self, kind: Kind, number: int) -> int:
        found = self._fds.get((kind, number))
        if found is not None:
            return found
        # Not while the lock is held: opening a file behind a network may hang.
        fd = self._open(kind, number)
        with self._lock:
            found = self._fds.setdefault((kind, number), fd)
        if found != fd:
            os.close(fd)
        return found

    def _open(self, kind: Kind, number: int) -> int:
        folder = self.dataset / kind
        # Twice, because the shard may be sealed (renamed) between the two attempts to open it.
        for _ in range(2):
            for sealed in (True, False):
                try:
                    fd = _opened(shard_path(folder, number, sealed=sealed))
                except FileNotFoundError:
                    continue
                # Samples are read whole and in any order: what the kernel reads ahead is not used.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                return fd
        raise DamagedError("the shard file is missing", shard=f"{kind}/{number:06d}", offset=0)

    def header(self, stage: Stage, location: Location) -> Record:
        """The record header at `location`."""
        return self._head(KIND_OF_STAGE[stage], location)[0]

    def _head(self, kind: Kind, location: Location) -> tuple[Record, bytes]:
        fd = self._fd(kind, location.shard)
        data = files.read_at(fd, min(_FIRST_READ, location.length), location.offset)
        try:
            length = record.header_length(data)
            if length > location.length:
                raise DamagedError("the header is longer than its record")
            if length > len(data):
                data = files.read_at(fd, length, location.offset)
            found = record.parse(data, location.shard, location.offset)
            if found.length != location.length:
                raise DamagedError(f"record of {found.length} bytes where {location.length} belong")
        except DamagedError as error:
            raise self._damaged(kind, location, error.reason) from error
        return found, data

    def _damaged(self, kind: Kind, location: Location, reason: str) -> DamagedError:
        return DamagedError(reason, shard=f"{kind}/{location.shard:06d}", offset=location.offset)

    def _payloads(
        self,
        kind: Kind,
        location: Location,
        head: tuple[Record, bytes],
        *,
        names: set[str] | None = None,
        count: int | None = None,
    ) -> dict[str, memoryview]:
        """Checked payloads of a record: those in `names`, or the first `count`, or all."""
        found, data = head
        wanted = found.payloads if count is None else found.payloads[:count]
        if names is not None:
            last = max((i for i, p in enumerate(wanted) if p.name in names), default=-1)
            wanted = wanted[: last + 1]
        start = found.header_length
        end = start + sum(payload.length for payload in wanted)
        if end <= len(data):
            view = memoryview(data)[start:end]
        else:
            # One read of all payloads: they lie together. Rereading the few bytes that came with
            # the header is cheaper than copying what may be 100 MB.
            fd = self._fd(kind, location.shard)
            view = memoryview(files.read_at(fd, end - start, location.offset + start))
        if len(view) < end - start:
            raise self._damaged(kind, location, "the file ends inside a payload")
        result: dict[str, memoryview] = {}
        at = 0
        for payload in wanted:
            part = view[at : at + payload.length]
            at += payload.length
            if names is not None and payload.name not in names:
                continue
            if codec.checksum(part) != payload.xxh3:
                raise self._damaged(kind, location, f"payload {payload.name} fails its checksum")
            result[payload.name] = part
        return result

    def check(self, stage: Stage, location: Location) -> Record:
        """Verify every byte of a record without decoding it."""
        kind = KIND_OF_STAGE[stage]
        head = self._head(kind, location)
        self._payloads(kind, location, head)
        return head[0]

    def completion(self, location: Location, *, text: bool = True) -> Completion:
        """The completion at `location`; without `text`, only token ids and finish reason."""
        names = {"token_ids", "text"} if text else {"token_ids"}
        head = self._head("completions", location)
        payloads = self._payloads("completions", location, head, names=names)
        try:
            parts = {name: bytes(part) for name, part in payloads.items()}
            return record.decode_completion(head[0], parts, text=text)
        except (DamagedError, LookupError, TypeError, ValueError) as error:
            raise self._damaged("completions", location, str(error)) from error

    def blocks(self, location: Location, *, tokens: int | None = None) -> StatesBlocks:
        """The stored blocks that hold the first `tokens` of a sample (all by default), checked."""
        head = self._head("hidden_states", location)
        name, (total, layers, hidden), block = self._states_form(head[0], location)
        wanted = total if tokens is None else min(tokens, total)
        count = -(-wanted // block)
        payloads = list(self._payloads("hidden_states", location, head, count=count).values())
        lengths = codec.block_lengths(total, block)[:count]
        return StatesBlocks(name, (wanted, layers, hidden), lengths, payloads)

    def states(
        self,
        location: Location,
        *,
        tokens: int | None = None,
        out: StatesTLH | None = None,
        threads: int = 1,
    ) -> StatesTLH:
        """Hidden states as bf16 bit patterns, uint16 [T, L, H]; with `tokens`, the first of them.

        `out` is a buffer to decode into, of exactly the shape that is returned.
        """
        blocks = self.blocks(location, tokens=tokens)
        if out is None:
            out = np.empty(blocks.shape, np.uint16)
        elif out.shape != blocks.shape:
            raise ValueError(f"out has shape {out.shape}, needed is {blocks.shape}")
        try:
            codec.decode_states(
                blocks.codec,
                blocks.payloads,
                out,
                threads=threads,
                num_tokens=sum(blocks.lengths),
                block_tokens=blocks.lengths[0] if blocks.lengths else codec.BLOCK_TOKENS,
            )
        except DamagedError as error:
            raise self._damaged("hidden_states", location, error.reason) from error
        return out

    def _states_form(
        self, found: Record, location: Location
    ) -> tuple[str, tuple[int, int, int], int]:
        """Codec, [T, L, H] and tokens of a block, once they fit the bytes that are there."""
        try:
            total, layers, hidden = (int(n) for n in found.content["shape"])
            block = int(found.content["block_tokens"])
            name = codec.parse_codec(str(found.content["codec"]))
        except (KeyError, TypeError, ValueError, OverflowError, ConfigError) as error:
            raise self._damaged("hidden_states", location, f"bad shape: {error!r}") from error
        if block <= 0 or min(total, layers, hidden) < 0:
            raise self._damaged("hidden_states", location, f"shape {total}, {layers}, {hidden}")
        if found.raw_bytes != total * layers * hidden * 2:
            raise self._damaged("hidden_states", location, "shape contradicts its length")
        if len(found.payloads) != -(-total // block):
            raise self._damaged("hidden_states", location, "blocks are missing")
        if found.raw_bytes > _SMALL_STATES + _MOST_RATIO * location.length:
            raise self._damaged("hidden_states", location, "claims more states than it can hold")
        return name, (total, layers, hidden), block
