"""The generate stage: every pending prompt to the target model, every answer into the dataset.

Owns which rows are claimed, what a reply turns a row into, and how the stage ends. Servers are
`pool`'s, requests `client`'s, commits `commit`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from draftmill.builder.budget import Budget, Reservation
from draftmill.builder.commit import BATCH_ROWS, Committer
from draftmill.builder.generation import gates
from draftmill.builder.generation.deadline import ActiveClock, timeout_arithmetic
from draftmill.builder.generation.endpoint import Endpoint
from draftmill.builder.generation.gates import UserGate
from draftmill.builder.generation.pool import Pool
from draftmill.builder.generation.reasoning import ReasoningGuard
from draftmill.builder.generation.refusals import Refusals
from draftmill.builder.generation.room import BYTES_PER_TOKEN
from draftmill.builder.generation.row import RowRunner
from draftmill.builder.generation.servers import endpoints_of, open_servers
from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.generation.story import Story
from draftmill.builder.generation.watch import Watch
from draftmill.builder.progress import OnProgress, StageReport
from draftmill.builder.publish import Publisher
from draftmill.builder.requests.client import PROBE_S
from draftmill.builder.stop import StopSignals, stoppable
from draftmill.manifests.errors import BudgetError, ServerError
from draftmill.manifests.maintenance import RowFilter, retry, select
from draftmill.manifests.types import PendingPrompt, Result
from draftmill.manifests.writer import DatasetWriter

__all__ = ["GenerateSettings", "generate"]

T = TypeVar("T")

PAGE_ROWS = 256
TICK_S = 0.25
SHOW_S = 2.0
NOTE_S = 60.0
LATE = RowFilter(states=("timed_out",), stage="generate")

log = logging.getLogger(__name__)


async def generate(
    writer: DatasetWriter,
    settings: GenerateSettings,
    urls: Sequence[str],
    on_progress: OnProgress | None = None,
    *,
    budget: Budget | None = None,
) -> StageReport:
    """Generates completions until no row is pending, a signal comes or nothing can be done.

    Raises ServerError, SettingsMismatch or ConfigError before the first request when servers and
    settings do not fit. A first SIGINT or SIGTERM keeps what has arrived and what arrives within
    a short grace; a second ends at once. Rows in flight stay pending.
    """
    user_gate = None if settings.gate is None else gates.load_gate(settings.gate)
    stage = _Stage(writer, settings, user_gate, on_progress, budget)
    with stoppable(stage.report) as signals:
        try:
            await stage.run(urls, signals)
        except BudgetError as error:
            stage.report.over_budget, stage.report.stopped = True, str(error)
    return stage.report


class _Stage:
    """One run of the stage. `halt` ends it early; everything put before is still committed."""

    def __init__(
        self,
        writer: DatasetWriter,
        settings: GenerateSettings,
        user_gate: UserGate | None,
        on_progress: OnProgress | None,
        budget: Budget | None,
    ) -> None:
        self.report = StageReport(stage="generate")
        self._writer = writer
        self._settings = settings
        self._budget = budget
        self._pool = Pool()
        self._active = ActiveClock(time.monotonic())
        self._story = Story(
            self.report,
            on_progress,
            in_flight=lambda: self._pool.in_flight,
            budget_bytes=None if budget is None else budget.limit_bytes,
        )
        self._committer = Committer(
            Publisher(
                writer,
                self._story.progress,
                writer.used_bytes if budget is None else lambda: budget.used_bytes,
            ),
            on_committed=self._story.committed,
            on_failed=self._halt,
        )
        self._runner = RowRunner(self._pool, settings, user_gate, self._committer.put)
        self._tasks: set[asyncio.Task[None]] = set()
        self._uncommitted = 0
        self._fewer = asyncio.Event()
        self._halted = asyncio.Event()
        self._error: BaseException | None = None
        self._timeout_noted: dict[str, float] = {}
        self._reasoning = ReasoningGuard(required=settings.reasoning == "required")
        self._refusals = Refusals(settings.stop_after_bad)

    async def run(self, urls: Sequence[str], signals: StopSignals) -> None:
        async with AsyncExitStack() as stack:
            opening = open_servers(urls, self._settings.model, PROBE_S)
            servers = await _first(asyncio.create_task(opening), signals.requested)
            if servers is None:
                self.report.interrupted = True
                return
            endpoints = endpoints_of(
                servers,
                self._settings,
                self._active,
                log=self._story.decided,
                changed=self._pool.changed,
            )
            for endpoint in endpoints:
                stack.push_async_callback(endpoint.aclose)
            await stack.enter_async_context(self._committer)
            await self._committer.call(
                self._writer.check_fingerprint,
                "generate",
                self._settings.fingerprint(servers.model, servers.probe),
                growable=("max_completion_tokens",),
                meaning={"probe_prompt": "what the chat template and tokenizer make of a probe"},
            )
            self._story.progress.total = await self._committer.call(self._writer.count, "pending")
            if await self._committer.call(self._writer.count, "pending", off_policy=True):
                self._runner.after_turn = await servers.after_turn()
            watches = [
                Watch(each, each.patience, self._active, self._story.decided) for each in endpoints
            ]
            await asyncio.gather(*(each.read() for each in watches))
            self._pool.add(endpoints)
            self._refusals.watch(endpoints)
            background = [
                asyncio.create_task(self._guarded(each))
                for each in (self._tick(), self._obey(signals), *(each.run() for each in watches))
            ]
            try:
                await self._passes()
            finally:
                for task in (*background, *self._tasks):
                    task.cancel()
                await asyncio.gather(*background, *self._tasks, return_exceptions=True)
            if self._error is not None:
                raise self._error
            if self.report.stopped is None:
                await self._release(self._refusals.release())
            await self._committer.flush()
            await self._flush_decisions()

    # -- claiming --------------------------------------------------------------------------------

    async def _passes(self) -> None:
        for number in range(1 + self._settings.timeout_passes):
            if number > 0:
                late = await self._committer.call(select, self._writer, LATE)
                if not late:
                    return
                await self._committer.call(retry, self._writer, late)
                self._story.asked_again(len(late))
                log.info("asking %d timed-out prompts again, with longer deadlines", len(late))
            await _first(asyncio.create_task(self._dispatch(2.0**number)), self._halted)
            if self._halted.is_set():
                grace_s = self._settings.stop_grace_s if self._error is None else 0.0
                if self._tasks and grace_s:
                    await asyncio.wait(self._tasks, timeout=grace_s)
                return

    async def _dispatch(self, patience: float) -> None:
        """Starts a task for every pending row, in id order, as servers have room; waits for all.

        The cursor is all that is remembered: what is in flight is pending for the next run.
        """
        spared = True
        while spared:
            cursor = 0
            while page := await self._committer.call(self._writer.pending, cursor, PAGE_ROWS):
                for row in page:
                    await self._start(row, patience)
                cursor = page[-1].id
            while self._tasks:
                await asyncio.wait(self._tasks)
            self._refusals.judge(all_asked=True)
            spared = self._refusals.spared()
            await self._release([*self._reasoning.release(), *self._refusals.release()])
            await self._committer.flush()

    async def _start(self, row: PendingPrompt, patience: float) -> None:
        while self._uncommitted >= self._pool.limit + BATCH_ROWS:
            self._fewer.clear()
            await self._fewer.wait()
        room = None
        if self._budget is not None:
            most = self._runner.most_bytes(row)
            room = await self._budget.reserve(
                f"generate-{row.id}", stored_bytes=most, on_wait=self._committer.kick
            )
        tokens = self._runner.tokens(row)
        try:
            endpoint = await self._pool.acquire(tokens)
        except asyncio.CancelledError:
            if room is not None:
                room.release()
            raise
        self._uncommitted += 1
        task = asyncio.create_task(self._row(row, endpoint, tokens, patience, room))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _row(
        self,
        row: PendingPrompt,
        endpoint: Endpoint,
        tokens: int,
        patience: float,
        room: Reservation | None,
    ) -> None:
        try:
            result = await self._runner.run(row, endpoint, tokens, patience)
            if self._reasoning.takes(result) or self._refusals.takes(result):
                self._uncommitted -= 1
                self._fewer.set()
                if room is not None:
                    room.release()  # such a result has no record
                if self._reasoning.missing is not None:
                    self._halt(ServerError(self._reasoning.missing))
                return
            await self._put(result, room)
            await self._release(self._refusals.answered(result))
            if self._reasoning.seen:
                await self._release(self._reasoning.release())
        except Exception as error:
            self._halt(error)

    async def _put(self, result: Result, room: Reservation | None) -> None:
        def committed() -> None:
            self._uncommitted -= 1
            self._fewer.set()
            if room is not None:
                attempt = result.attempt
                tokens = (attempt.prompt_tokens or 0) + (attempt.completion_tokens or 0)
                room.stored(BYTES_PER_TOKEN * tokens)
                room.release()

        await self._committer.put(result, then=committed)

    async def _release(self, held: Sequence[Result]) -> None:
        for result in held:
            self._uncommitted += 1
            await self._put(result, None)

    # -- watching --------------------------------------------------------------------------------

    def _halt(self, error: BaseException | None = None, reason: str | None = None) -> None:
        if self._halted.is_set():
            return
        self._error, self.report.stopped = error, reason
        self._halted.set()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A clock or a watch that fails ends the run, which without it would wait for ever."""
        try:
            await work
        except Exception as error:
            self._halt(error)

    async def _obey(self, signals: StopSignals) -> None:
        await signals.requested.wait()
        self.report.interrupted = True
        self._halt()

    async def _tick(self) -> None:
        shown_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            step = self._active.tick(time.monotonic())
            for endpoint in self._pool.endpoints:
                endpoint.tick(step)
            self._refusals.judge()
            if (reason := self._pool.hopeless(self._settings.give_up_s)) is not None:
                self._halt(reason=reason)
            if self._active.seconds - shown_s >= SHOW_S:
                shown_s = self._active.seconds
                self._check_timeout()
                self._story.show()
                await self._flush_decisions()

    def _check_timeout(self) -> None:
        timeout_s = self._settings.timeout_s
        for each in self._pool.endpoints if timeout_s is not None else ():
            assert timeout_s is not None
            sums = timeout_arithmetic(
                timeout_s,
                each.taken,
                self._settings.max_completion_tokens,
                each.pace,
                self._settings.deadline_margin,
            )
            noted = self._timeout_noted.get(each.name, float("-inf"))
            if sums is not None and self._active.seconds - noted > NOTE_S:
                self._timeout_noted[each.name] = self._active.seconds
                self._story.decided(each, sums)

    async def _flush_decisions(self) -> None:
        rows, self._story.decisions = self._story.decisions, []
        if rows:
            await self._committer.call(self._writer.control, rows)


async def _first(work: asyncio.Task[T], stop: asyncio.Event) -> T | None:
    """The result of `work`; when `stop` comes first, None, and `work` is cancelled."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return None
    finally:
        stopping.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))  # a cancellation of ours must not be taken for its own
