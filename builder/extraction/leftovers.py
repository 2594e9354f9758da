"""Staged files that nobody waits for any more, and the room they may still take.

A request that was given up may leave its file minutes later. Until that is swept its reservation
holds, or the budget would be exceeded by what nobody counts. Names and locks are `staging`'s.
"""

from __future__ import annotations

import asyncio
import time

from draftmill.builder.budget import Reservation
from draftmill.builder.extraction.staging import Staging

SWEEP_S = 2.0
_LAST_SWEEPS_S = 0.1


class Leftovers:
    """`live` has the ids of requests that are waited for; files of all others are swept.

    A file that never comes is not waited for longer than `forget_s`.
    """

    def __init__(self, staging: Staging, *, max_age_s: float, forget_s: float) -> None:
        self.live: set[str] = set()
        self._staging = staging
        self._max_age_s = max_age_s
        self._forget_s = forget_s
        self._held: dict[str, tuple[float, Reservation]] = {}

    def abandon(self, request_id: str, reservation: Reservation) -> None:
        """Nobody waits for this request's file any more, but it may come."""
        self.live.discard(request_id)
        self._held[request_id] = (time.monotonic(), reservation)

    def sweep(self) -> bool:
        """Delete what is there; returns whether something is still being written."""
        deleted, left = self._staging.sweep(self.live, max_age_s=self._max_age_s)
        now = time.monotonic()
        for request_id, (since, reservation) in list(self._held.items()):
            forgotten = now - since > self._forget_s and request_id not in left
            if request_id in deleted or forgotten:
                del self._held[request_id]
                reservation.release()
        return bool(left)

    async def watch(self) -> None:
        """Sweep for ever."""
        while True:
            self.sweep()
            await asyncio.sleep(SWEEP_S)

    async def finish(self, wait_s: float) -> None:
        """The last sweeps of a run: nothing is waited for any more, and no file of ours shall stay.

        Waits at most `wait_s` for files that are being written or may still come: a server may
        finish a step that it was in when its request was given up.
        """
        self.live.clear()
        start = time.monotonic()
        while True:
            settled = not self.sweep() and not self._held
            if settled or time.monotonic() - start >= wait_s:
                return
            await asyncio.sleep(_LAST_SWEEPS_S)
