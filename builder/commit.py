"""From finished attempts to durable rows: batches them and commits on the writer's one thread.

Shared by the stages that fill a dataset. What a commit does on disk is left to the writer; which
attempts there are, and what follows a commit (releasing room, deleting staged files), to the stage.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

from draftmill.manifests.types import Result

P = ParamSpec("P")
T = TypeVar("T")

BATCH_ROWS = 64
BATCH_S = 2.0
BATCH_BYTES = 256 << 20
PUBLISH_S = 3.0


class ResultWriter(Protocol):
    """The part of a dataset writer that commits; used from one thread only."""

    def commit(self, results: Sequence[Result], /) -> object:
        """Store payloads durably, then record all results in one transaction."""

    def publish(self) -> object:
        """Refresh what other processes see of the dataset."""


class Committer:
    """Collects results and commits at most `batch_rows` at a time, `batch_s` after the first.

    Not more than one batch of rows waits or is being committed: `put` waits before it takes more,
    which bounds memory and what a kill can cost. After a failed commit every call raises its error
    and nothing more is written; `on_failed` gets it at once, because everybody may be waiting for
    what only a commit would bring. Leaving the context commits what was put, unless the reason for
    leaving is a cancellation.
    """

    def __init__(
        self,
        writer: ResultWriter,
        *,
        batch_rows: int = BATCH_ROWS,
        batch_s: float = BATCH_S,
        batch_bytes: int = BATCH_BYTES,
        publish_s: float = PUBLISH_S,
        on_committed: Callable[[Sequence[Result]], None] | None = None,
        on_failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._writer = writer
        self._batch_rows = batch_rows
        self._batch_s = batch_s
        self._batch_bytes = batch_bytes
        self._publish_s = publish_s
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._queue: deque[tuple[Result, int, Callable[[], None] | None]] = deque()
        self._rows = 0  # queued and being committed
        self._bytes = 0
        self._first_at = 0.0
        self._published_at = time.monotonic()
        self._hurry = False
        self._closing = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()
        self._work = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="draftmill-writer")
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Committer:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        if isinstance(error, asyncio.CancelledError):
            self._queue.clear()
        self._closing = True
        self._work.set()
        try:
            await self._task
        finally:
            self._executor.shutdown(wait=True)
        if error is None:
            self._check()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something else that touches the writer, on the writer's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def put(
        self, result: Result, *, payload_bytes: int = 0, then: Callable[[], None] | None = None
    ) -> None:
        """Hand over one result; `then` is called once its commit has returned."""
        async with self._changed:
            while not self._has_room(payload_bytes):
                self._check()
                await self._changed.wait()
            self._check()
            if not self._queue:
                self._first_at = time.monotonic()
            self._queue.append((result, payload_bytes, then))
            self._rows += 1
            self._bytes += payload_bytes
        self._work.set()

    def kick(self) -> None:
        """Commit what is there without waiting for a full batch."""
        if self._queue:
            self._hurry = True
            self._work.set()

    async def flush(self) -> None:
        """Returns when everything put before is committed."""
        async with self._changed:
            while self._rows and self._failure is None:
                self.kick()
                await self._changed.wait()
        self._check()

    def _has_room(self, payload_bytes: int) -> bool:
        if self._failure is not None or not self._rows:
            return self._failure is None
        return self._rows < self._batch_rows and self._bytes + payload_bytes <= self._batch_bytes

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait_s(self) -> float:
        """Seconds until the queue is due; 0 when it is due now."""
        full = len(self._queue) >= self._batch_rows or 2 * self._bytes >= self._batch_bytes
        if self._hurry or self._closing or full:
            return 0.0
        return max(0.0, self._first_at + self._batch_s - time.monotonic())

    async def _run(self) -> None:
        while True:
            self._work.clear()
            wait_s = self._wait_s() if self._queue else None
            if wait_s is None and self._closing:
                return
            if wait_s is None or wait_s > 0:
                try:
                    await asyncio.wait_for(self._work.wait(), wait_s)
                except TimeoutError:
                    pass
                continue
            self._hurry = False
            batch = list(self._queue)
            self._queue.clear()
            try:
                await self._commit(batch)
            except BaseException as error:
                async with self._changed:
                    self._failure = error
                    self._queue.clear()
                    self._changed.notify_all()
                if self._on_failed is not None and isinstance(error, Exception):
                    self._on_failed(error)
                return

    async def _commit(self, batch: list[tuple[Result, int, Callable[[], None] | None]]) -> None:
        results = [result for result, _, _ in batch]
        publish = time.monotonic() - self._published_at >= self._publish_s
        await self.call(self._store, results, publish)
        if publish:
            self._published_at = time.monotonic()
        # progress before staged sources are deleted: the order that every stage promises
        if self._on_committed is not None:
            self._on_committed(results)
        for _, _, then in batch:
            if then is not None:
                then()
        async with self._changed:
            self._rows -= len(batch)
            self._bytes -= sum(size for _, size, _ in batch)
            self._changed.notify_all()

    def _store(self, results: Sequence[Result], publish: bool) -> None:
        self._writer.commit(results)
        if publish:
            self._writer.publish()
