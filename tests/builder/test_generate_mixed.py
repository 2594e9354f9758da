"""Everything goes wrong at once: every row still ends where it belongs, and nothing is asked twice.

Minutes, not seconds: `make test-fast` leaves these out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftmill.manifests import maintenance
from tests.builder.generation import (
    check_served,
    completions,
    generated,
    history,
    messages,
    states,
    writer_of,
)
from tests.fakes import toy_model as toy
from tests.fakes.target_server import TargetServer
from tests.waiting import until

pytestmark = pytest.mark.slow

PROMPTS = 600
# A tenth of all requests in all, all kinds at once; those of the second line stick to a prompt.
TRANSIENT = {"http_500": 0.02, "http_503": 0.01, "http_429": 0.01, "drop": 0.01, "garbage": 0.01}
STICKY = {"http_400": 0.01, "cut_in_reasoning": 0.01, "empty": 0.01, "loop": 0.01}
FAULTS = TRANSIENT | STICKY
FATE = {"http_400": "failed", "empty": "rejected", "loop": "rejected"}
ERROR = {"http_400": "PermanentError", "empty": "empty", "loop": "repetition"}
HANGING = (11, 222, 433)
SERVER: dict[str, Any] = {
    "tokens_per_s": 20_000.0,
    "median_tokens": 150,
    "faults": FAULTS,
    "retry_after_s": 0.02,
}
STAGE: dict[str, Any] = {
    "max_completion_tokens": 400,
    "min_deadline_s": 2.0,
    "lost_s": 1.0,
    "tries": 8,
    "timeout_passes": 0,
    "give_up_s": 600.0,
}
GONE: dict[str, Any] = {
    "concurrency": 16,
    "give_up_s": 600.0,
    "min_deadline_s": 1.0,
    "watchdog_s": 2.0,
    "lost_s": 1.0,
}


def fate(number: int) -> str:
    """What becomes of a prompt, by the servers' own draws."""
    key = toy.digest(messages(number))
    for name in FAULTS:
        if name in STICKY and toy.unit(name, 0, key, "") < STICKY[name]:
            return name
    return "ok"


def asked(servers: tuple[TargetServer, ...], number: int) -> int:
    return sum(server.count(messages(number)) for server in servers)


async def _busy(server: TargetServer) -> None:
    """Another client's tokens: the server is at work while a request of ours hangs."""
    while True:
        await asyncio.sleep(0.02)
        server.scheduler.finished_tokens += 40.0


async def _answers(servers: tuple[TargetServer, ...], count: int) -> None:
    await until(lambda: sum(server.answered.total() for server in servers) >= count)


async def _outages(servers: tuple[TargetServer, ...]) -> None:
    """The network is gone for both, longer than any deadline; later one of them restarts."""
    await _answers(servers, PROMPTS // 4)
    await asyncio.gather(*(server.go_down() for server in servers))
    await asyncio.sleep(4.0)
    await asyncio.gather(*(server.come_up() for server in servers))
    await _answers(servers, PROMPTS // 2)
    await servers[0].go_down()
    await asyncio.sleep(1.0)
    await servers[0].come_up()


def test_all_faults_at_once_on_two_servers(tmp_path: Path) -> None:
    async def body() -> None:
        path = tmp_path / "d"
        with writer_of(path, PROMPTS) as writer:
            async with TargetServer(**SERVER) as first, TargetServer(**SERVER) as second:
                servers = (first, second)
                fates = [fate(number) for number in range(PROMPTS)]
                for server in servers:
                    for number in HANGING:
                        fates[number] = "hang"
                        server.plan(messages(number), ["hang"] * 20)
                noise = [asyncio.create_task(_busy(server)) for server in servers]
                noise.append(asyncio.create_task(_outages(servers)))
                report = await generated(writer, *servers, limit_s=240, **STAGE)
                assert report.stopped is None
                for task in noise[:2]:
                    task.cancel()

                # every row is where its fate takes it, with the class of what went wrong
                rows = dict(writer.manifest.rows("SELECT id - 1, state::VARCHAR FROM state"))
                last = dict(
                    writer.manifest.rows(
                        "SELECT id - 1, arg_max(coalesce(error_class, ''), attempt) "
                        "FROM attempts GROUP BY id"
                    )
                )
                hanging = {number for number, name in enumerate(fates) if name == "hang"}
                for number, name in enumerate(fates):
                    if number not in hanging:
                        assert rows[number] == FATE.get(name, "generated"), (number, name)
                        assert last[number] == ERROR.get(name, ""), (number, name)
                assert {rows[number] for number in hanging} <= {"timed_out", "failed"}
                kinds = {error for outcome, error in history(writer) if outcome == "transient"}
                assert kinds >= {"ServerFailedError", "OverloadedError", "GarbledReplyError"}
                # refused connections have cost nobody an attempt, and nothing is stored twice
                assert "UnreachableError" not in {error for _, error in history(writer)}
                stored = Counter(row[0] for row in writer.manifest.rows("SELECT id FROM payloads"))
                assert set(stored.values()) == {1}
                assert len(completions(path, writer)) == states(writer)["generated"]

                # a second run has nothing to do; after a retry it asks for those rows alone
                before = [asked(servers, number) for number in range(PROMPTS)]
                await generated(writer, *servers, **STAGE)
                assert [asked(servers, number) for number in range(PROMPTS)] == before
                for server in servers:
                    server.plans.clear()
                left = [number + 1 for number in hanging]
                assert maintenance.retry(writer, left) == len(left)
                await generated(writer, *servers, **STAGE)
                again = [asked(servers, number) - n for number, n in enumerate(before)]
                assert {number for number, times in enumerate(again) if times} == hanging
                assert states(writer)["generated"] == sum(
                    FATE.get(name, "generated") == "generated" for name in fates
                )

    asyncio.run(body())


@pytest.mark.parametrize("metrics", [True, False])
def test_a_network_that_is_gone_for_long_costs_nobody_an_attempt(
    tmp_path: Path, metrics: bool
) -> None:
    """Longer than deadlines, watchdog and patience with lost requests: the breaker waits."""

    async def body() -> None:
        path = tmp_path / "d"
        with writer_of(path, 150) as writer:
            async with TargetServer(
                tokens_per_s=6000.0, median_tokens=80, metrics=metrics
            ) as server:
                run = asyncio.create_task(generated(writer, server, **GONE))
                await _answers((server,), 40)
                await server.go_down()
                await asyncio.sleep(6.0)
                await server.come_up()
                report = await run
                assert report.outcomes == {"generated": 150}
                assert history(writer) == {("generated", None): 150}
                assert check_served(path, writer) == 150
                # what was on its way when the network went, and no more, was asked again
                assert server.requests.total() - 2 <= 150 + 2 * 16

    asyncio.run(body())
