"""The extract stage: hidden states of every generated sample, checked and stored within the budget.

Owns which samples are claimed and how the stage ends. One sample's way is `extract_sample`'s,
commits are `commit`'s, room is `budget`'s, staged files are `staging`'s.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from draftmill.builder.budget import Budget
from draftmill.builder.commit import Committer
from draftmill.builder.extraction.bad_servers import BAD, BadServers
from draftmill.builder.extraction.canary import Canary
from draftmill.builder.extraction.intake import Layers
from draftmill.builder.extraction.leftovers import Leftovers
from draftmill.builder.extraction.precision import MeasuringPublisher, Precision
from draftmill.builder.extraction.sample import SampleRunner
from draftmill.builder.extraction.servers import ExtractServers
from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.builder.extraction.staging import Staging
from draftmill.builder.extraction.watch import CanaryWatch
from draftmill.builder.progress import OnProgress, Progress, RateMeter, StageReport
from draftmill.builder.requests.client import TargetClient
from draftmill.builder.stop import StopSignals, stoppable
from draftmill.manifests.codec_error import ErrorSums
from draftmill.manifests.errors import BudgetError, ServerError
from draftmill.manifests.layout import Layout
from draftmill.manifests.target.target import TargetModel
from draftmill.manifests.types import GeneratedSample, Result, State

__all__ = ["ExtractSettings", "ExtractWriter", "Layers", "extract"]

log = logging.getLogger(__name__)

PAGE_ROWS = 64
SHOW_S = 2.0
# How long files of requests that were given up at the end are waited for.
LAST_SWEEP_S = 3.0


class ExtractWriter(Protocol):
    """The part of a dataset writer that this stage uses, from the committer's thread."""

    dataset: Layout

    def generated(self, after_id: int, limit: int) -> list[GeneratedSample]: ...
    def count(self, state: State) -> int: ...
    def commit(self, results: Sequence[Result]) -> None: ...
    def publish(self, *, running: Mapping[str, Any] | None = None) -> None: ...
    def check_fingerprint(self, stage: str, values: Mapping[str, Any]) -> None: ...
    def add_codec_error(self, codec: str, found: ErrorSums) -> None: ...


async def extract(
    writer: ExtractWriter,
    settings: ExtractSettings,
    urls: Sequence[str],
    *,
    model: str | None,
    layers: Layers,
    staging: Path,
    budget: Budget,
    on_progress: OnProgress | None = None,
    target: TargetModel | None = None,
    say: Callable[[str], None] | None = None,
) -> StageReport:
    """Extracts until no row is `generated`, the budget is full, a signal comes or nothing helps.

    `layers` are those that the server was started with. With the weights of `target` the canary
    compares and a lossy codec is measured; `say` gets the canary's findings and the servers that
    are given up. Raises ServerError,
    SettingsMismatch or ConfigError before the first request when servers, settings, weights or the
    staging folder do not fit. A first SIGINT or SIGTERM keeps what arrives within a short grace,
    a second ends at once. Rows in flight stay `generated`.
    """
    say = say or log.warning
    canary = Canary(target, layers, settings, say)
    precision = Precision(settings.codec, layers.layer_ids, target)
    stage = _Stage(writer, settings, canary, budget, on_progress, precision, say)
    with stoppable(stage.report) as signals:
        await stage.run(urls, model, staging, signals)
    return stage.report


