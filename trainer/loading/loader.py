"""Reads packed rows ahead of need, in the order that was planned, and brings them to a device.

Owns who reads, and the memory of what waits. What a row is, is `reading`'s and `rows`'s; which
samples make one is `data`'s; the processes themselves are in `processes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from threading import Event
from typing import Protocol, TypeVar

import numpy as np
import torch

from draftmill.manifests.codec.names import BLOCK_TOKENS
from draftmill.manifests.errors import DraftmillError
from draftmill.trainer.loading.data import Row, Samples
from draftmill.trainer.loading.groups import Bytes, StatesShape
from draftmill.trainer.loading.processes import Slots, readers
from draftmill.trainer.loading.reading import (
    Item,
    PlaneRow,
    ReadRow,
    SampleReader,
    item_of,
    renamed,
)
from draftmill.trainer.loading.rows import Batch, load_row, merge_row
from draftmill.trainer.loading.threads import Threads
from draftmill.trainer.loading.waiting import Patience, Reads, Watched

_T = TypeVar("_T")
_Asked = TypeVar("_Asked", contravariant=True)
_Begun = TypeVar("_Begun")
# Rows that wait for each reader, at most: enough to even out rows that take longer than others.
_AHEAD = 8
# Rows that are asked of a process at once.
_TOGETHER = 4


class RowLoader:
    """Yields the batches of a sequence of rows, in order, on `device`, read ahead of need.

    `workers` threads of this process read and decode (0: rows are read when they are asked for).
    With `processes` they are processes, spawned within a second: beside a GPU, whose training loop
    needs the interpreter for itself. What waits is bounded by `prefetch_bytes` (two rows at least);
    the rows and their order depend on none of these. On a GPU the last step of decoding is done
    there. Closing the iterator stops threads and processes.

    Where a row is waited for, `stop` is asked now and then; then the iterator raises Interrupted.
    """

    def __init__(
        self,
        reader: SampleReader,
        samples: Samples,
        shape: StatesShape,
        *,
        workers: int,
        prefetch_bytes: int,
        processes: bool = False,
        pad_to: int = 0,
        device: str = "cpu",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._samples, self._stop = samples, stop
        self._workers, self._processes = workers, processes
        self._prefetch_bytes = prefetch_bytes
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._read = ReadRow(reader=reader, shape=shape, pad_to=pad_to)

    def batches(self, rows: Iterable[Row]) -> Generator[Batch, None, None]:
        """Batches of `rows`, which may be endless."""
        items = (item_of(row, self._samples) for row in rows)
        closed = Event()

        def stop() -> bool:
            return closed.is_set() or self._stop()

        with closing(self._found(items, stop)) as found:
            if self._on_gpu:
                yield from _on_gpu(found, self._device, closed)
                return
            for row in found:
                # What processes found lies in memory that is the next row's.
                yield row if isinstance(row, Batch) else merge_row(row, torch.tensor(row.arena))

    def _found(
        self, items: Iterator[Item], stop: Callable[[], bool]
    ) -> Generator[Batch | PlaneRow, None, None]:
        """What was read of each row; good until the next one is asked for."""
        if self._processes and self._workers:
            yield from self._in_processes(items, stop)
        else:
            yield from self._in_threads(items, stop)

    def _in_threads(
        self, items: Iterator[Item], stop: Callable[[], bool]
    ) -> Generator[Batch | PlaneRow, None, None]:
        # Never in the thread that trains: nobody could call it back from a read that hangs.
        count = max(1, self._workers)
        reads = Reads.of(count)
        patience = Patience(stop=stop, reads=reads)
        ways = [
            replace(self._read, reader=Watched(self._read.reader, reads, number))
            for number in range(count)
        ]
        threads = Threads(
            count,
            "draftmill-decode",
            # Else each thread that pins memory would take some of the first GPU for itself.
            partial(torch.cuda.set_device, self._device) if self._on_gpu else None,
        )

        def submit(item: Item, _: int) -> Future[Batch | PlaneRow]:
            return threads.submit(lambda number: self._read_here(ways[number], item))

        def result(future: Future[Batch | PlaneRow], _: int) -> Batch | PlaneRow:
            return patience.result(future)

        try:
            yield from _ahead(
                items,
                _Bytes(self._prefetch_bytes, self._row_bytes),
                _AHEAD * self._workers or 1,
                submit,
                result,
            )
        finally:
            threads.close(reads.hangs)

    def _read_here(self, read: ReadRow, item: Item) -> Batch | PlaneRow:
        if self._on_gpu:
            return read(item, _pinned)
        row, part = item
        return load_row(read.reader, part, renamed(row), read.shape, read.pad_to).of(row)

    def _in_processes(
        self, items: Iterator[Item], stop: Callable[[], bool]
    ) -> Generator[PlaneRow, None, None]:
        first = next(items, None)
        if first is None:
            return
        size = self._slot_bytes(first)
        fit = max(2, self._prefetch_bytes // size)
        # Each message costs the trainer time, so it is about several rows where they are small.
        together = int(np.clip(fit // (2 * self._workers + 1), 1, _TOGETHER))
        count = min(fit // together, _AHEAD * self._workers // together + 1)
        slots = Slots(count * together, size, readers=self._workers)
        with (
            closing(slots),
            _registered(slots.memory, self._on_gpu),
            readers(self._read, self._workers, slots, together, stop) as reading,
        ):
            parts = _parts(chain([first], items), together)
            for rows in _ahead(
                parts, _Numbers(count), self._workers * _AHEAD, reading.submit, reading.result
            ):
                yield from rows

    def _row_bytes(self, item: Item) -> int:
        """Memory of a row while it waits, and of one sample decoded beside it."""
        tokens = item[1].tokens
        places = max(self._read.pad_to, int(tokens.sum())) + int(tokens.max())
        size = places * self._read.shape.token_bytes
        # Pinned memory comes in powers of two.
        return 1 << (size - 1).bit_length() if self._on_gpu else size

    def _slot_bytes(self, first: Item) -> int:
        """Memory that nearly every row fits in: its tokens, whole blocks, and 32 bytes a place."""
        places = max(self._read.pad_to, int(first[1].tokens.sum()))
        # One token more than places for each sample.
        tokens = -(-places // BLOCK_TOKENS) * BLOCK_TOKENS + places // 16
        return tokens * self._read.shape.token_bytes + 32 * places + (64 << 10)


class _Memory(Protocol[_Asked]):
    """Where rows wait. A place is a number that is given back when they have been used."""

    def take(self, asked: _Asked) -> int | None:
        """A place for what is asked for, or None while there is none."""

    def give(self, place: int) -> None:
        """Take a place back."""


class _Bytes:
    """Memory of the process: a place is a number of bytes. There is always one for a lone row."""

    def __init__(self, most: int, needed: Callable[[Item], int]) -> None:
        self._most, self._needed, self._taken = most, needed, 0

    def take(self, asked: Item) -> int | None:
        size = self._needed(asked)
        if self._taken and self._taken + size > self._most:
            return None
        self._taken += size
        return size

    def give(self, place: int) -> None:
        self._taken -= place


class _Numbers:
    """Pieces of shared memory: a place is the number of one."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))

    def take(self, asked: object) -> int | None:
        return self._free.popleft() if self._free else None

    def give(self, place: int) -> None:
        self._free.append(place)


