"""The tries of one row at one stage: which of them count, and what the history says of the last.

When a row is tried again is `retry_policy`'s, how a try goes is the stages'.
"""

from __future__ import annotations

import time
from typing import Any

from draftmill.manifests.errors import TransientError

# Servers that die under a row cost it nothing, until it is perhaps this row that kills them.
FREE_MOVES = 5


class Tries:
    """Counts the tries of a row. `deadline_s` is to be set by whoever knows it."""

    def __init__(self) -> None:
        self.count = 0
        self.deadline_s: float | None = None
        self._moves = 0
        self._queue_s = 0.0
        self._started: float | None = None
        self._started_at = 0.0
        self._endpoint: str | None = None

    def begin(self, endpoint: str, *, waited_since: float) -> None:
        """A try on `endpoint`; `waited_since` is when it began to wait for a slot there
        (monotonic seconds)."""
        self.count += 1
        self.deadline_s = None
        self._started_at = time.time()
        self._started = time.monotonic()
        self._queue_s = self._started - waited_since
        self._endpoint = endpoint

    def take_back(self, error: Exception) -> None:
        """The server went away under this try, which then does not count.

        Raises TransientError from `error` when that has happened too often.
        """
        self._moves += 1
        if self._moves > FREE_MOVES:
            raise TransientError(f"moved {self._moves} times, at last: {error}") from error
        self.count -= 1

    def number(self, before: int) -> int:
        """The number of this attempt in the history, after `before` of earlier runs."""
        return before + max(1, self.count)

    def facts(self) -> dict[str, Any]:
        """What an `Attempt` says of the last try: times in seconds, deadline and endpoint."""
        return {
            "queue_s": self._queue_s,
            "total_s": None if self._started is None else time.monotonic() - self._started,
            "deadline_s": self.deadline_s,
            "endpoint": self._endpoint,
            "started_at": self._started_at,
        }
