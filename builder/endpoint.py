"""One server under load: its limit, its pace, its requests in flight, and whether it is there.

Owns breaker and watchdog of the server. Which row goes where is left to `pool`, how often a row is
tried to the retry policy, the sums behind deadlines and limits to `deadline` and `controller`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from draftmill.builder.client import ServedModel, TargetClient
from draftmill.builder.controller import Controller, Reading
from draftmill.builder.deadline import ActiveClock, Deadline, DeadlineRule, PaceClock
from draftmill.builder.failures import ConnectionCutError, OverloadedError, ServerFailedError
from draftmill.builder.metrics import ServerLoad
from draftmill.manifests.errors import (
    PermanentError,
    RequestError,
    ServerError,
    TimedOutError,
    TransientError,
    UnreachableError,
)
from draftmill.manifests.types import Completion

OUTCOMES = 20
BAD_SHARE = 0.8
RECOVERY_BASE_S = 0.5
RECOVERY_MAX_S = 30.0
MOVE_AFTER_S = 60.0
HEALTH_FRESH_S = 1.0

Log = Callable[["Endpoint", str], None]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a server may show no progress, and how often it is looked at."""

    interval_s: float = 2.0
    watchdog_s: float = 120.0
    probe_s: float = 120.0
    lost_s: float = 60.0


@dataclass(slots=True, eq=False)
class Flight:
    """A request on the server. `cut` says why the endpoint ended it."""

    deadline: Deadline
    timeout: asyncio.Timeout
    cut: str | None = None


