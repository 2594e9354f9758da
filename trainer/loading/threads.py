"""Threads that read for the one that trains, and that nobody has to wait for at the end.

Those of `concurrent.futures` keep a process from ending for as long as one of them hangs in a read.
What they do is `loader`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

_T = TypeVar("_T")
_JOIN_S = 0.05


class Threads:
    """`count` daemon threads. A task is called with the number of the thread that does it."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[int], Any]] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[int], _T]) -> Future[_T]:
        """Have a thread do this, in the order in which it was asked."""
        future: Future[_T] = Future()
        self._tasks.put((future, task))
        return future

    def close(self, hangs: Callable[[int], bool]) -> None:
        """End them after what they are doing; those that hang are left to themselves."""
        with suppress(Empty):
            while (waiting := self._tasks.get_nowait()) is not None:
                waiting[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for number, thread in enumerate(self._threads):
            while thread.is_alive() and not hangs(number):
                thread.join(_JOIN_S)

    def _work(self, number: int) -> None:
        if self._begin is not None:
            self._begin()
        while (asked := self._tasks.get()) is not None:
            future, task = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = task(number)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # Nothing of a row is held while the next one is waited for.
            del asked, future, task
