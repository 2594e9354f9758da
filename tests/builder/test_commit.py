"""Batching of commits: sizes, order, what a failure and a cancellation leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from draftmill.builder.commit import Committer
from draftmill.manifests.errors import BudgetError
from draftmill.manifests.types import Attempt, Result
from tests.waiting import until


class Writer:
    """Keeps what was committed; `fail_at` is the commit that finds the disk full."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.batches: list[list[int]] = []
        self.published = 0
        self._fail_at = fail_at

    def commit(self, results: Sequence[Result], /) -> None:
        if len(self.batches) == self._fail_at:
            raise BudgetError("the disk is full")
        self.batches.append([each.attempt.id for each in results])

    def publish(self) -> None:
        self.published += 1


def result(number: int) -> Result:
    return Result(
        attempt=Attempt(id=number, stage="extract", attempt=1, outcome="transient"), hash="h"
    )


def test_batches_have_a_largest_size_and_keep_the_order() -> None:
    writer, after = Writer(), list[int]()

    async def go() -> None:
        async with Committer(writer, batch_rows=8, batch_s=1000.0) as committer:
            for number in range(30):
                await committer.put(result(number), then=lambda n=number: after.append(n))

    asyncio.run(go())
    assert max(map(len, writer.batches)) == 8
    assert [each for batch in writer.batches for each in batch] == after == list(range(30))


def test_a_batch_goes_when_it_is_due_kicked_large_or_flushed() -> None:
    async def go(use: Callable[[Committer], object], **options: float) -> list[list[int]]:
        writer = Writer()
        async with Committer(writer, **{"batch_s": 1000.0, **options}) as committer:  # type: ignore[arg-type]
            await committer.put(result(1), payload_bytes=600)
            use(committer)
            await until(lambda: bool(writer.batches))
            seen = list(writer.batches)
            await committer.put(result(2))
            await committer.flush()
            assert writer.batches[-1] == [2]
            return seen

    assert asyncio.run(go(lambda committer: committer.kick())) == [[1]]
    assert asyncio.run(go(lambda _: None, batch_s=0.01)) == [[1]]
    assert asyncio.run(go(lambda _: None, batch_bytes=1000)) == [[1]]


def test_progress_comes_before_what_follows_a_commit() -> None:
    order: list[str] = []

    async def go() -> None:
        committed = lambda results: order.append("progress")  # noqa: E731
        async with Committer(Writer(), on_committed=committed) as committer:
            await committer.put(result(1), then=lambda: order.append("delete"))

    asyncio.run(go())
    assert order == ["progress", "delete"]


def test_putting_waits_for_room() -> None:
    writer = Writer()

    async def go() -> None:
        async with Committer(writer, batch_rows=4, batch_s=1000.0) as committer:
            await committer.put(result(0), payload_bytes=1 << 40)
            # larger than everything else allowed, and alone: it goes; the next one waits for it
            await committer.put(result(1), payload_bytes=10)
            assert writer.batches == [[0]]

    asyncio.run(go())


def test_after_a_failure_everybody_is_told_and_nothing_more_is_written() -> None:
    writer, done, failures = Writer(fail_at=1), list[int](), list[Exception]()

    async def go() -> None:
        async with Committer(
            writer, batch_rows=2, batch_s=1000.0, on_failed=failures.append
        ) as committer:
            for number in range(2):
                await committer.put(result(number), then=lambda n=number: done.append(n))
            await committer.flush()
            puts = [committer.put(result(number)) for number in range(2, 9)]
            found = await asyncio.gather(*puts, return_exceptions=True)
            assert isinstance(found[-1], BudgetError)
            with pytest.raises(BudgetError):
                await committer.put(result(9))

    with pytest.raises(BudgetError, match="the disk is full"):
        asyncio.run(go())
    assert writer.batches == [[0, 1]]
    assert done == [0, 1]
    assert [str(failure) for failure in failures] == ["the disk is full"]


def test_leaving_with_an_error_commits_and_with_a_cancellation_does_not() -> None:
    async def go(writer: Writer, error: BaseException) -> None:
        async with Committer(writer, batch_s=1000.0) as committer:
            await committer.put(result(1))
            raise error

    writer = Writer()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(go(writer, ZeroDivisionError()))
    assert writer.batches == [[1]]
    writer = Writer()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go(writer, asyncio.CancelledError()))
    assert writer.batches == []


def test_publishes_now_and_then() -> None:
    writer = Writer()

    async def go() -> None:
        async with Committer(writer, publish_s=0.0) as committer:
            await committer.put(result(1))
            await committer.flush()

    asyncio.run(go())
    assert writer.published == 1
