"""Waiting for samples that may never come: what is being read, since when, and giving up.

A read from a disk behind a network can hang for as long as the network does, and nobody can call
it back. So nobody waits for one without looking up: who waits says after a while what for, and
stops when asked. Knows no torch, as `reading`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.shards.reader import StatesBlocks
from draftmill.manifests.shards.shard import Kind
from draftmill.manifests.types import Completion, Location
from draftmill.trainer.interrupt import Interrupted
from draftmill.trainer.loading.reading import SampleReader

_LOOK_UP_S = 0.2
_SAY_EVERY_S = 30.0
# A read that takes longer is not waited for at the end.
_HANGS_S = 2.0
_KINDS: tuple[Kind, ...] = ("completions", "hidden_states")
# kind (0: none, else its place in _KINDS, from 1), shard, offset, and when it began (monotonic ns)
_FIELDS = 4

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class Reads:
    """What each of some readers reads just now; they may be other processes.

    `cells` [readers, 4] int64 is the memory of it. Seen while it changes it may be of two reads:
    good enough for a person.
    """

    nbytes_each = 8 * _FIELDS

    def __init__(self, cells: NDArray[np.int64]) -> None:
        self._cells = cells

    @classmethod
    def of(cls, readers: int) -> Reads:
        """For readers that are threads of this process."""
        return cls(np.zeros((readers, _FIELDS), np.int64))

    @contextmanager
    def noted(self, reader: int, kind: Kind, location: Location) -> Iterator[None]:
        """In here, `reader` reads from this place."""
        cell = self._cells[reader]
        cell[1:] = location.shard, location.offset, time.monotonic_ns()
        cell[0] = 1 + _KINDS.index(kind)
        try:
            yield
        finally:
            cell[0] = 0

    def hangs(self, reader: int) -> bool:
        """Whether this reader has been in one read for so long that it may never come back."""
        kind, _, _, since = self._cells[reader].tolist()
        return bool(kind) and time.monotonic_ns() - since > _HANGS_S * 1e9

    def oldest(self) -> str:
        """The read that has lasted longest, in words."""
        under_way = [cell for cell in self._cells.tolist() if cell[0]]
        if not under_way:
            return "no read is under way, they are being decoded"
        kind, shard, offset, since = min(under_way, key=lambda cell: cell[3])
        seconds = (time.monotonic_ns() - since) / 1e9
        return f"{_KINDS[kind - 1]}/{shard:06d} at byte {offset} has been read for {seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class Watched:
    """A reader of samples that notes what it reads; `number` is its own among `reads`."""

    reader: SampleReader
    reads: Reads
    number: int

    def completion(self, location: Location, *, text: bool = True) -> Completion:
        """As the reader's."""
        with self.reads.noted(self.number, "completions", location):
            return self.reader.completion(location, text=text)

    def blocks(self, location: Location, *, tokens: int | None = None) -> StatesBlocks:
        """As the reader's."""
        with self.reads.noted(self.number, "hidden_states", location):
            return self.reader.blocks(location, tokens=tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How whoever needs a sample waits for it: until `stop` says that it is not needed."""

    stop: Callable[[], bool]
    reads: Reads

    def result(self, future: Future[_T]) -> _T:
        """What a thread was asked for, once it is there. Raises what that raised."""
        if not future.done():
            self.until(lambda seconds: wait([future], seconds).done)
        return future.result()

    def until(self, ready: Callable[[float], Any]) -> None:
        """Return once `ready`, which looks for so many seconds at most, has found something.

        Raises Interrupted when asked to stop before.
        """
        started = said = time.monotonic()
        while not ready(_LOOK_UP_S):
            if self.stop():
                raise Interrupted
            now = time.monotonic()
            if now - said >= _SAY_EVERY_S:
                said = now
                log.warning(
                    "training has waited %.0f s for samples: %s", now - started, self.reads.oldest()
                )
