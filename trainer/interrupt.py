"""Turns the first SIGINT or SIGTERM into a polite question instead of an exception."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ONE_MOMENT_S = 1.0


class Interrupted(Exception):
    """Somebody asked to stop while samples were waited for. Never leaves the training loop."""


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether to stop. A second signal stops at once.

    Signals of one moment count as one: Ctrl-C reaches a process from the terminal and once more
    from `torchrun`. They can be caught in a process's main thread only; elsewhere nothing changes.
    """
    asked = False
    asked_at = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked, asked_at
        if asked and time.monotonic() - asked_at > _ONE_MOMENT_S:
            raise KeyboardInterrupt
        if not asked:
            asked, asked_at = True, time.monotonic()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: asked
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
