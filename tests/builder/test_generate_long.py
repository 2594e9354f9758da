"""The generate stage over thousands of prompts: kills, a fixed timeout, a process that was stopped.

Minutes, not seconds: `make test-fast` leaves these out.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from draftmill.manifests.writer import DatasetWriter
from tests.builder.generation import generated, new_dataset, states, writer_of
from tests.builder.test_generate_kill import killed_runs, start
from tests.fakes.target_server import TargetServer
from tests.waiting import until

pytestmark = pytest.mark.slow

# One night at 1 : 100. 200 requests at once, up to 8,192 tokens each, 1,600 tokens/s on average,
# far less for half an hour in every hour; 1,800 s is the timeout that lost the longest.
SCALE = 100.0
TIMEOUT_S = 1800 / SCALE
NIGHT: dict[str, Any] = {
    "tokens_per_s": 2600 * SCALE,
    "tokens_per_s_each": 60 * SCALE,
    "max_running": 256,
    "median_tokens": 2400,
    "sigma": 0.8,
    "max_model_len": 16384,
    "phases": [
        (hour * 3600 / SCALE + 1500 / SCALE, hour * 3600 / SCALE + 3120 / SCALE, 0.15)
        for hour in range(20)
    ],
}
STAGE: dict[str, Any] = {
    "concurrency": 200,
    "max_completion_tokens": 8192,
    "max_repetition": 1.0,
    "control_interval_s": 0.1,
    "min_deadline_s": 30 / SCALE,
    "watchdog_s": 600 / SCALE,
}


def test_thirty_kills_over_two_thousand_prompts(tmp_path: Path) -> None:
    asyncio.run(killed_runs(tmp_path / "d", prompts=2000, kills=30, most_s=3.0, seed=os.getpid()))


def _took_longer_than(writer: DatasetWriter, seconds: float) -> int:
    rows = writer.manifest.rows("SELECT count(*) FROM attempts WHERE total_s > ?", [seconds])
    return int(rows[0][0])


def test_a_fixed_timeout_loses_no_prompt_and_wastes_no_token(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 1500) as writer:
            async with TargetServer(**NIGHT) as server:
                report = await generated(writer, server, limit_s=1500, timeout_s=TIMEOUT_S, **STAGE)
                assert states(writer) == {"generated": 1500}
                assert report.stopped is None
                wasted = server.scheduler.wasted_tokens
                assert wasted < 0.01 * server.scheduler.generated_total()
                # the fixed timeout alone would have cut these
                assert _took_longer_than(writer, TIMEOUT_S) > 0

    asyncio.run(body())


def test_a_process_that_was_stopped_finds_its_answers(tmp_path: Path) -> None:
    """SIGSTOP for longer than any deadline, while the server goes on answering."""

    async def body() -> None:
        path = tmp_path / "d"
        new_dataset(path, 300)
        async with TargetServer(tokens_per_s=4000.0) as server:
            child = await start(path, server.url, min_deadline_s=5.0)
            await until(lambda: server.answered.total() >= 50)
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(12.0)
            child.send_signal(signal.SIGCONT)
            assert await child.wait() == 0
            assert max(server.requests.values()) == 1

    asyncio.run(body())


def test_concurrency_finds_the_level_of_the_server(tmp_path: Path) -> None:
    """Sixty requests saturate this server; every decision is in the table `control`."""

    async def body() -> None:
        with writer_of(tmp_path / "d", 2000) as writer:
            async with TargetServer(
                tokens_per_s=24_000.0, tokens_per_s_each=400.0, median_tokens=100
            ) as server:
                await generated(writer, server, concurrency="auto", control_interval_s=0.2)
                rows = writer.manifest.rows('SELECT endpoint, "limit", decision FROM control')
                assert rows
                assert all(row[0] == server.url and row[1] >= 1 and row[2] for row in rows)
                # exact levels are test_controller's: here a busy machine disturbs what is measured
                assert 32 <= max(limit for _, limit, _ in rows) <= 512

    asyncio.run(body())
