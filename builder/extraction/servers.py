"""Extraction servers as one: which gets the next sample, how long it may take, who is away.

Requests themselves are `client`'s; what a failure means for a sample is `extract`'s. Generation has
its own, because there tokens are the measure and here only prefill is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from draftmill.builder.requests.client import TargetClient
from draftmill.manifests.errors import (
    PermanentError,
    ServerError,
    TimedOutError,
    TransientError,
    UnreachableError,
    UsageError,
)
from draftmill.manifests.types import TokenIds

_UNMEASURED_S = 600.0
_LEAST_S = 60.0
_MARGIN = 10.0
_PROBE_BASE_S = 0.5
_PROBE_MAX_S = 30.0
_LOOK_S = 1.0


class ExtractServer:
    """One server. `state`: up, down (being probed), dead (not used again in this run)."""

    def __init__(self, client: TargetClient, timeout_s: float | None) -> None:
        self.client = client
        self.name = client.url
        self.state = "up"
        self.reason = ""
        self.requests = 0
        self.tokens = 0
        # Whether the canary has looked at it since it was last away, and samples sent since then.
        self.trusted = False
        self.since_canary = 0
        self._timeout_s = timeout_s
        self._seconds_per_token = 0.0

    def deadline_s(self, patience: float) -> float:
        """Seconds for a request sent now: what everything in flight takes, with a wide margin."""
        if self._timeout_s is not None:
            return self._timeout_s * patience
        if not self._seconds_per_token:
            return _UNMEASURED_S * patience
        return patience * max(_LEAST_S, _MARGIN * self.tokens * self._seconds_per_token)

    async def prefill(self, token_ids: TokenIds, request_id: str, patience: float) -> str:
        """`hidden_states_path` as the server names it.

        Raises RequestError kinds; ServerError when this is no extraction server.
        """
        start, tokens, deadline_s = time.monotonic(), self.tokens, self.deadline_s(patience)
        try:
            async with asyncio.timeout(deadline_s):
                path = await self.client.prefill(token_ids, request_id=request_id)
        except TimeoutError:
            raise TimedOutError(f"{self.name}: no answer after {deadline_s:,.0f} s") from None
        if path is None:
            raise ServerError(
                f"{self.name} answers without hidden states: start it with "
                "`draftmill serve extract`, not as a generation server."
            )
        # the slowest of the recent ones decides: a deadline must hold for what is slow
        measured = (time.monotonic() - start) / max(tokens, len(token_ids))
        self._seconds_per_token = max(measured, 0.95 * self._seconds_per_token)
        return path


class ExtractServers:
    """Slots on the servers: `acquire` waits for one, `release` gives it back."""

    def __init__(
        self,
        clients: Sequence[TargetClient],
        *,
        concurrency: int,
        max_tokens: int,
        timeout_s: float | None,
        note: Callable[[str], None],
    ) -> None:
        self.servers = [ExtractServer(client, timeout_s) for client in clients]
        self._concurrency = concurrency
        self._max_tokens = max_tokens
        self._note = note
        self._freed = asyncio.Event()
        self._probes: set[asyncio.Task[None]] = set()
        self._none_since: float | None = None

    @property
    def in_flight(self) -> int:
        """Slots that are taken now."""
        return sum(each.requests for each in self.servers)

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt and completion that every server takes, as far as they say."""
        lengths = [each.client.max_model_len for each in self.servers]
        return min((each for each in lengths if each is not None), default=None)

    async def connect(self) -> str:
        """Checks that all serve the same model; returns its name. ServerError says what is off.

        A server that does not answer may come later, if another one is there.
        """
        if not self.servers:
            raise UsageError("no server to ask: give --url http://HOST:PORT/v1 at least once")
        names: dict[str, str] = {}
        away: list[tuple[ExtractServer, ServerError]] = []
        for each in self.servers:
            try:
                names.setdefault((await each.client.connect()).id, each.name)
            except ServerError as error:
                if not isinstance(error.__cause__, TransientError):
                    raise
                away.append((each, error))
        if not names:
            raise away[0][1]
        if len(names) > 1:
            listing = ", ".join(f"{model} at {url}" for model, url in names.items())
            raise ServerError(f"the servers serve different models: {listing}.")
        model = next(iter(names))
        for each, reason in away:
            each.client.model = model
            self.lost(each, UnreachableError(str(reason)))
        return model

    async def acquire(self, tokens: int, give_up_s: float) -> ExtractServer:
        """The server with the fewest tokens in flight that has room.

        A sample larger than the limit is sent when nothing else is there. Raises ServerError when
        no server has been up for `give_up_s`.
        """
        while True:
            self._check_hope(give_up_s)
            free = [
                each
                for each in self.servers
                if each.state == "up"
                and each.requests < self._concurrency
                and (not each.requests or each.tokens + tokens <= self._max_tokens)
            ]
            if free:
                server = min(free, key=lambda each: each.tokens)
                server.requests += 1
                server.tokens += tokens
                return server
            self._freed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), _LOOK_S)

    def release(self, server: ExtractServer, tokens: int) -> None:
        """Give a slot back."""
        server.requests -= 1
        server.tokens -= tokens
        self._freed.set()

    def lost(self, server: ExtractServer, error: UnreachableError | ServerError) -> None:
        """This server cannot be reached (it is probed), or is the wrong one (it is dropped)."""
        if server.state != "up":
            return
        server.reason = str(error)
        if isinstance(error, ServerError):
            server.state = "dead"
            self._note(f"{server.name}: given up: {error}")
            self._freed.set()
            return
        server.state = "down"
        server.trusted = False  # what comes back may have been started anew
        self._note(f"{server.name}: waiting for the server: {error}")
        probe = asyncio.create_task(self._probe(server))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def healthy(self, server: ExtractServer) -> bool:
        """Whether the server still answers; it is lost if not."""
        try:
            await server.client.models()
        except (TransientError, PermanentError, ServerError) as error:
            self.lost(server, UnreachableError(str(error)))
            return False
        return True

    async def aclose(self) -> None:
        """Stop probing and close all connections."""
        for probe in list(self._probes):
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for each in self.servers:
            await each.client.aclose()

    async def _probe(self, server: ExtractServer) -> None:
        wait_s = _PROBE_BASE_S
        while server.state == "down":
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _PROBE_MAX_S)
            try:
                server.client.choose(await server.client.models())
            except ServerError as error:
                server.state, server.reason = "dead", f"came back with another model: {error}"
                self._note(f"{server.name}: {server.reason}")
            except (TransientError, PermanentError) as error:
                server.reason = str(error)
            else:
                server.state, server.reason = "up", ""
                self._note(f"{server.name}: the server is back")
                self._freed.set()

    def _check_hope(self, give_up_s: float) -> None:
        if any(each.state == "up" for each in self.servers):
            self._none_since = None
            return
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in self.servers)
        if all(each.state == "dead" for each in self.servers):
            raise ServerError(f"no server can be used any more ({reasons})")
        now = time.monotonic()
        self._none_since = self._none_since or now
        if now - self._none_since >= give_up_s:
            raise ServerError(f"no server has answered for {give_up_s:,.0f} s ({reasons})")