class _Stage:
    def __init__(
        self,
        writer: ExtractWriter,
        settings: ExtractSettings,
        canary: Canary,
        budget: Budget,
        on_progress: OnProgress | None,
        precision: Precision,
        say: Callable[[str], None],
    ) -> None:
        self.report = StageReport(stage="extract")
        self._writer = writer
        self._settings = settings
        self._canary, self._layers = canary, canary.layers
        self._budget = budget
        self._on_progress = on_progress
        self._precision = precision
        self._progress = Progress(stage="extract", budget_bytes=budget.limit_bytes)
        publisher = MeasuringPublisher(writer, self._progress, budget, precision)
        self._committer = Committer(publisher, on_committed=self._committed, on_failed=self._failed)
        self._jobs: set[asyncio.Task[None]] = set()
        self._halted = asyncio.Event()
        self._error: BaseException | None = None
        self._rates = RateMeter()
        self._say = say
        if budget.staging_limit_bytes is None:
            budget.staging_limit_bytes = settings.staging_bytes

    async def run(
        self, urls: Sequence[str], model: str | None, folder: Path, signals: StopSignals
    ) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            staging = Staging(folder, self._writer.dataset.path)
            stack.callback(staging.close)
            servers = ExtractServers(
                [TargetClient(url, model=model) for url in dict.fromkeys(urls)],
                concurrency=settings.concurrency,
                max_tokens=settings.max_in_flight_tokens,
                timeout_s=settings.request_timeout_s,
                note=self._note,
            )
            stack.push_async_callback(servers.aclose)
            self._bad = BadServers(servers, settings.stop_after_bad, self._say)
            served = await servers.connect()
            num_threads = settings.encode_threads or min(8, os.cpu_count() or 1)
            threads = ThreadPoolExecutor(num_threads, thread_name_prefix="draftmill-encode")
            stack.callback(threads.shutdown)
            leftovers = Leftovers(
                staging, max_age_s=settings.orphan_age_s, forget_s=settings.lock_timeout_s
            )
            # What a run that died has left is nobody's; it must not count against this one.
            leftovers.sweep()
            watch = CanaryWatch(
                self._canary,
                settings=settings,
                staging=staging,
                leftovers=leftovers,
                budget=self._budget,
                on_wait=self._committer.kick,
                halt=self._halt,
                failed=self._failed,
                note=self._note,
            )
            runner = SampleRunner(
                servers=servers,
                staging=staging,
                leftovers=leftovers,
                budget=self._budget,
                layers=self._layers,
                settings=settings,
                threads=threads,
                num_threads=num_threads,
                deliver=self._deliver,
                before_sample=watch.before_sample,
                on_wait=self._committer.kick,
                precision=self._precision,
            )
            try:
                await self._commit_all(runner, served, signals)
                if self.report.stopped is None and not self.report.interrupted:
                    await watch.finish()
            except BudgetError as error:
                self._failed(error)
            finally:
                # Whatever ended it; a second signal alone does not wait.
                await watch.aclose()
                await leftovers.finish(0.0 if signals.forced else LAST_SWEEP_S)

    async def _commit_all(self, runner: SampleRunner, served: str, signals: StopSignals) -> None:
        async with self._committer:
            layers = self._layers
            settings = self._settings.fingerprint(served, layers.layer_ids, layers.hidden_size)
            await self._committer.call(self._writer.check_fingerprint, "extract", settings)
            self._progress.total = await self._committer.call(self._writer.count, "generated")
            background = [
                asyncio.create_task(self._guarded(runner.leftovers.watch())),
                asyncio.create_task(self._guarded(self._tell())),
            ]
            try:
                await self._work(runner, signals)
            finally:
                for task in (*background, *self._jobs):
                    task.cancel()
                await asyncio.gather(*background, *self._jobs, return_exceptions=True)
            if self._error is not None:
                raise self._error
            if self.report.stopped is None:
                await self._put_all(self._bad.release())

    # -- claiming --------------------------------------------------------------------------------

    async def _work(self, runner: SampleRunner, signals: StopSignals) -> None:
        """Until all is done; or until something stops it, and then what is in flight."""
        working = asyncio.create_task(self._dispatch(runner))
        halted = asyncio.create_task(self._halted.wait())
        asked = asyncio.create_task(signals.requested.wait())
        try:
            await asyncio.wait((working, halted, asked), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
                return
            working.cancel()
            if not asked.done() and self.report.over_budget:
                # They have their room already.
                await self._wait_for_jobs((asked,), None)
            if asked.done():
                self.report.interrupted = True
                await self._wait_for_jobs((), self._settings.stop_grace_s)
        finally:
            for task in (working, halted, asked):
                task.cancel()
            await asyncio.gather(working, halted, asked, return_exceptions=True)

    async def _wait_for_jobs(self, until: Collection[Any], timeout_s: float | None) -> None:
        if not self._jobs:
            return
        all_done = asyncio.create_task(asyncio.wait(self._jobs))
        await asyncio.wait(
            (all_done, *until), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        all_done.cancel()

    async def _dispatch(self, runner: SampleRunner) -> None:
        """Starts a job for every generated row, in id order, as slots become free.

        The cursor is all that is remembered: what is in flight is `generated` for the next run.
        Rows of servers that were given up are `generated`, too, and are started once more.
        """
        slots = asyncio.Semaphore(self._settings.concurrency * len(runner.servers.servers))
        spared = True
        while spared:
            cursor = 0
            while page := await self._committer.call(self._writer.generated, cursor, PAGE_ROWS):
                for sample in page:
                    await slots.acquire()
                    job = asyncio.create_task(self._job(runner, sample, slots))
                    self._jobs.add(job)
                    job.add_done_callback(self._jobs.discard)
                cursor = page[-1].id
            while self._jobs:
                await asyncio.wait(self._jobs)
            if spared := self._bad.spared():
                await self._put_all(self._bad.release())
                await self._committer.flush()

    async def _job(
        self, runner: SampleRunner, sample: GeneratedSample, slots: asyncio.Semaphore
    ) -> None:
        try:
            await runner.run(sample)
        except Exception as error:
            self._failed(error)
        finally:
            slots.release()

    async def _guarded(self, background: Awaitable[None]) -> None:
        """What ends unseen would leave a night without its sweeps."""
        try:
            await background
        except Exception as error:
            self._failed(error)

    # -- results ---------------------------------------------------------------------------------

    async def _deliver(
        self, result: Result, payload_bytes: int, then: Callable[[], None] | None
    ) -> None:
        """To the committer; but what is bad is held back until its server sends something good."""
        if self._bad.takes(result):
            return
        if result.attempt.outcome == "extracted":
            await self._put_all(self._bad.answered(result))
        await self._committer.put(result, payload_bytes=payload_bytes, then=then)
        if self._budget.is_awaited:
            self._committer.kick()

    async def _put_all(self, held: Sequence[Result]) -> None:
        for result in held:
            await self._committer.put(result)

    def _halt(self, reason: str) -> None:
        if not self._halted.is_set():
            self.report.stopped = reason
            self._halted.set()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, BudgetError):
            self.report.over_budget = True
            self._budget.refuse(str(error))
        if isinstance(error, BudgetError | ServerError):
            self._halt(str(error))
        else:
            self._error = self._error or error
            self._halted.set()

    # -- telling ---------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        log.info("%s", text)
        self._progress.note = text

    def _committed(self, results: Sequence[Result]) -> None:
        tokens = samples = 0
        for result in results:
            attempt = result.attempt
            self.report.outcomes[attempt.outcome] += 1
            if result.states is not None:
                samples += 1
                tokens += result.states.shape[0]
                self.report.truncated += attempt.finish_reason == "length"
        self.report.tokens += tokens
        self._rates.add(tokens, samples)
        self._show()

    def _show(self) -> None:
        outcomes, progress = self.report.outcomes, self._progress
        progress.timed_out = outcomes["timed_out"]
        progress.failed, progress.rejected = outcomes["failed"], outcomes["rejected"]
        progress.done = outcomes["extracted"] + sum(outcomes[each] for each in BAD)
        progress.in_flight = len(self._jobs)
        progress.tokens = self.report.tokens
        progress.used_bytes = self._budget.used_bytes
        self._rates.show(progress)
        if self._on_progress is not None:
            self._on_progress(progress)

    async def _tell(self) -> None:
        """Shows that something is waited for, when nothing is committed."""
        while True:
            await asyncio.sleep(SHOW_S)
            self._show()
