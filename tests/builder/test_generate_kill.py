"""SIGKILL of the generate stage at random moments: nothing acknowledged lost, nothing twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftmill.manifests.dataset import Dataset
from tests.builder.generation import check_served, messages, new_dataset, states
from tests.fakes.target_server import TargetServer

CLONE = Path(__file__).parents[2]
CONCURRENCY = 16


async def start(path: Path, url: str, **settings: Any) -> Process:
    """A process that generates; its dataset is open when this returns."""
    environment = {**os.environ, "PYTHONPATH": str(CLONE)}
    arguments = (str(path), url, json.dumps(settings))
    command = (sys.executable, "-m", "tests.builder.generate_child", *arguments)
    child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=CLONE, env=environment)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    return child


async def killed_runs(path: Path, prompts: int, kills: int, most_s: float, seed: int) -> None:
    """Kills `kills` runs after a random time, lets the last one end, and checks the promises."""
    rng = random.Random(seed)
    new_dataset(path, prompts)
    async with TargetServer(tokens_per_s=8000.0, sigma=1.0) as server:
        for _ in range(kills):
            child = await start(path, server.url)
            await asyncio.sleep(rng.uniform(0.0, most_s))
            child.send_signal(signal.SIGKILL)
            await child.wait()
        child = await start(path, server.url)
        assert await child.wait() == 0

    acknowledged = [
        int(line) for line in Path(f"{path}.acknowledged").read_text().split("\n") if line
    ]
    assert max(Counter(acknowledged).values()) == 1
    with Dataset.open(path).writer() as writer:
        assert states(writer) == {"generated": prompts}
        assert check_served(path, writer) == prompts
        stored = Counter(row[0] for row in writer.manifest.rows("SELECT id FROM payloads"))
        assert set(acknowledged) <= set(stored)
        assert set(stored.values()) == {1}
    asked = sum(server.count(messages(number)) for number in range(prompts))
    assert asked - prompts <= kills * (CONCURRENCY + 64)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_and_nothing_is_stored_twice(tmp_path: Path) -> None:
    asyncio.run(killed_runs(tmp_path / "d", prompts=200, kills=2, most_s=1.5, seed=os.getpid()))
