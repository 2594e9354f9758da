"""Servers that refuse or break on whatever they are sent: given up, and no row pays for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests.maintenance import RowFilter, retry, select
from tests.builder.generation import check_served, generated, history, messages, states, writer_of
from tests.fakes.target_server import TargetServer

# what a request meets that no retry mends: refused, broken on, answered with nonsense
HOPELESS = ("http_400", "http_500", "garbage")


@pytest.mark.parametrize("fault", HOPELESS)
@pytest.mark.parametrize("concurrency", [1, 16, "auto"])
def test_a_server_that_refuses_everything_ends_the_run_and_changes_no_row(
    tmp_path: Path, fault: str, concurrency: int | str
) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 24) as writer:
            async with TargetServer() as server:
                for number in range(24):
                    server.plan(messages(number), [fault] * 20)
                report = await generated(
                    writer, server, concurrency=concurrency, stop_after_bad=4, tries=2
                )
                assert report.stopped is not None
                assert "samples in a row were bad, the last one: " in report.stopped
                assert "generate.stop_after_bad" in report.stopped
                assert states(writer) == {"pending": 24}
                assert not any(outcome == "failed" for outcome, _ in history(writer))
                decisions = writer.manifest.rows("SELECT decision FROM control")
                assert any("given up" in each for (each,) in decisions)
                server.plans.clear()
                assert (await generated(writer, server)).outcomes["generated"] == 24

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["http_400", "garbage"])
def test_rows_of_one_bad_server_among_several_go_to_the_others(tmp_path: Path, fault: str) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 200) as writer:
            async with TargetServer() as bad, TargetServer(tokens_per_s=8000.0) as good:
                for number in range(200):
                    bad.plan(messages(number), [fault] * 20)
                report = await generated(writer, bad, good, stop_after_bad=8)
                assert report.stopped is None
                assert states(writer) == {"generated": 200}
                assert check_served(tmp_path / "d", writer) == 200
                if fault == "http_400":  # nonsense may pass: it is asked for elsewhere
                    asked = sum(bad.count(messages(number)) > 0 for number in range(200))
                    assert asked <= 8 + 16

    asyncio.run(body())


def test_a_stretch_of_bad_prompts_waits_for_a_good_one_in_flight(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 60) as writer:
            # the good ones take long, and all the bad ones are refused at once meanwhile
            async with TargetServer(tokens_per_s=400.0, sigma=0.1) as server:
                for number in range(4, 44):
                    server.plan(messages(number), ["http_400"] * 20)
                report = await generated(writer, server, concurrency=8, stop_after_bad=40)
                assert report.stopped is None
                assert states(writer) == {"failed": 40, "generated": 20}
                assert max(server.count(messages(number)) for number in range(60)) == 1

    asyncio.run(body())


@pytest.mark.slow
@settings(max_examples=8)
@given(
    bad=st.sets(st.integers(0, 39), max_size=39),
    limit=st.integers(0, 12),
    concurrency=st.integers(1, 9),
)
def test_no_row_is_lost_or_judged_twice(
    tmp_path_factory: pytest.TempPathFactory, bad: set[int], limit: int, concurrency: int
) -> None:
    path = tmp_path_factory.mktemp("refusals") / "d"

    async def body() -> None:
        with writer_of(path, 40) as writer:
            async with TargetServer() as server:
                for number in bad:
                    server.plan(messages(number), ["http_400"] * 99)
                report = await generated(
                    writer, server, stop_after_bad=limit, concurrency=concurrency
                )
                found = states(writer)
                assert sum(found.values()) == 40
                if report.stopped is None:
                    assert found.get("failed", 0) == len(bad)
                    assert found.get("generated", 0) == 40 - len(bad)
                else:
                    assert limit
                    assert found["pending"]
                # each failed row has failed once, and can be asked again
                assert history(writer)["failed", "PermanentError"] == found.get("failed", 0)
                failed = select(writer, RowFilter(states=("failed",)))
                retry(writer, failed)
                server.plans.clear()
                await generated(writer, server)
                assert states(writer) == {"generated": 40}

    asyncio.run(body())


def test_a_long_pause_that_a_server_asks_for_is_told(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 20) as writer:
            async with TargetServer(retry_after_s=0.5) as server:
                server.plan(messages(3), ["http_429"])
                await generated(writer, server)
                found = writer.manifest.rows(
                    "SELECT endpoint, decision FROM control WHERE decision LIKE '%patience%'"
                )
                assert len(found) == 1
                assert found[0][0] == server.url
                assert "nothing is sent for" in found[0][1]

    asyncio.run(body())


def test_short_pauses_are_not(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 20) as writer:
            async with TargetServer(retry_after_s=0.01) as server:
                for number in range(20):
                    server.plan(messages(number), ["http_429"])
                await generated(writer, server)
                query = "SELECT count(*) FROM control WHERE decision LIKE '%patience%'"
                assert writer.manifest.rows(query) == [(0,)]

    asyncio.run(body())
