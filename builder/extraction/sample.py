"""One sample's way through extraction: its tries, the room it takes, and what it becomes.

Which samples there are and when the stage ends is left to `extract`; servers to `extract_servers`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import replace

from draftmill.builder.budget import Budget, Reservation
from draftmill.builder.extraction.intake import Layers, LengthMismatchError, Rooms, take_in
from draftmill.builder.extraction.leftovers import Leftovers
from draftmill.builder.extraction.precision import Precision
from draftmill.builder.extraction.servers import ExtractServer, ExtractServers
from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.builder.extraction.staging import LockHeldError, Staging
from draftmill.builder.requests.failures import (
    ConnectionCutError,
    OverloadedError,
    ServerFailedError,
)
from draftmill.builder.requests.retry_policy import RetryBudget, RetryPolicy, retried
from draftmill.builder.requests.tries import Tries
from draftmill.manifests.codec.names import BLOCK_TOKENS, worst_case_bytes
from draftmill.manifests.errors import (
    PermanentError,
    RejectedError,
    RequestError,
    ServerError,
    TimedOutError,
    TransientError,
    UnreachableError,
    WrongStatesError,
)
from draftmill.manifests.types import (
    Attempt,
    GeneratedSample,
    Outcome,
    Result,
    StatesPayload,
    TokenIds,
)

# Header of a record, and one entry of it for each block.
_RECORD_BYTES = 4096
_BLOCK_ENTRY_BYTES = 256
# Header, lock and the file system's pages of one staged file.
STAGED_BYTES = 64 << 10

Deliver = Callable[[Result, int, Callable[[], None] | None], Awaitable[None]]
BeforeSample = Callable[[ExtractServer, TokenIds], Awaitable[None]]


class SampleRunner:
    """Takes samples to their results, which `deliver` gets with the size of their payload and what
    is to be done once they are committed. It also gets the history of failed tries.
    """

    def __init__(
        self,
        *,
        servers: ExtractServers,
        staging: Staging,
        leftovers: Leftovers,
        budget: Budget,
        layers: Layers,
        settings: ExtractSettings,
        threads: Executor,
        num_threads: int,
        deliver: Deliver,
        before_sample: BeforeSample,
        on_wait: Callable[[], None],
        precision: Precision | None = None,
    ) -> None:
        self.servers = servers
        self.staging = staging
        self.leftovers = leftovers
        self.budget = budget
        self.layers = layers
        self.settings = settings
        self.threads = threads
        self.deliver = deliver
        self.on_wait = on_wait
        self.before_sample = before_sample
        self.numbers = itertools.count(1)
        self.rooms = Rooms()
        self.precision = precision
        # Also held while a payload waits to be committed: so few are in memory.
        self.encoding = asyncio.Semaphore(num_threads + 1)
        self.retries = RetryBudget()
        self.policy = RetryPolicy(
            tries=settings.tries,
            tries_by_kind={OverloadedError: 50, TimedOutError: 2, LengthMismatchError: 2},
            base_s=settings.retry_base_s,
            max_s=settings.retry_max_s,
        )

    async def run(self, sample: GeneratedSample) -> None:
        """Extract one sample and deliver what it became.

        Raises BudgetError and ServerError, which are about the run and not about the sample.
        """
        await _Sample(self, sample).run()


class _Sample:
    def __init__(self, runner: SampleRunner, sample: GeneratedSample) -> None:
        self.runner = runner
        self.sample = sample
        token_ids = sample.completion.token_ids
        self.length = len(token_ids)
        self.ids: TokenIds = token_ids[: runner.settings.max_seq_len]
        if len(self.ids) == runner.servers.max_model_len:
            # A sample that fills the context, and a server generates at least one token.
            self.ids = self.ids[:-1]
        self.patience = 1.0
        self.tries = Tries()

    async def run(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            await self.runner.deliver(refusal, 0, None)
            return
        try:
            await retried(self._once, self.runner.policy, self._before_wait)
        except RejectedError as error:
            result = self._result("rejected", "bad_states", str(error))
        except TimedOutError as error:
            result = self._failed("timed_out", error)
        except (TransientError, PermanentError) as error:
            result = self._failed("failed", error)
        else:
            return
        await self.runner.deliver(result, 0, None)

    def _refusal(self) -> Result | None:
        """Why this sample is not sent at all."""
        limit = self.runner.settings.max_seq_len
        prompt_tokens = len(self.sample.completion.prompt_token_ids)
        if prompt_tokens >= len(self.ids):
            reason = (
                f"nothing to learn from: the prompt has {prompt_tokens:,} tokens, max_seq_len is "
                f"{limit:,}"
                if prompt_tokens >= limit
                else "nothing to learn from: the completion has no tokens"
            )
            return self._result("rejected", "nothing_supervised", reason)
        longest = self.runner.servers.max_model_len
        if longest is not None and len(self.ids) > longest:
            reason = (
                f"{len(self.ids):,} tokens do not fit the server's {longest:,}: start it with a "
                "larger --max-model-len"
            )
            return self._result("failed", "over_length", reason)
        return None

    # -- tries -----------------------------------------------------------------------------------

    async def _once(self) -> None:
        """One try that counts; servers that are gone or go away under it do not."""
        runner = self.runner
        while True:
            waited = time.monotonic()
            server = await runner.servers.acquire(len(self.ids), runner.settings.give_up_s)
            self.tries.begin(server.name, waited_since=waited)
            try:
                await self._try(server)
            except WrongStatesError:
                raise
            except (UnreachableError, ServerError) as error:
                runner.servers.lost(server, error)
                self.tries.take_back(error)
            else:
                return

    async def _try(self, server: ExtractServer) -> None:
        """Sends the sample; its slot on the server is given back as soon as there is an answer."""
        runner = self.runner
        request_id = runner.staging.request_id(self.sample.id, next(runner.numbers))
        has_slot = True
        try:
            await runner.before_sample(server, self.ids)
            reservation = await self._reserve(request_id)
            runner.leftovers.live.add(request_id)
            name: str | None = None
            try:
                path = await self._prefill(server, request_id)
                runner.servers.release(server, len(self.ids))
                has_slot = False
                name = runner.staging.name_of(path)
                await runner.staging.wait(name, runner.settings.lock_timeout_s, server.name)
                await self._take_in(name, request_id, reservation)
            except (TimedOutError, ConnectionCutError, LockHeldError, asyncio.CancelledError):
                runner.leftovers.abandon(request_id, reservation)
                raise
            except BaseException:
                self._discard(name, request_id, reservation)
                raise
        finally:
            if has_slot:
                runner.servers.release(server, len(self.ids))

    async def _reserve(self, request_id: str) -> Reservation:
        runner = self.runner
        num_tokens, layers = len(self.ids), runner.layers
        stored = worst_case_bytes(
            num_tokens, len(layers.layer_ids), layers.hidden_size, runner.settings.codec
        )
        return await runner.budget.reserve(
            request_id,
            stored_bytes=stored + self._overhead(),
            staged_bytes=layers.raw_bytes(num_tokens) + 8 * num_tokens + STAGED_BYTES,
            on_wait=runner.on_wait,
        )

    def _overhead(self) -> int:
        return _RECORD_BYTES + _BLOCK_ENTRY_BYTES * (1 + len(self.ids) // BLOCK_TOKENS)

    async def _prefill(self, server: ExtractServer, request_id: str) -> str:
        self.tries.deadline_s = server.deadline_s(self.patience)
        try:
            return await server.prefill(self.ids, request_id, self.patience)
        except TimedOutError:
            self.patience *= 2
            raise
        except (ConnectionCutError, ServerFailedError) as error:
            if not await self.runner.servers.healthy(server):
                raise UnreachableError(str(error)) from error
            raise

    async def _take_in(self, name: str, request_id: str, reservation: Reservation) -> None:
        runner = self.runner
        async with runner.encoding:
            taken = await asyncio.get_running_loop().run_in_executor(
                runner.threads,
                take_in,
                runner.staging,
                name,
                self.ids,
                runner.layers,
                runner.settings.codec,
                self.sample.digest,
                runner.rooms,
                runner.precision,
            )
            size = sum(map(len, taken.payload.blocks))

            def committed() -> None:
                runner.rooms.give_back(taken.rooms)
                runner.staging.remove(name)
                runner.leftovers.live.discard(request_id)
                reservation.stored(size + self._overhead())
                reservation.release()

            await runner.deliver(self._extracted(taken.payload, taken.warning), size, committed)
        runner.retries.succeeded()

    def _discard(self, name: str | None, request_id: str, reservation: Reservation) -> None:
        """Nothing of this try will be used. Only what bears its id is deleted: a server could name
        the file of another request."""
        staging = self.runner.staging
        if name is not None and staging.owner_of(name) == request_id:
            staging.remove(name)
        self.runner.leftovers.live.discard(request_id)
        reservation.release()

    async def _before_wait(self, tries: int, error: TransientError, wait_s: float) -> None:
        await self.runner.deliver(self._failed("transient", error), 0, None)
        await self.runner.retries.spend()

    # -- results ---------------------------------------------------------------------------------

    def _extracted(self, payload: StatesPayload, warning: str | None) -> Result:
        kind, text = (None, None) if warning is None else ("norm_outliers", f"warning: {warning}")
        return replace(self._result("extracted", kind, text), states=payload)

    def _failed(self, outcome: Outcome, error: RequestError) -> Result:
        result = self._result(outcome, type(error).__name__, str(error))
        return replace(result, attempt=replace(result.attempt, http_status=error.http_status))

    def _result(self, outcome: Outcome, error_class: str | None, error: str | None) -> Result:
        prompt_tokens = len(self.sample.completion.prompt_token_ids)
        attempt = Attempt(
            id=self.sample.id,
            stage="extract",
            attempt=self.tries.number(self.sample.attempts),
            outcome=outcome,
            error_class=error_class,
            error=error,
            finish_reason="length" if len(self.ids) < self.length else None,
            prompt_tokens=min(prompt_tokens, len(self.ids)),
            completion_tokens=max(0, len(self.ids) - prompt_tokens),
            **self.tries.facts(),
        )
        return Result(attempt=attempt, hash=self.sample.hash)
