"""One server under load: its limit, its pace, its requests in flight, and whether it is there.

Owns the server's breaker and the end of requests that are late. Looking at the server is left to
`watch`, which row goes where to `pool`, the sums behind deadlines and limits to `deadline` and
`controller`.
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

from draftmill.builder.generation.controller import Controller
from draftmill.builder.generation.deadline import (
    ActiveClock,
    Deadline,
    DeadlineRule,
    PaceClock,
    Patience,
)
from draftmill.builder.requests.client import ServedModel, TargetClient
from draftmill.builder.requests.failures import (
    ConnectionCutError,
    OverloadedError,
    ServerFailedError,
)
from draftmill.builder.requests.metrics import ServerLoad
from draftmill.builder.requests.prefill import given_completion
from draftmill.manifests.errors import (
    DraftmillError,
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
HEALTH_FRESH_S = 0.2
TOKENIZERS = 16  # a server tokenises on few threads; more calls at once only wait there

Log = Callable[["Endpoint", str], None]


@dataclass(slots=True, eq=False)
class Flight:
    """A request on the server. `cut` says why the endpoint ended it."""

    deadline: Deadline
    timeout: asyncio.Timeout
    cut: str | None = None


@dataclass(slots=True)
class Tally:
    """What happened since the last reading of the server."""

    completions: int = 0
    tokens: int = 0
    overloads: int = 0
    most_taken: int = 0


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
        self.suspect = False  # refuses everything, or so it seems: `refusals`
        self.progress_s = active.seconds  # when something last showed that the server works
        self.taken = 0  # requests, and tokens they may take, that `pool` sent or will send
        self.taken_tokens = 0
        self._tokenizers = asyncio.Semaphore(TOKENIZERS)
        self.max_in_flight_tokens: int | None = None
        self.flights: set[Flight] = set()
        self.since = Tally()
        self.patience = patience
        self._active = active
        self._probe_ids = probe_ids
        self._log = log
        self.changed = changed
        self._paused_until = 0.0
        self._outcomes: deque[bool] = deque(maxlen=OUTCOMES)
        self._health: asyncio.Task[bool] | None = None
        self._health_at = 0.0
        self._recovery: asyncio.Task[None] | None = None

    # -- room ------------------------------------------------------------------------------------

    def room(self, tokens: int) -> float:
        """Free share of the limit, 0 when nothing may be sent now. Something always fits an
        idle server, however many tokens it may take."""
        if self.state != "up" or self.suspect or self.taken >= self.controller.limit:
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
        self.since.most_taken = max(self.since.most_taken, self.taken)

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

    async def tokenized(self, conversation: str, after: Sequence[int]) -> Completion:
        """The last message of a conversation as this server tokenises it; nothing is generated.

        Short calls with a time limit of their own: deadlines and the watchdog do not see them.
        """
        try:
            async with self._tokenizers:
                completion = await given_completion(conversation, self.client, after)
        except TransientError as error:
            await self._failed(error)
            raise
        self._outcomes.append(True)
        return completion

    def _succeeded(self, flight: Flight, tokens: int) -> None:
        self._outcomes.append(True)
        self.since.completions += 1
        self.since.tokens += tokens
        self.progress_s = self._active.seconds
        self.pace.completed(tokens, self._active.seconds - flight.deadline.started_s)

    def _cut_error(self, flight: Flight) -> RequestError:
        elapsed = self._active.seconds - flight.deadline.started_s
        if flight.cut == "deadline":
            sums = flight.deadline.sums(self.pace)
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
            self.since.overloads += 1
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
        now = time.monotonic()
        longer_s = now + seconds - max(now, self._paused_until)
        self._paused_until = max(self._paused_until, now + seconds)
        if longer_s >= self.patience.interval_s:  # shorter ones no reading would show
            self._log(self, f"nothing is sent for {seconds:,.0f} s: the server asks for patience")
        asyncio.get_running_loop().call_later(seconds, self.changed)

    async def _healthy(self) -> bool:
        """Whether the server is alive; one question at a time for all requests that wonder."""
        fresh = time.monotonic() - self._health_at < HEALTH_FRESH_S
        if self._health is None or (self._health.done() and not fresh):
            self._health_at = time.monotonic()
            self._health = asyncio.create_task(self.client.healthy())
        return await asyncio.shield(self._health)

    # -- late and lost ---------------------------------------------------------------------------

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
            self.cut(flight, "deadline")
        return len(late)

    def cut(self, flight: Flight, why: str) -> None:
        """Ends a request; `why` decides what that means for its row."""
        flight.cut = why
        with suppress(RuntimeError):  # it ended in this very moment
            flight.timeout.reschedule(asyncio.get_running_loop().time())

    # -- away and back ---------------------------------------------------------------------------

    def go_down(self, reason: str, *, cut: bool = False) -> None:
        """Sends nothing until the server has answered a probe; `cut` takes its requests back."""
        if cut:
            for flight in list(self.flights):
                self.cut(flight, reason)
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
                ids = await self.client.probe_token_ids(self.patience.probe_s)
            except DraftmillError as error:
                self.reason = str(error)
                if self._active.seconds - since > MOVE_AFTER_S:
                    for flight in list(self.flights):
                        self.cut(flight, self.reason)
                continue
            if self._probe_ids is not None and ids != self._probe_ids:
                self.die("came back with another chat template or tokenizer")
                return
            self.state, self.reason = "up", ""
            self.progress_s = self._active.seconds
            self.pace.read(self.load, 0.0, gap=True)
            self.controller.restart()
            self._log(self, f"server is back, limit {self.controller.limit}")
        self.changed()

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
            self.cut(flight, reason)
        self.changed()

    async def aclose(self) -> None:
        """Stops probing and closes the connections; requests in flight are aborted."""
        tasks = [each for each in (self._recovery, self._health) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.aclose()
