"""Processes that read rows for the one that trains, and the memory that they share with it.

They exist because decoding and training in one interpreter slow each other down: both are made of
many short calls, each of which gives the interpreter's lock away and waits to get it back. A row
is decoded to where the trainer sees it; what is sent is its description. The trainer talks to each
process itself, so that no thread of its own is needed for that. Which rows are read and when is
`loader`'s.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context, reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from draftmill.manifests.errors import DraftmillError
from draftmill.trainer.loading.data import Cursor, Row
from draftmill.trainer.loading.groups import Bytes
from draftmill.trainer.loading.reading import Item, PlaneRow, ReadRow, named
from draftmill.trainer.loading.waiting import Patience, Reads, Watched

_NOWHERE = np.empty(0, np.uint8)
_NOBODY = Row(members=(), cursor=Cursor())
# Signals that ask a run to stop. A terminal, `timeout` and whatever else ends a group of processes
# send them to readers too, which have to go on until the trainer has saved.
_STOPS = (signal.SIGINT, signal.SIGTERM)
# A process that was killed is gone at once, unless it hangs where the system cannot end it.
_GONE_S = 5.0


class Slots:
    """`count` pieces of memory of `size` bytes; processes that it is sent to see the same ones.

    Behind them, `reads` is what each of `readers` reads just now. Memory without a name: nothing is
    left of it whoever dies, and no limit of /dev/shm applies.
    """

    def __init__(self, count: int, size: int, *, readers: int) -> None:
        self.count, self.size = count, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._readers = readers
        self._fd = os.memfd_create("draftmill-rows")
        os.ftruncate(self._fd, self._bytes)
        self._map()

    @property
    def _bytes(self) -> int:
        return self.count * self.size + self._readers * Reads.nbytes_each

    def _map(self) -> None:
        found = np.frombuffer(mmap.mmap(self._fd, self._bytes), np.uint8)
        self.memory, rest = np.split(found, [self.count * self.size])
        self.reads = Reads(rest.view(np.int64).reshape(self._readers, -1))

    def __getstate__(self) -> dict[str, Any]:
        state = {"count": self.count, "size": self.size, "readers": self._readers}
        return {**state, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.count, self.size, self._readers = state["count"], state["size"], state["readers"]
        self._fd = state["fd"].detach()
        self._map()

    def __getitem__(self, number: int) -> Bytes:
        return self.memory[number * self.size :][: self.size]

    def close(self) -> None:
        """Send it to nobody any more; the memory goes with the last array that is in it."""
        os.close(self._fd)


class Readers:
    """Processes that read rows to `slots`, taking turns; each answers in the order of its rows."""

    def __init__(
        self,
        read: ReadRow,
        connections: list[Connection],
        slots: Slots,
        together: int,
        stop: Callable[[], bool],
    ) -> None:
        self._read, self._connections, self._slots = read, connections, slots
        self._together = together
        self._patience = Patience(stop=stop, reads=slots.reads)
        self._sent = 0

    def submit(self, items: list[Item], place: int) -> tuple[Connection, list[Item]]:
        """Begin to read rows to the slots of a place, of which each has as many as `items` has at
        most. `result` takes what this returns, in the same order."""
        connection = self._connections[self._sent % len(self._connections)]
        self._sent += 1
        with _alive():
            connection.send((items, place * self._together))
        return connection, items

    def result(self, begun: tuple[Connection, list[Item]], place: int) -> Iterator[PlaneRow]:
        """The rows of a place, once they are there. Raises what reading one raised."""
        connection, items = begun
        with _alive():
            self._patience.until(connection.poll)
            answers = connection.recv()
        pairs = zip(items, answers, strict=True)
        for slot, (item, found) in enumerate(pairs, place * self._together):
            if isinstance(found, DraftmillError):
                raise found
            if found is None:
                # It outgrew its slot, as thousands of samples of two tokens would.
                yield self._read(item, lambda size: np.empty(size, np.uint8))
            else:
                yield replace(named(found, item), arena=self._slots[slot][: found.num_bytes])


@contextmanager
def readers(
    read: ReadRow,
    workers: int,
    slots: Slots,
    together: int,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[Readers, None, None]:
    """Processes that end with the context, or when this process dies; `together` rows at most are
    asked of one at a time. `stop` says when not to wait for them any more."""
    context = get_context("spawn")
    connections: list[Connection] = []
    processes: list[SpawnProcess] = []
    end = partial(_end, connections, processes)
    # What multiprocessing does to processes that are left at the end is a signal they do not hear.
    atexit.register(end)
    # The one that trains decides what follows a signal. What is blocked here is blocked there, from
    # the first moment on. Starting Python's own helper would unblock it again, so that comes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        for number in range(workers):
            mine, theirs = context.Pipe()
            connections.append(mine)
            processes.append(
                context.Process(target=_serve, args=(theirs, read, slots, number), daemon=True)
            )
            processes[-1].start()
            theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield Readers(read, connections, slots, together, stop)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end()
        atexit.unregister(end)


def _end(connections: Sequence[Connection], processes: Sequence[SpawnProcess]) -> None:
    """Killed and not asked: one that hangs in a read would never answer, and none has anything
    that could be lost."""
    for process in processes:
        if process.pid is not None:
            process.kill()
    for connection in connections:
        connection.close()
    for process in processes:
        if process.pid is not None:
            process.join(_GONE_S)


@contextmanager
def _alive() -> Generator[None, None, None]:
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise DraftmillError(
            "A process that reads samples died. If it says nothing above, it was killed, most "
            "often for want of memory: lower decode_workers or prefetch_mb. The last checkpoint is "
            "whole."
        ) from error


def _serve(connection: Connection, read: ReadRow, slots: Slots, number: int) -> None:
    """Read rows until nobody asks any more."""
    read = replace(read, reader=Watched(read.reader, slots.reads, number))
    try:
        while True:
            items, slot = connection.recv()
            connection.send([_answer(read, item, slots[slot + n]) for n, item in enumerate(items)])
    except (EOFError, ConnectionError):
        return


def _answer(read: ReadRow, item: Item, here: Bytes) -> PlaneRow | DraftmillError | None:
    """The row without its bytes, or what is wrong with it; None where it does not fit."""

    def room(size: int) -> Bytes:
        if size > len(here):
            raise _TooLarge
        return here[:size]

    try:
        # Whose row it is, the one that asked knows. A short answer always fits into the pipe, or
        # both could wait for the other to take what they send.
        found = read(item, room)
        return replace(found, row=_NOBODY, sample_ids=(), lengths=(), arena=_NOWHERE)
    except _TooLarge:
        return None
    except DraftmillError as error:
        return error


class _TooLarge(Exception):
    pass
