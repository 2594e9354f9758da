"""Extraction that is killed: at random moments and at every step of a commit, again and again."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from draftmill.manifests.dataset import Dataset
from tests.builder.extraction import look, make_dataset, run_in_process
from tests.fakes.target_server import TargetServer

# The short forms run with every change, the long ones with everything that takes its time.
LONG = pytest.mark.slow

# Forked from a server that has everything imported: a process is there in milliseconds.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.builder.extraction"])


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


def start(
    dataset: Dataset, url: str, staging: Path, environment: dict[str, str], **settings: Any
) -> BaseProcess:
    arguments = (str(dataset.path), url, str(staging), environment, settings)
    process = processes.Process(target=run_in_process, args=arguments)
    process.start()
    return process


async def ended(process: BaseProcess) -> int | None:
    await asyncio.to_thread(process.join, 120)
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=LONG)])
def test_killed_at_random_moments(tmp_path: Path, staging: Path, kills: int) -> None:
    """Nothing is lost, nothing stored twice, and what is in flight is all that is asked again."""
    samples, concurrency = 20 + 10 * kills, 4
    dataset = make_dataset(tmp_path / "d", [40 + n % 50 for n in range(samples)])
    rng = random.Random(1)

    async def go() -> TargetServer:
        async with TargetServer(staging=str(staging), latency_s=0.01) as server:
            for number in range(1, kills + 1):
                process = start(dataset, server.url, staging, {}, concurrency=concurrency)
                before = sum(server.requests.values())
                work = rng.randrange(0, 14)
                # the other process gives no event
                while (  # noqa: ASYNC110
                    process.is_alive() and sum(server.requests.values()) < before + work
                ):
                    await asyncio.sleep(0.002)
                await asyncio.sleep(rng.random() * 0.05)
                process.kill()
                await ended(process)
                assert sum(server.requests.values()) <= samples + number * (concurrency + 64)
            process = start(dataset, server.url, staging, {}, concurrency=concurrency)
            assert await ended(process) == 0
            return server

    server = asyncio.run(go())
    seen = look(dataset)
    assert seen.states == {"extracted": samples}
    assert len(server.requests) == samples
    assert os.listdir(staging) == []


def reached(tmp_path: Path, staging: Path) -> list[str]:
    """The failpoints of one whole run, in order, without those of opening and closing twice."""
    dataset = make_dataset(tmp_path / "trace", [60] * 8)
    trace = tmp_path / "trace.txt"

    async def go() -> None:
        async with TargetServer(staging=str(staging)) as server:
            environment = {"DRAFTMILL_FAILPOINT_TRACE": str(trace)}
            assert await ended(start(dataset, server.url, staging, environment)) == 0

    asyncio.run(go())
    return list(dict.fromkeys(trace.read_text().split()))


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=LONG)])
def test_killed_at_every_step_of_a_commit(tmp_path: Path, staging: Path, step: int) -> None:
    names = [
        name
        for name in reached(tmp_path, staging)
        if "hidden_states" in name or name.startswith("commit.results")
    ]
    assert len(names) >= 8
    names = names[::step]
    dataset = make_dataset(tmp_path / "d", [60] * (3 * len(names)))

    async def go() -> None:
        async with TargetServer(staging=str(staging)) as server:
            for name in names:
                process = start(
                    dataset, server.url, staging, {"DRAFTMILL_FAILPOINT": name}, concurrency=3
                )
                assert await ended(process) in (-9, 0), name
            assert await ended(start(dataset, server.url, staging, {})) == 0

    asyncio.run(go())
    assert look(dataset).states == {"extracted": 3 * len(names)}
    assert os.listdir(staging) == []
