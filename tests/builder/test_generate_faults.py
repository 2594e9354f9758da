"""The generate stage when servers die, stall, hang or come back changed, and when it is stopped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.generation.stage import generate
from draftmill.builder.progress import Progress
from draftmill.manifests.errors import BudgetError
from draftmill.manifests.types import Result
from draftmill.manifests.writer import DatasetWriter
from tests.builder.generation import (
    QUICK,
    check_served,
    generated,
    history,
    messages,
    states,
    writer_of,
)
from tests.fakes.target_server import TargetServer
from tests.waiting import until

pytestmark = pytest.mark.slow

SLOW = {"tokens_per_s": 4000.0, "median_tokens": 60}


def test_a_restarted_server_costs_no_row_an_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="draftmill")

    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer(**SLOW) as server:
                run = asyncio.create_task(generated(writer, server))
                for times, answers in ((1, 10), (2, 40)):
                    await until(lambda n=answers: server.answered.total() > n)
                    await server.go_down()
                    await until(lambda n=times: caplog.text.count("waiting for the server") == n)
                    await server.come_up()
                report = await run
                assert report.outcomes == {"generated": 100}
                assert history(writer) == {("generated", None): 100}
                assert check_served(tmp_path / "d", writer) == 100
                decisions = writer.manifest.rows("SELECT decision FROM control")
                assert sum("server is back" in each for (each,) in decisions) == 2

    asyncio.run(body())


def test_work_moves_from_a_dead_server_to_the_living(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer(**SLOW) as first, TargetServer(**SLOW) as second:
                run = asyncio.create_task(generated(writer, first, second))
                await until(lambda: first.answered.total() > 20)
                await first.go_down()
                report = await run
                assert report.outcomes == {"generated": 100}
                assert history(writer) == {("generated", None): 100}
                assert second.answered.total() > 50

    asyncio.run(body())


@pytest.mark.slow
def test_a_server_that_is_away_at_the_start_may_come_later(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 400) as writer:
            async with TargetServer(**SLOW) as first, TargetServer(**SLOW) as late:
                await late.go_down()
                run = asyncio.create_task(generated(writer, first, late))
                await until(lambda: first.answered.total() > 10)
                await late.come_up()
                assert (await run).outcomes == {"generated": 400}
                assert late.answered.total() > 1

    asyncio.run(body())


@pytest.mark.slow
def test_a_server_that_comes_back_as_another_is_not_used(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer(**SLOW) as server:
                run = asyncio.create_task(generated(writer, server))
                await until(lambda: server.answered.total() > 20)
                await server.go_down()
                server.options.model = "another/model"
                await server.come_up()
                report = await run
                assert report.stopped is not None
                assert "came back with another model" in report.stopped
                found = states(writer)
                assert found["pending"] + found["generated"] == 100

    asyncio.run(body())


@pytest.mark.slow
def test_no_server_for_too_long_ends_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer(**SLOW) as server:
                run = asyncio.create_task(generated(writer, server, give_up_s=0.2))
                await until(lambda: server.answered.total() > 20)
                await server.go_down()
                report = await run
                assert report.stopped is not None
                assert "no server has answered" in report.stopped
                assert states(writer)["pending"] > 0
                assert "failed" not in states(writer)

    asyncio.run(body())


@pytest.mark.slow
def test_a_stuck_scheduler_is_noticed_though_health_is_fine(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer(**SLOW) as server:
                run = asyncio.create_task(generated(writer, server, watchdog_s=0.5))
                await until(lambda: server.answered.total() > 20)
                server.stuck = True
                await until(lambda: server.in_flight <= 1)  # taken back, but for the probe
                server.stuck = False
                report = await run
                assert report.outcomes == {"generated": 100}
                assert history(writer) == {("generated", None): 100}
                decisions = writer.manifest.rows("SELECT decision FROM control")
                assert any("no token generated for" in each for (each,) in decisions)

    asyncio.run(body())


@pytest.mark.slow
def test_requests_that_hang_are_given_up_and_asked_again(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 60) as writer:
            async with TargetServer(**SLOW) as server:
                server.plan(messages(3), ["hang"])
                server.plan(messages(7), ["hang", "hang"])
                report = await generated(writer, server, min_deadline_s=1.0, lost_s=1.5)
                assert report.outcomes["generated"] == 60
                assert states(writer) == {"generated": 60}
                assert server.count(messages(3)) == 2
                assert server.count(messages(7)) == 3
                assert check_served(tmp_path / "d", writer) == 60

    asyncio.run(body())


def test_timed_out_is_a_state_with_its_arithmetic_and_tried_again_later(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 120) as writer:
            # an instant server: its clock runs so fast that the floor alone decides
            async with TargetServer(median_tokens=20, sigma=0.1) as server:
                server.plan(messages(0), ["hang"] * 9)
                quick = {"min_deadline_s": 1.0, "lost_s": 99.0, "timeout_passes": 1}
                quick |= {"concurrency": 4}  # then nobody waits long for the others
                keep_busy = asyncio.create_task(_trickle(server))
                report = await generated(writer, server, **quick)
                assert report.outcomes["generated"] == 119
                assert report.outcomes["timed_out"] == 1
                assert states(writer) == {"generated": 119, "timed_out": 1}
                assert server.count(messages(0)) == 2
                rows = writer.manifest.rows(
                    "SELECT outcome, error, deadline_s FROM attempts WHERE id = 1 ORDER BY attempt"
                )
                assert rows[0][0] == "timed_out"
                assert "no answer after" in rows[0][1]
                server.plans.clear()
                report = await generated(writer, server, **quick)
                assert report.outcomes == {"generated": 1, "timed_out": 0}
                keep_busy.cancel()

    asyncio.run(body())


async def _trickle(server: TargetServer) -> None:
    """Another client's tokens, so that the server's counter goes on."""
    while True:
        await asyncio.sleep(0.02)
        server.scheduler.finished_tokens += 1000.0


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [True, False])
def test_a_fixed_timeout_that_does_not_fit_loses_nothing(tmp_path: Path, metrics: bool) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 120) as writer:
            async with TargetServer(
                tokens_per_s=3000.0, median_tokens=80, sigma=0.8, metrics=metrics
            ) as server:
                report = await generated(
                    writer, server, concurrency=40, timeout_s=0.2, min_deadline_s=0.0
                )
                assert report.outcomes == {"generated": 120}
                assert server.scheduler.wasted_tokens == 0
                decisions = writer.manifest.rows("SELECT decision FROM control")
                said = [re.search(r"does not fit: (\d+) requests", each) for (each,) in decisions]
                assert {1 <= int(each[1]) <= 40 for each in said if each} == {True}

    asyncio.run(body())


@pytest.mark.slow
def test_everything_works_without_metrics(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer(**SLOW, metrics=False, faults={"http_500": 0.1}) as server:
                report = await generated(writer, server, concurrency="auto")
                assert report.outcomes["generated"] == 100
                assert states(writer) == {"generated": 100}

    asyncio.run(body())


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_keeps_what_arrived_and_leaves_the_rest_pending(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 120) as writer:
            async with TargetServer(**SLOW) as server:
                run = asyncio.create_task(generated(writer, server))
                # the probe, 20 rows, and what is still on its way to us
                await until(lambda: server.answered.total() > 1 + 20 + 16)
                os.kill(os.getpid(), number)
                report = await run
                assert report.interrupted
                found = states(writer)
                assert 20 <= found["generated"] < 120
                assert found["generated"] + found["pending"] == 120
                assert (await generated(writer, server)).outcomes == {"generated": found["pending"]}
                asked = [server.count(messages(n)) for n in range(120)]
                assert max(asked) <= 2
                assert sum(asked) - 120 <= 16  # no more than were in flight

    asyncio.run(body())


@pytest.mark.slow
def test_answers_within_the_grace_are_kept(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer(**SLOW) as server:
                run = asyncio.create_task(generated(writer, server, stop_grace_s=60.0))
                await until(lambda: server.answered.total() > 20)
                os.kill(os.getpid(), signal.SIGINT)
                report = await run
                assert report.interrupted
                assert (
                    states(writer)["generated"]
                    == sum(server.answered[key] for key in server.answered if server.answered[key])
                    - 1
                )  # the probe
                assert server.scheduler.wasted_tokens == 0

    asyncio.run(body())


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer(**SLOW) as server:
                server.plan(messages(0), ["hang"])
                run = asyncio.create_task(generated(writer, server, stop_grace_s=3600.0))
                await until(lambda: server.answered.total() > 20)
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
                os.kill(os.getpid(), signal.SIGINT)
                report = await run
                assert report.interrupted
                found = states(writer)
                assert found.get("generated", 0) + found["pending"] == 100

    asyncio.run(body())


def test_a_full_disk_stops_the_stage_and_loses_nothing_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = DatasetWriter.commit
    done: list[int] = []

    def limited(self: DatasetWriter, results: list[Result]) -> None:
        if len(done) >= 2:
            raise BudgetError("no space left on the disk")
        done.append(len(results))
        commit(self, results)

    monkeypatch.setattr(DatasetWriter, "commit", limited)

    async def body() -> None:
        with writer_of(tmp_path / "d", 200) as writer:
            async with TargetServer() as server:
                report = await generated(writer, server)
                assert report.over_budget
                assert report.stopped == "no space left on the disk"
                assert states(writer)["generated"] == sum(done)

    asyncio.run(body())


@pytest.mark.slow
def test_not_more_is_claimed_than_concurrency_and_one_batch(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 300) as writer:
            async with TargetServer() as server:
                most = 0
                committed = 0
                seen: list[Progress] = []

                def watch(progress: Progress) -> None:
                    nonlocal most, committed
                    seen.append(progress)
                    most = max(most, server.requests.total() - 1 - committed)
                    committed = progress.done

                settings = GenerateSettings(**QUICK | {"concurrency": 32})
                report = await generate(writer, settings, [server.url], watch)
                assert report.outcomes == {"generated": 300}
                assert most <= 32 + 2 * 64  # seen at commits: one batch is done, one has come
                assert seen[-1].total == seen[-1].done == 300
                assert seen[-1].tokens == report.tokens > 0

    asyncio.run(body())
