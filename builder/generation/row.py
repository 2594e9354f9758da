"""One prompt's way through the servers: its tries, its history, and what it becomes.

Which rows there are and when the stage ends is left to `generate`; which server, to `pool`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from draftmill.builder.generation import gates
from draftmill.builder.generation.endpoint import Endpoint
from draftmill.builder.generation.gates import Rejection, UserGate
from draftmill.builder.generation.pool import Pool
from draftmill.builder.generation.room import (
    LengthEstimate,
    OverLength,
    max_tokens_for,
    most_stored_bytes,
)
from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.requests.failures import NoTokenizerError
from draftmill.builder.requests.retry_policy import RetryBudget, RetryPolicy, retried
from draftmill.builder.requests.tries import Tries
from draftmill.manifests.errors import (
    PermanentError,
    RejectedError,
    RequestError,
    ServerError,
    TimedOutError,
    TransientError,
    UnreachableError,
)
from draftmill.manifests.types import Attempt, Completion, Outcome, PendingPrompt, Result

CONTEXT_WORDS = "maximum context length"


class RowRunner:
    """Takes rows to their results. `put` receives the history of tries that failed on the way."""

    def __init__(
        self,
        pool: Pool,
        settings: GenerateSettings,
        user_gate: UserGate | None,
        put: Callable[[Result], Awaitable[None]],
    ) -> None:
        self.after_turn: list[int] = []  # what the template writes behind an answer
        self.lengths = LengthEstimate(settings.max_completion_tokens)
        self._pool = pool
        self._settings = settings
        self._sampling = settings.sampling
        self._user_gate = user_gate
        self._put = put
        self._budget = RetryBudget()
        self._policy = RetryPolicy(
            tries=settings.tries, base_s=settings.retry_base_s, max_s=settings.retry_max_s
        )

    def tokens(self, row: PendingPrompt) -> int:
        """Tokens that the row is expected to take on a server; 0 when nothing is generated."""
        return 0 if row.off_policy else self.lengths.tokens(row.conversation)

    def most_bytes(self, row: PendingPrompt) -> int:
        """Bytes that the row's record may take at most."""
        limit = self._settings.max_completion_tokens
        # a given answer is part of the conversation: its ids are counted there, its text is not
        answer = len(row.conversation.encode()) if row.off_policy else limit
        return most_stored_bytes(row.conversation, answer)

    async def run(self, row: PendingPrompt, slot: Endpoint, tokens: int, patience: float) -> Result:
        """The row's result. `slot` is taken already and given back here; so are later ones."""
        return await _Row(self, row, slot, tokens, patience).result()


class _Row:
    def __init__(
        self, runner: RowRunner, row: PendingPrompt, slot: Endpoint, tokens: int, patience: float
    ) -> None:
        self.runner = runner
        self.row = row
        self.slot: Endpoint | None = slot
        self.tokens = tokens
        self.patience = patience
        self.tries = Tries()

    async def result(self) -> Result:
        try:
            completion = await retried(self._once, self.runner._policy, self._before_wait)
        except OverLength as error:
            return self._rejected(error.rejection, None)
        except RejectedError as error:
            gate = "template" if self.row.off_policy else "rebuilt_ids"
            return self._rejected(Rejection(gate, error.reason), None)
        except TimedOutError as error:
            return self._attempt("timed_out", error)
        except (TransientError, PermanentError) as error:
            return self._attempt("failed", error)
        finally:
            if self.slot is not None:  # cancelled between two tries
                self._give_back(self.slot)
        self.runner._budget.succeeded()
        if not self.row.off_policy:
            self.runner.lengths.completed(self.row.conversation, completion)
        return self._judged(completion)

    async def _once(self) -> Completion:
        """One try that counts; servers that are gone or go away under it do not."""
        while True:
            waited = time.monotonic()
            endpoint = self.slot or await self.runner._pool.acquire(self.tokens)
            self.slot = endpoint
            self.tries.begin(endpoint.name, waited_since=waited)
            try:
                return await self._ask(endpoint)
            except (UnreachableError, ServerError) as error:
                if isinstance(error, NoTokenizerError):
                    endpoint.die(str(error))
                endpoint.go_down(str(error))
                self.tries.take_back(error)
            finally:
                self._give_back(endpoint)

    def _give_back(self, endpoint: Endpoint) -> None:
        self.slot = None
        self.runner._pool.release(endpoint, self.tokens)

    async def _ask(self, endpoint: Endpoint) -> Completion:
        settings = self.runner._settings
        conversation = self.row.conversation
        if self.row.off_policy:
            return await endpoint.tokenized(conversation, self.runner.after_turn)
        exact = False
        while True:
            max_tokens = await max_tokens_for(
                conversation,
                settings.max_completion_tokens,
                settings.min_completion_tokens,
                endpoint.context_limit,
                endpoint.client,
                exact=exact,
            )
            try:
                completion, self.tries.deadline_s = await endpoint.ask(
                    conversation, self.runner._sampling, max_tokens, self.patience
                )
                return completion
            except PermanentError as error:
                if CONTEXT_WORDS not in str(error):
                    raise
                if exact or endpoint.context_limit is None:
                    raise OverLength(Rejection("over_length", str(error))) from error
                exact = True  # the estimate was wrong: have the server count, then ask again

    async def _before_wait(self, tries: int, error: TransientError, wait_s: float) -> None:
        await self.runner._put(self._attempt("transient", error))
        await self.runner._budget.spend()

    def _judged(self, completion: Completion) -> Result:
        settings = self.runner._settings
        rejection = gates.check(
            completion,
            min_tokens=settings.min_completion_tokens,
            keep_truncated=settings.truncated == "keep",
            max_repetition=settings.max_repetition,
            # it shows whether a server's parser works; answers of others are what they are
            reasoning_required=settings.reasoning == "required" and not self.row.off_policy,
        )
        if rejection is None and self.runner._user_gate is not None:
            rejection = gates.ask_gate(self.runner._user_gate, completion, self.row)
        if rejection is not None:
            return self._rejected(rejection, completion)
        if settings.reasoning == "drop":
            completion = replace(completion, reasoning=None)
        return Result(
            attempt=self._attempt("generated", None, completion).attempt,
            hash=self.row.hash,
            completion=completion,
        )

    def _rejected(self, rejection: Rejection, completion: Completion | None) -> Result:
        result = self._attempt("rejected", None, completion)
        attempt = replace(result.attempt, error_class=rejection.gate, error=rejection.reason)
        return replace(result, attempt=attempt)

    def _attempt(
        self, outcome: Outcome, error: RequestError | None, completion: Completion | None = None
    ) -> Result:
        attempt = Attempt(
            id=self.row.id,
            stage="generate",
            attempt=self.tries.number(self.row.attempts),
            outcome=outcome,
            error_class=None if error is None else type(error).__name__,
            error=None if error is None else str(error),
            http_status=None if error is None else error.http_status,
            finish_reason=None if completion is None else completion.finish_reason,
            prompt_tokens=None if completion is None else len(completion.prompt_token_ids),
            completion_tokens=None if completion is None else len(completion.completion_token_ids),
            reasoning_tokens=None
            if completion is None
            else completion.extra.get("reasoning_tokens"),
            **self.tries.facts(),
        )
        return Result(attempt=attempt, hash=self.row.hash)
