"""How often and how patiently a failed request is tried again: the one retry layer, and the one
door to tenacity."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import tenacity

from draftmill.builder.requests.failures import GarbledReplyError, OverloadedError
from draftmill.manifests.errors import TimedOutError, TransientError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Tries by the kind of failure; what is not transient is never tried again.

    Kinds that are not listed get `tries`. The wait doubles from `base_s` to `max_s`, with full
    jitter, and is never shorter than what the server asked for. A request that timed out is not
    sent again here: its row gets a longer deadline at the end of the pass.
    """

    tries: int = 5
    tries_by_kind: Mapping[type[TransientError], int] = field(
        default_factory=lambda: {OverloadedError: 50, GarbledReplyError: 3, TimedOutError: 1}
    )
    base_s: float = 1.0
    max_s: float = 60.0

    def tries_for(self, error: BaseException) -> int:
        """How many tries a request gets that fail like `error`; 1 is no retry."""
        if not isinstance(error, TransientError):
            return 1
        return self.tries_by_kind.get(type(error), self.tries)

    def wait_s(self, tries: int, error: BaseException) -> float:
        """Seconds to wait after so many `tries` that ended like `error`."""
        backoff = random.uniform(0.0, min(self.max_s, self.base_s * 2.0 ** min(tries, 30)))
        asked = getattr(error, "retry_after_s", None)
        return backoff if asked is None else max(backoff, asked + random.uniform(0.0, self.base_s))


class RetryBudget:
    """Retries that a run may send: a share of its successes, and a trickle when there are none.

    When a server fails everything, retries wait for one another instead of multiplying its load.
    """

    def __init__(self, share: float = 0.2, per_s: float = 1.0, most: float = 64.0) -> None:
        self._share, self._per_s, self._most = share, per_s, most
        self._left = most
        self._at = time.monotonic()

    def succeeded(self) -> None:
        """A request succeeded."""
        self._left = min(self._most, self._left + self._share)

    async def spend(self) -> None:
        """Returns when one more retry fits the budget."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s) - 1.0
        self._at = now
        if self._left < 0.0:
            await asyncio.sleep(-self._left / self._per_s)


async def retried(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    before_wait: Callable[[int, TransientError, float], Awaitable[None]],
) -> T:
    """Runs `call` until it succeeds, fails for good or the tries for one kind are used up.

    Each kind of failure has its own count: one that comes after many of another is not the last.
    `before_wait(tries so far, error, seconds to wait)` is awaited before each wait; the last
    error is raised as it is. This is the only retry layer.
    """

    def exception(state: tenacity.RetryCallState) -> BaseException:
        assert state.outcome is not None
        error = state.outcome.exception()
        assert error is not None
        return error

    failures: Counter[type[BaseException]] = Counter()

    async def counted() -> T:
        try:
            return await call()
        except TransientError as error:
            failures[type(error)] += 1
            raise

    try:
        return await counted()
    except TransientError as error:
        failed: TransientError | None = error

    async def again() -> T:
        # the machinery costs as much as parsing a reply: only those that failed once enter it
        nonlocal failed
        if failed is not None:
            first, failed = failed, None
            raise first
        return await counted()

    async def before_sleep(state: tenacity.RetryCallState) -> None:
        error = exception(state)
        assert isinstance(error, TransientError)
        await before_wait(state.attempt_number, error, state.upcoming_sleep)

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(TransientError),
        stop=lambda state: failures[type(exception(state))] >= policy.tries_for(exception(state)),
        wait=lambda state: policy.wait_s(failures[type(exception(state))], exception(state)),
        before_sleep=before_sleep,
        reraise=True,
    )
    return await retrying(again)
