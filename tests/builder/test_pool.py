"""Slots on several servers: who gets the next one, and when there is nothing left to hope for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from draftmill.builder.generation.controller import Controller
from draftmill.builder.generation.deadline import ActiveClock, DeadlineRule
from draftmill.builder.generation.endpoint import Endpoint, Patience
from draftmill.builder.generation.pool import Pool
from draftmill.builder.requests.client import TargetClient


@asynccontextmanager
async def pool_of(*limits: int) -> AsyncIterator[tuple[Pool, list[Endpoint]]]:
    pool = Pool()
    endpoints = [
        Endpoint(
            TargetClient(f"http://127.0.0.1:{number + 1}", model="m"),
            Controller(maximum=1024, fixed=limit),
            DeadlineRule(),
            Patience(),
            ActiveClock(0.0),
            probe_ids=None,
            log=lambda *_: None,
            changed=pool.changed,
        )
        for number, limit in enumerate(limits)
    ]
    pool.add(endpoints)
    try:
        yield pool, endpoints
    finally:
        for each in endpoints:
            await each.aclose()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def test_the_server_with_the_most_free_room_is_next() -> None:
    async def body() -> None:
        async with pool_of(2, 4) as (pool, (small, large)):
            got = [await pool.acquire(1) for _ in range(6)]
            assert (got.count(small), got.count(large)) == (2, 4)
            assert pool.in_flight == pool.limit == 6

    run(body())


def test_who_waits_is_served_in_order_and_a_cancelled_one_keeps_nothing() -> None:
    async def body() -> None:
        async with pool_of(1) as (pool, (only,)):
            await pool.acquire(1)
            waiting = [asyncio.create_task(pool.acquire(1)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            pool.release(only, 1)
            assert await waiting[1] is only
            assert only.taken == 1
            pool.release(only, 1)  # hands the slot over ...
            waiting[2].cancel()  # ... to one that is cancelled before it runs
            await asyncio.gather(*waiting, return_exceptions=True)
            assert only.taken == 0

    run(body())


def test_tokens_are_capped_but_something_always_fits_an_idle_server() -> None:
    async def body() -> None:
        async with pool_of(9) as (pool, (only,)):
            only.max_in_flight_tokens = 100
            await pool.acquire(5000)
            assert only.room(1) == 0
            pool.release(only, 5000)
            await pool.acquire(60)
            assert only.room(41) == 0
            assert only.room(40) > 0

    run(body())


def test_a_pause_that_the_server_asked_for_is_kept_and_ends() -> None:
    async def body() -> None:
        async with pool_of(9) as (_, (only,)):
            only.pause(3600.0)
            assert only.room(1) == 0
        async with pool_of(9) as (pool, (only,)):
            only.pause(0.05)
            assert await pool.acquire(1) is only

    run(body())


def test_servers_that_are_down_or_dead_get_nothing_and_hope_ends() -> None:
    async def body() -> None:
        async with pool_of(3, 3) as (pool, (first, second)):
            first.go_down("restarting")
            assert {await pool.acquire(1) for _ in range(3)} == {second}
            assert pool.limit == 3
            assert pool.hopeless(0.0) is None
            second.die("another model")
            assert pool.hopeless(3600.0) is None
            reason = pool.hopeless(0.0)
            assert reason is not None
            assert "restarting" in reason
            first.die("gone")
            assert "no server can be used any more" in (pool.hopeless(3600.0) or "")

    run(body())
