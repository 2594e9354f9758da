"""When a running extract stage asks the canary: before a server's first sample, and every so often.

Owns the probes' way through staging and budget. What a probe shows is `canary`'s.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable

from draftmill.builder.budget import Budget
from draftmill.builder.extraction.canary import Canary
from draftmill.builder.extraction.leftovers import Leftovers
from draftmill.builder.extraction.probe import Probe, ask, probe_ids, read
from draftmill.builder.extraction.sample import STAGED_BYTES
from draftmill.builder.extraction.servers import ExtractServer
from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.builder.extraction.staging import Staging
from draftmill.builder.requests.retry_policy import RetryPolicy, retried
from draftmill.manifests.errors import (
    PermanentError,
    RejectedError,
    RequestError,
    ServerError,
    TransientError,
    UnreachableError,
    WrongStatesError,
)
from draftmill.manifests.types import TokenIds

_TRIES = 3


class CanaryWatch:
    """`before_sample` is awaited before each sample is sent; `halt` ends the run with a reason, and
    `failed` with what is no fault of a server."""

    def __init__(
        self,
        canary: Canary,
        *,
        settings: ExtractSettings,
        staging: Staging,
        leftovers: Leftovers,
        budget: Budget,
        on_wait: Callable[[], None],
        halt: Callable[[str], None],
        failed: Callable[[Exception], None],
        note: Callable[[str], None],
    ) -> None:
        self._canary = canary
        self._every = settings.canary_every
        self._policy = RetryPolicy(
            tries=_TRIES, base_s=settings.retry_base_s, max_s=settings.retry_max_s
        )
        self._lock_timeout_s = settings.lock_timeout_s
        self._staging = staging
        self._leftovers = leftovers
        self._budget = budget
        self._numbers = itertools.count(1)
        self._on_wait = on_wait
        self._halt = halt
        self._failed = failed
        self._note = note
        self._first_ids: TokenIds | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: set[asyncio.Task[None]] = set()
        canary.explain_absence()

    async def before_sample(self, server: ExtractServer, token_ids: TokenIds) -> None:
        """Returns when this server may be sent samples.

        Raises WrongStatesError, which is about the run, and what any request to a server raises
        when it is gone.
        """
        if not self._canary.can_look:
            return
        if not server.trusted:
            async with self._locks[server.name]:
                if not server.trusted:
                    await self._look(server, token_ids, first=True)
        server.since_canary += 1
        if self._every and server.since_canary > self._every:
            server.since_canary = 0
            task = asyncio.create_task(self._look_again(server, token_ids))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def finish(self) -> None:
        """Wait for looks that have begun."""
        while self._running:
            await asyncio.wait(self._running)

    async def aclose(self) -> None:
        """Give up looks that have begun."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _look_again(self, server: ExtractServer, token_ids: TokenIds) -> None:
        try:
            await self._look(server, token_ids, first=False)
        except WrongStatesError as error:
            self._halt(
                f"{error} Up to {self._every:,} samples of this server that were stored since the "
                "canary last agreed are in doubt: `draftmill evict` and extract them again."
            )
        except (RequestError, ServerError) as error:  # its samples notice it, too
            self._note(f"canary: {server.name} could not be looked at: {error}")
        except Exception as error:
            self._failed(error)

    async def _look(self, server: ExtractServer, token_ids: TokenIds, *, first: bool) -> None:
        if first and self._first_ids is None:
            self._first_ids = probe_ids(token_ids, server.client.max_model_len)
        ids = self._first_ids if first else probe_ids(token_ids, server.client.max_model_len)
        assert ids is not None
        probe: Probe | None = None

        async def once() -> None:
            nonlocal probe
            probe = await self._fetch(server, ids)

        async def before_wait(tries: int, error: TransientError, wait_s: float) -> None:
            self._note(f"canary: {server.name}: {error}; trying again")

        try:
            await retried(once, self._policy, before_wait)
        except UnreachableError:
            raise
        except (TransientError, PermanentError, RejectedError) as error:
            # What is wrong with the request or its file is wrong with samples, too, and is dealt
            # with there; but nobody must think that this server was checked.
            self._canary.say(f"canary: not run on {server.name}: {error}")
        else:
            assert probe is not None
            await self._canary.judge(server.name, probe, first=first)
        server.trusted, server.since_canary = True, 0

    async def _fetch(self, server: ExtractServer, ids: TokenIds) -> Probe:
        layers = self._canary.layers
        # No sample has the id 0.
        request_id = self._staging.request_id(0, next(self._numbers))
        reservation = await self._budget.reserve(
            request_id,
            stored_bytes=0,
            staged_bytes=layers.raw_bytes(len(ids)) + 8 * len(ids) + STAGED_BYTES,
            on_wait=self._on_wait,
        )
        self._leftovers.live.add(request_id)
        try:
            path, said = await ask(server.client, ids, request_id, server.deadline_s(1.0))
            name = self._staging.name_of(path)
            await self._staging.wait(name, self._lock_timeout_s, server.name)
            states_TLH = await asyncio.to_thread(read, self._staging, name, ids, layers)
        except BaseException:
            self._leftovers.abandon(request_id, reservation)
            raise
        self._staging.remove(name)
        self._leftovers.live.discard(request_id)
        reservation.release()
        return Probe(token_ids=ids, states_TLH=states_TLH, said=said)