class Endpoint:
    """A server that requests go to. `state`: up, down (being probed), dead (will not be used)."""

    def __init__(
        self,
        client: TargetClient,
        controller: Controller,
        rule: DeadlineRule,
        patience: Patience,
        active: ActiveClock,
        *,
        probe_ids: list[int] | None,
        log: Log,
        changed: Callable[[], None],
    ) -> None:
        self.client = client
        self.name = client.url
        self.controller = controller
        self.rule = rule
        self.pace = PaceClock()
        self.load: ServerLoad | None = None
        self.state = "up"
        self.reason = ""
        self.taken = 0  # requests, and tokens they may take, that `pool` sent or will send
        self.taken_tokens = 0
        self.max_in_flight_tokens: int | None = None
        self.flights: set[Flight] = set()
        self._patience = patience
        self._active = active
        self._probe_ids = probe_ids
        self._log = log
        self._changed = changed
        self._paused_until = 0.0
        self._outcomes: deque[bool] = deque(maxlen=OUTCOMES)
        self._overloads = 0
        self._completions = 0
        self._completed_tokens = 0
        self._progress_s = 0.0
        self._read_s = 0.0
        self._gaps = 0
        self._most_taken = 0
        self._empty_s: float | None = None
        self._health: asyncio.Task[bool] | None = None
        self._health_at = 0.0
        self._recovery: asyncio.Task[None] | None = None

    # -- room ------------------------------------------------------------------------------------

    def room(self, tokens: int) -> float:
        """Free share of the limit, 0 when nothing may be sent now. Something always fits an
        idle server, however many tokens it may take."""
        if self.state != "up" or self.taken >= self.controller.limit:
            return 0.0
        if self._paused_until and time.monotonic() < self._paused_until:
            return 0.0
        most = self.max_in_flight_tokens
        if most is not None and self.taken and self.taken_tokens + tokens > most:
            return 0.0
        return 1.0 - self.taken / self.controller.limit

    @property
    def context_limit(self) -> int | None:
        """Tokens of prompt and completion that one request can have; None if unknown."""
        kv_tokens = None if self.load is None else self.load.kv_tokens_of_one
        limits = [each for each in (self.client.max_model_len, kv_tokens) if each is not None]
        return min(limits, default=None)

    def take(self, tokens: int) -> None:
        """Counts a request that will be sent; `give_back` when it is over."""
        self.taken += 1
        self.taken_tokens += tokens
        self._most_taken = max(self._most_taken, self.taken)

    def give_back(self, tokens: int) -> None:
        """The request is over."""
        self.taken -= 1
        self.taken_tokens -= tokens

    # -- requests --------------------------------------------------------------------------------

    async def ask(
        self,
        conversation: str,
        sampling: Mapping[str, Any],
        max_tokens: int,
        patience: float,
    ) -> tuple[Completion, float | None]:
        """One completion and the seconds that the arithmetic allowed for it.

        `patience` multiplies the deadline. Raises RequestError kinds; UnreachableError means that
        the request cost nothing and may go elsewhere.
        """
        tokens = self.rule.tokens(max_tokens, self.load) * patience
        deadline = Deadline(
            started_s=self._active.seconds,
            started_tokens=self.pace.tokens,
            tokens=tokens,
            floor_s=self.rule.floor_s * patience,
        )
        flight = Flight(deadline, asyncio.timeout(None))
        self.flights.add(flight)
        try:
            async with flight.timeout:
                completion = await self.client.chat(
                    conversation, sampling=sampling, max_tokens=max_tokens
                )
        except TimeoutError:
            raise self._cut_error(flight) from None
        except TransientError as error:
            await self._failed(error)
            raise
        except ServerError as error:
            self.go_down(str(error))
            raise UnreachableError(str(error)) from error
        except PermanentError:
            self._outcomes.append(True)  # the server works; the request is wrong
            raise
        finally:
            self.flights.discard(flight)
        self._succeeded(flight, len(completion.completion_token_ids))
        return completion, deadline.seconds(self.pace)

    def _succeeded(self, flight: Flight, tokens: int) -> None:
        self._outcomes.append(True)
        self._completions += 1
        self._completed_tokens += tokens
        self._progress_s = self._active.seconds
        self.pace.completed(tokens, self._active.seconds - flight.deadline.started_s)

    def _cut_error(self, flight: Flight) -> RequestError:
        elapsed = self._active.seconds - flight.deadline.started_s
        if flight.cut == "deadline":
            allowed = flight.deadline.seconds(self.pace)
            pace = self.pace.seconds_per_token
            sums = (
                "no speed could be measured"
                if pace is None or allowed is None
                else f"{flight.deadline.tokens:,.0f} tokens at {pace:.3g} s each, at least "
                f"{flight.deadline.floor_s:g} s"
            )
            return TimedOutError(f"no answer after {elapsed:,.1f} s ({sums})")
        if flight.cut == "lost":
            return ConnectionCutError("the server has no request running, this one was lost")
        return UnreachableError(f"{self.name}: {flight.cut or self.reason}")

    async def _failed(self, error: TransientError) -> None:
        """Draws the conclusions of one failure; raises UnreachableError if the server is gone."""
        if isinstance(error, UnreachableError):
            self.go_down(str(error))
            return
        if isinstance(error, OverloadedError):
            self._overloads += 1
            if error.retry_after_s:
                self.pause(error.retry_after_s)
            return
        self._outcomes.append(False)
        if isinstance(error, ConnectionCutError | ServerFailedError) and not await self._healthy():
            self.go_down(str(error))
            raise UnreachableError(str(error)) from error
        bad = self._outcomes.count(False)
        if len(self._outcomes) == OUTCOMES and bad >= BAD_SHARE * OUTCOMES:
            self.go_down(f"{bad} of the last {OUTCOMES} requests failed, at last: {error}")

    def pause(self, seconds: float) -> None:
        """Sends nothing for some seconds, as the server asked."""
        self._paused_until = max(self._paused_until, time.monotonic() + seconds)
        asyncio.get_running_loop().call_later(seconds, self._changed)

    async def _healthy(self) -> bool:
        """Whether the server is alive; one question at a time for all requests that wonder."""
        fresh = time.monotonic() - self._health_at < HEALTH_FRESH_S
        if self._health is None or (self._health.done() and not fresh):
            self._health_at = time.monotonic()
            self._health = asyncio.create_task(self.client.healthy())
        return await asyncio.shield(self._health)

    # -- looking at the server -------------------------------------------------------------------

    async def watch(self) -> None:
        """Reads the server's load for ever: moves its clock and its limit, notices a standstill."""
        while True:
            await asyncio.sleep(self._patience.interval_s)
            if self.state == "up":
                await self.read()

    async def read(self) -> None:
        """One reading of the server."""
        answered = True
        load = None
        try:
            load = await self.client.metrics()
        except TransientError:
            answered = False
        seconds = self._active.seconds - self._read_s
        self._read_s = self._active.seconds
        if self.state != "up":
            return
        if not answered:
            # no news is no progress: the watchdog decides, and the clock stands still meanwhile
            self.pace.read(self.load, 0.0, gap=True)
            self._check_progress()
            return
        before = self.load
        self.load = load
        gap, self._gaps = self._active.gaps != self._gaps, self._active.gaps
        generated = self.pace.read(load, seconds, gap=gap, ours=self._most_taken)
        self._most_taken = self.taken
        prefilled = load.prompt_tokens - before.prompt_tokens if load and before else 0.0
        idle = not self.flights
        if generated > 0 or prefilled > 0 or idle:
            self._progress_s = self._active.seconds
        if load is not None and load.kv_tokens and self.max_in_flight_tokens is None:
            self.max_in_flight_tokens = int(0.95 * load.kv_tokens)
        rate = self._completed_tokens / seconds if seconds > 0 else 0.0
        if load is None:
            self.pace.tokens_per_s = rate
        elif seconds > 0:
            rate = generated / seconds
        if seconds > 0:
            decision = self.controller.read(
                Reading(
                    in_flight=self.taken,
                    tokens_per_s=rate,
                    completions=self._completions,
                    overloads=self._overloads,
                    load=load,
                )
            )
            self._completions = self._completed_tokens = self._overloads = 0
            if decision is not None:
                self._log(self, f"limit {decision.limit}: {decision.reason}")
        self._check_lost()
        self._check_progress()
        self._changed()

    def _check_lost(self) -> None:
        """Requests of which an idle server knows nothing: answered into a dead connection."""
        now = self._active.seconds
        if self.load is None or self.load.requests or not self.flights:
            self._empty_s = None
            return
        if self._empty_s is None:
            self._empty_s = now
        for flight in list(self.flights):
            if now - max(self._empty_s, flight.deadline.started_s) >= self._patience.lost_s:
                self._cut(flight, "lost")

    def _check_progress(self) -> None:
        quiet = self._active.seconds - self._progress_s
        patience = self._patience.watchdog_s
        if not self.pace.has_metrics:
            # without counters only finished requests show progress, and these may be long ones
            longest = max((each.deadline.tokens for each in self.flights), default=0.0)
            patience = max(5 * patience, 2 * longest * (self.pace.seconds_per_token or 0.0))
        if not self.flights or quiet < patience:
            return
        self._progress_s = self._active.seconds
        if self.pace.has_metrics:
            self.go_down(
                f"no token generated for {quiet:,.0f} s with {len(self.flights)} requests there",
                cut=True,
            )
        else:
            self.go_down(f"no request finished for {quiet:,.0f} s")

    def tick(self, seconds: float) -> int:
        """So many active seconds passed: ends requests that are late; returns how many."""
        if self.state != "up":
            return 0  # nobody is late while the server is away; `_recover` moves its requests
        self.pace.elapse(seconds)
        late = [
            flight
            for flight in self.flights
            if flight.cut is None
            and flight.deadline.passed(self.pace, self._active.seconds, self.rule)
        ]
        for flight in late:
            self._cut(flight, "deadline")
        return len(late)

    def _cut(self, flight: Flight, why: str) -> None:
        flight.cut = why
        with suppress(RuntimeError):  # it ended in this very moment
            flight.timeout.reschedule(asyncio.get_running_loop().time())

    # -- away and back ---------------------------------------------------------------------------

    def go_down(self, reason: str, *, cut: bool = False) -> None:
        """Sends nothing until the server has answered a probe; `cut` takes its requests back."""
        if cut:
            for flight in list(self.flights):
                self._cut(flight, reason)
        if self.state != "up":
            return
        self.state, self.reason = "down", reason
        self._outcomes.clear()
        self._log(self, f"waiting for the server: {reason}")
        self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        since = self._active.seconds
        tries = 0
        while self.state == "down":
            wait_s = min(RECOVERY_MAX_S, RECOVERY_BASE_S * 2.0**tries)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            tries += 1
            try:
                models = await self.client.models()
                if (wrong := self._wrong_model(models)) is not None:
                    self.die(f"came back with another model: {wrong}")
                    return
                ids = await self.client.probe_token_ids(self._patience.probe_s)
            except (RequestError, ServerError) as error:
                self.reason = str(error)
                if self._active.seconds - since > MOVE_AFTER_S:
                    for flight in list(self.flights):
                        self._cut(flight, self.reason)
                continue
            if self._probe_ids is not None and ids != self._probe_ids:
                self.die("came back with another chat template or tokenizer")
                return
            self.state, self.reason = "up", ""
            self._progress_s = self._read_s = self._active.seconds
            self.pace.read(self.load, 0.0, gap=True)
            self.controller.restart()
            self._log(self, f"server is back, limit {self.controller.limit}")
        self._changed()

    def _wrong_model(self, models: Sequence[ServedModel]) -> ServerError | None:
        try:
            self.client.choose(models)
        except ServerError as error:
            return error
        return None

    def die(self, reason: str) -> None:
        """Never used again in this run; its requests go elsewhere."""
        self.state, self.reason = "dead", reason
        self._log(self, f"given up: {reason}")
        for flight in list(self.flights):
            self._cut(flight, reason)
        self._changed()

    async def aclose(self) -> None:
        """Stops probing and closes the connections; requests in flight are aborted."""
        tasks = [each for each in (self._recovery, self._health) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.aclose()
