"""Looking at one server: its load into clock and limit, a standstill into the breaker.

Works with a server's /metrics and, more slowly, without. Asking and cutting requests is left to
`endpoint`, what a reading means for the limit to `controller`.
"""

from __future__ import annotations

import asyncio

from draftmill.builder.generation.controller import Reading
from draftmill.builder.generation.deadline import ActiveClock, Patience
from draftmill.builder.generation.endpoint import Endpoint, Log, Tally
from draftmill.builder.requests.metrics import ServerLoad
from draftmill.manifests.errors import TransientError

KV_SHARE = 0.95


class Watch:
    """Reads a server every `interval_s` while it is up."""

    def __init__(
        self, endpoint: Endpoint, patience: Patience, active: ActiveClock, log: Log
    ) -> None:
        self._endpoint = endpoint
        self._patience = patience
        self._active = active
        self._log = log
        self._read_s = active.seconds
        self._gaps = 0
        self._empty_s: float | None = None

    async def run(self) -> None:
        """Looks for ever."""
        while True:
            await asyncio.sleep(self._patience.interval_s)
            await self.read()

    async def read(self) -> None:
        """One look at the server, if it is up."""
        endpoint = self._endpoint
        if endpoint.state != "up":
            return
        try:
            load = await endpoint.client.metrics()
        except TransientError:
            # no news is no progress: the watchdog decides, and the clock stands still meanwhile
            if endpoint.state == "up":
                endpoint.pace.read(endpoint.load, 0.0, gap=True)
                self._check_progress()
            return
        seconds, self._read_s = self._active.seconds - self._read_s, self._active.seconds
        gap, self._gaps = self._active.gaps != self._gaps, self._active.gaps
        if endpoint.state != "up":
            return
        since, endpoint.since = endpoint.since, Tally(most_taken=endpoint.taken)
        before, endpoint.load = endpoint.load, load
        generated = endpoint.pace.read(load, seconds, gap=gap, ours=since.most_taken)
        prefilled = load.prompt_tokens - before.prompt_tokens if load and before else 0.0
        if generated > 0 or prefilled > 0 or not endpoint.flights:
            endpoint.progress_s = self._active.seconds
        if load is not None and load.kv_tokens and endpoint.max_in_flight_tokens is None:
            endpoint.max_in_flight_tokens = int(KV_SHARE * load.kv_tokens)
        if seconds > 0:
            self._control(load, since, (since.tokens if load is None else generated) / seconds)
        self._check_lost()
        self._check_progress()
        endpoint.changed()

    def _control(self, load: ServerLoad | None, since: Tally, tokens_per_s: float) -> None:
        endpoint = self._endpoint
        if load is None:
            endpoint.pace.tokens_per_s = tokens_per_s
        decision = endpoint.controller.read(
            Reading(
                in_flight=len(endpoint.flights),  # not what is only tokenised, or about to be
                tokens_per_s=tokens_per_s,
                completions=since.completions,
                overloads=since.overloads,
                load=load,
            )
        )
        if decision is not None:
            self._log(endpoint, f"limit {decision.limit}: {decision.reason}")

    def _check_lost(self) -> None:
        """Requests of which an idle server knows nothing: answered into a dead connection."""
        endpoint, now = self._endpoint, self._active.seconds
        if endpoint.load is None or endpoint.load.requests or not endpoint.flights:
            self._empty_s = None
            return
        if self._empty_s is None:
            self._empty_s = now
        for flight in list(endpoint.flights):
            if now - max(self._empty_s, flight.deadline.started_s) >= self._patience.lost_s:
                endpoint.cut(flight, "lost")

    def _check_progress(self) -> None:
        endpoint = self._endpoint
        quiet = self._active.seconds - endpoint.progress_s
        patience = self._patience.watchdog_s
        if not endpoint.pace.has_metrics:
            # without counters only finished requests show progress, and these may be long ones
            longest = max((each.deadline.tokens for each in endpoint.flights), default=0.0)
            patience = max(5 * patience, 2 * longest * (endpoint.pace.seconds_per_token or 0.0))
        if not endpoint.flights or quiet < patience:
            return
        endpoint.progress_s = self._active.seconds
        requests = len(endpoint.flights)
        if endpoint.pace.has_metrics:
            endpoint.go_down(
                f"no token generated for {quiet:,.0f} s with {requests} requests there", cut=True
            )
        else:
            endpoint.go_down(f"none of {requests} requests finished for {quiet:,.0f} s")
