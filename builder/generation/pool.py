"""Several servers as one: which of them gets the next request. Their own affairs are `endpoint`'s.

Gives the slot with the most free room, in the order of asking, and knows when there is no server
left to hope for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from draftmill.builder.generation.endpoint import Endpoint


class Pool:
    """Slots on endpoints. `acquire` waits for one; every slot is given back with `release`."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self._waiting: deque[tuple[int, asyncio.Future[Endpoint]]] = deque()
        self._no_server_since: float | None = None

    def add(self, endpoints: Sequence[Endpoint]) -> None:
        """Take servers into use."""
        self.endpoints.extend(endpoints)
        self.changed()

    @property
    def limit(self) -> int:
        """Requests that the living servers take at once."""
        return sum(each.controller.limit for each in self.endpoints if each.state == "up")

    @property
    def in_flight(self) -> int:
        """Slots that are taken now."""
        return sum(each.taken for each in self.endpoints)

    async def acquire(self, tokens: int) -> Endpoint:
        """A slot for a request that may take so many tokens; first come, first served."""
        if not self._waiting and (endpoint := self._best(tokens)) is not None:
            return self._take(endpoint, tokens)
        future: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result(), tokens)
            raise

    def release(self, endpoint: Endpoint, tokens: int) -> None:
        """Gives a slot back."""
        endpoint.give_back(tokens)
        self.changed()

    def changed(self) -> None:
        """Something may have become free: serves those who wait."""
        while self._waiting:
            tokens, future = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            endpoint = self._best(tokens)
            if endpoint is None:
                return
            self._waiting.popleft()
            future.set_result(self._take(endpoint, tokens))

    def hopeless(self, give_up_s: float) -> str | None:
        """Why there is no server left to wait for; None while there is."""
        if any(each.state == "up" for each in self.endpoints):
            self._no_server_since = None
            return None
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in self.endpoints)
        if all(each.state == "dead" for each in self.endpoints):
            return f"no server can be used any more ({reasons})"
        now = time.monotonic()
        if self._no_server_since is None:
            self._no_server_since = now
        if now - self._no_server_since < give_up_s:
            return None
        return f"no server has answered for {give_up_s:,.0f} s ({reasons})"

    def _best(self, tokens: int) -> Endpoint | None:
        best, most = None, 0.0
        for each in self.endpoints:
            room = each.room(tokens)
            if room > most:
                best, most = each, room
        return best

    def _take(self, endpoint: Endpoint, tokens: int) -> Endpoint:
        endpoint.take(tokens)
        return endpoint
