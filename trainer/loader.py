"""Reads packed rows ahead of need, in the order that was planned, and brings them to a device.

Owns threads, worker processes and the memory of what waits. What a row is, is `rows`'s; which
samples make one is `data`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from draftmill.trainer.data import Row, Samples
from draftmill.trainer.rows import (
    Batch,
    PlaneRow,
    SampleReader,
    StatesShape,
    load_row,
    merge_row,
    read_row,
)

# Rows that a GPU has merged before it needs them: one to work on while the next is copied.
_DEVICE_ROWS = 2


class RowLoader:
    """Yields the batches of a sequence of rows, in order, on `device`, read ahead of need.

    `threads` decode in this process; `workers`, when not 0, are processes that do so instead, for
    where one interpreter is too slow (they are spawned, and take seconds to start). What waits is
    bounded by `prefetch_bytes` (one row at least); the rows and their order depend on none of
    these. `planes` leaves the last step of decoding to the device (by default where that is a GPU).
    Closing the iterator stops threads and workers.
    """

    def __init__(
        self,
        reader: SampleReader,
        samples: Samples,
        shape: StatesShape,
        *,
        threads: int,
        prefetch_bytes: int,
        workers: int = 0,
        pad_to: int = 0,
        device: str = "cpu",
        planes: bool | None = None,
    ) -> None:
        self._samples = samples
        self._threads, self._workers = threads, workers
        self._prefetch_bytes = prefetch_bytes
        self._device = torch.device(device)
        on_gpu = self._device.type == "cuda"
        self._planes = on_gpu if planes is None else planes
        # Pinned memory belongs to the process that has the GPU; workers hand theirs over.
        pin = on_gpu and self._planes and not workers
        self._read = _ReadRow(reader, shape, pad_to, planes=self._planes, pin=pin)

    def batches(self, rows: Iterable[Row]) -> Generator[Batch, None, None]:
        """Batches of `rows`, which may be endless."""
        source = self._in_workers(rows) if self._workers else self._in_threads(rows)
        with closing(source):
            if self._device.type == "cuda":
                yield from _on_gpu(source, self._device)
            else:
                for found in source:
                    yield merge_row(found, "cpu") if isinstance(found, PlaneRow) else found

    def _in_threads(self, rows: Iterable[Row]) -> Generator[Batch | PlaneRow, None, None]:
        items = _items(rows, self._samples)
        if self._threads == 0:
            for item in items:
                yield self._read[item]
            return
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="draftmill-decode")
        waiting: deque[tuple[int, Future[Batch | PlaneRow]]] = deque()
        waiting_bytes = 0
        following = next(items, None)
        try:
            while waiting or following is not None:
                while following is not None:
                    size = self._read.num_bytes(following)
                    full = waiting_bytes + size > self._prefetch_bytes
                    if waiting and (full or len(waiting) >= 4 * self._threads):
                        break
                    waiting.append((size, pool.submit(self._read.__getitem__, following)))
                    waiting_bytes += size
                    following = next(items, None)
                size, future = waiting.popleft()
                found = future.result()
                waiting_bytes -= size
                yield found
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _in_workers(self, rows: Iterable[Row]) -> Generator[Batch | PlaneRow, None, None]:
        # The rows are planned here and sent over: what a worker reads does not depend on how many
        # there are, and the loader hands their results out in the order of the rows.
        items = _items(rows, self._samples)
        first = next(items, None)
        if first is None:
            return
        fit = self._prefetch_bytes // max(1, self._read.num_bytes(first))
        loader = DataLoader(
            self._read,
            batch_size=None,
            sampler=_Once(first, items),
            num_workers=self._workers,
            prefetch_factor=int(np.clip(fit // self._workers, 1, 4)),
            multiprocessing_context="spawn",
            collate_fn=_as_it_is,
            worker_init_fn=_one_thread,
        )
        found: Any = iter(loader)
        try:
            yield from found
        finally:
            # Without this, workers live on until the iterator is collected.
            found._shutdown_workers()


Item = tuple[Row, Samples]


def _items(rows: Iterable[Row], samples: Samples) -> Iterator[Item]:
    """Each row with the columns of its own samples, so that it can be read anywhere."""
    for row in rows:
        yield row, samples.take(np.array(row.members, np.int64))


class _ReadRow(Dataset[Any]):
    """Reads the row that it is asked for; goes to worker processes as it is."""

    def __init__(
        self, reader: SampleReader, shape: StatesShape, pad_to: int, *, planes: bool, pin: bool
    ) -> None:
        self._reader, self._shape, self._pad_to = reader, shape, pad_to
        self._planes, self._pin = planes, pin

    def __getitem__(self, item: Item) -> Batch | PlaneRow:
        row, part = item
        own = Row(members=tuple(range(len(row.members))), cursor=row.cursor)
        if self._planes:
            found: Batch | PlaneRow = read_row(
                self._reader, part, own, self._shape, self._pad_to, pin=self._pin
            )
        else:
            found = load_row(self._reader, part, own, self._shape, self._pad_to)
        return found.of(row)

    def num_bytes(self, item: Item) -> int:
        """Memory of a row while it waits, and of one sample decoded beside it."""
        tokens = item[1].tokens
        places = max(self._pad_to, int(tokens.sum())) + int(tokens.max())
        size = places * self._shape.layers * self._shape.hidden_size * 2
        # Pinned memory comes in powers of two.
        return 1 << (size - 1).bit_length() if self._pin else size


class _Once:
    """Rows for a `DataLoader`, which asks for them once."""

    def __init__(self, first: Item, others: Iterator[Item]) -> None:
        self._first, self._others = first, others

    def __iter__(self) -> Iterator[Item]:
        yield self._first
        yield from self._others


def _as_it_is(found: Any) -> Any:
    return found


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)


def _on_gpu(
    source: Iterable[Batch | PlaneRow], device: torch.device
) -> Generator[Batch, None, None]:
    """Copy and merge rows on a stream of their own, while the model works on the rows before."""
    stream = torch.cuda.Stream(device)
    waiting: deque[tuple[Batch, torch.cuda.Event]] = deque()

    def ready() -> Batch:
        batch, event = waiting.popleft()
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        for tensor in batch.tensors.values():
            # Its memory is not given to the side stream again before the model is done with it.
            tensor.record_stream(current)
        return batch

    for found in source:
        with torch.cuda.stream(stream):
            pinned = found.pinned()
            moved = merge_row(pinned, device) if isinstance(pinned, PlaneRow) else pinned.to(device)
            event = torch.cuda.Event()
            event.record(stream)
        waiting.append((moved, event))
        if len(waiting) >= _DEVICE_ROWS:
            yield ready()
    while waiting:
        yield ready()