def _parts(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while part := list(islice(items, size)):
        yield part


def _ahead(
    asked: Iterator[_Asked],
    memory: _Memory[_Asked],
    most: int,
    submit: Callable[[_Asked, int], _Begun],
    result: Callable[[_Begun, int], _T],
) -> Generator[_T, None, None]:
    """What is asked for, in order, at most `most` begun before their turn."""
    waiting: deque[tuple[_Begun, int]] = deque()
    following = next(asked, None)
    while waiting or following is not None:
        while following is not None and len(waiting) < most:
            place = memory.take(following)
            if place is None:
                break
            waiting.append((submit(following, place), place))
            following = next(asked, None)
        begun, place = waiting.popleft()
        yield result(begun, place)
        memory.give(place)


# -- the device ------------------------------------------------------------------------------------


def _pinned(size: int) -> Bytes:
    """Memory that a GPU copies from by itself."""
    found: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return found


@contextmanager
def _registered(memory: Bytes, on_gpu: bool) -> Iterator[None]:
    """Memory that is there already, made such that a GPU copies from it by itself."""
    if not on_gpu:
        yield
        return
    cuda = torch.cuda.cudart()
    address = memory.ctypes.data
    if failed := int(cuda.cudaHostRegister(address, memory.nbytes, 0)):
        raise DraftmillError(
            f"{memory.nbytes >> 20} MB of memory for rows cannot be pinned (CUDA error {failed}). "
            "Lower prefetch_mb, or raise the limit on locked memory (ulimit -l)."
        )
    try:
        yield
    finally:
        cuda.cudaHostUnregister(address)


def _on_gpu(
    source: Iterable[Batch | PlaneRow], device: torch.device, closed: Event
) -> Generator[Batch, None, None]:
    """Batches on the device, each made in another thread while the model works on the one before:
    what that thread does is mostly waiting, for readers and for the driver. Sets `closed`, which
    ends its waiting, when nobody wants more."""
    merged = _merged(source, device)
    with ThreadPoolExecutor(1, initializer=partial(torch.cuda.set_device, device)) as feeder:
        following = feeder.submit(next, merged, None)
        try:
            while (found := following.result()) is not None:
                following = feeder.submit(next, merged, None)
                batch, event = found
                current = torch.cuda.current_stream(device)
                current.wait_event(event)
                for tensor in batch.tensors.values():
                    # Its memory is not given to the other stream before the model is done with it.
                    tensor.record_stream(current)
                yield batch
        finally:
            closed.set()
            following.exception()
            feeder.submit(merged.close).result()


def _merged(
    source: Iterable[Batch | PlaneRow], device: torch.device
) -> Generator[tuple[Batch, torch.cuda.Event], None, None]:
    """Copy and merge rows on a stream of their own; an event tells when each is done."""
    stream = torch.cuda.Stream(device)
    try:
        for found in source:
            assert isinstance(found, PlaneRow)
            copied, merged = torch.cuda.Event(), torch.cuda.Event()
            with torch.cuda.stream(stream):
                arena = torch.from_numpy(found.arena).to(device, non_blocking=True)
                copied.record(stream)
                batch = merge_row(found, arena)
                merged.record(stream)
            yield batch, merged
            # The next row may come in the same memory. It was copied long ago by now.
            copied.synchronize()
    finally:
        stream.synchronize()
