"""What Ctrl-C means to a running stage. What the stage then finishes is left to the stage."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from draftmill.builder.progress import StageReport

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM sets `requested`, the second cancels the task.

    `forced` tells a cancellation by the second signal from any other. Outside the main thread,
    where signals cannot be handled, only `request` works.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = False
        self._task: asyncio.Task[object] | None = None
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> StopSignals:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            try:
                loop.add_signal_handler(number, self.request)
            except (RuntimeError, ValueError):
                break
            self._handled.append(number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._handled:
            loop.remove_signal_handler(number)

    def request(self) -> None:
        """Ask the stage to stop; asking twice cancels it."""
        if self.requested.is_set():
            self.forced = True
            if self._task is not None:
                self._task.cancel()
        self.requested.set()


@contextmanager
def stoppable(report: StageReport) -> Iterator[StopSignals]:
    """Signals for one run of a stage; a second one ends the block, without an error.

    The report is told of that and of how long the run took.
    """
    begun = time.monotonic()
    with StopSignals() as signals:
        try:
            yield signals
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not signals.forced or task is None:
                raise
            task.uncancel()
            report.interrupted = True
    report.seconds = time.monotonic() - begun
