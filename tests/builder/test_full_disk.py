"""A disk that is full at some write while the budget is nearly used up: it holds, and ends."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path

import pytest

from draftmill.builder.progress import StageReport
from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError
from draftmill.manifests.files import folder_bytes
from tests.builder.extraction import look, make_dataset, run
from tests.fakes.target_server import TargetServer

pytestmark = pytest.mark.slow
SAMPLES = 30
FAULTS = ("no_file", "truncated_file", "drop", "wrong_length", "http_503")


class Watcher(threading.Thread):
    """Looks at the sizes all the time, in a thread of its own."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(daemon=True)
        self.peaks: list[int] = []
        self._folders = folders
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.is_set():
            self.peaks.append(sum(map(folder_bytes, self._folders)))
            time.sleep(0.001)

    def stop(self) -> None:
        self._done.set()
        self.join()


def extract_watched(
    dataset: Dataset,
    staging: Path,
    watcher: Watcher,
    *,
    limit_bytes: int | None,
    fault_rate: float,
) -> StageReport | DraftmillError:
    async def go() -> StageReport:
        rates = dict.fromkeys(FAULTS, fault_rate)
        async with TargetServer(staging=str(staging), faults=rates) as server:
            return await run(
                dataset,
                server.url,
                staging,
                limit_bytes=limit_bytes,
                headroom_bytes=3 << 20,
                lock_timeout_s=0.2,
                stop_after_bad=0,
            )

    watcher.start()
    try:
        return asyncio.run(go())
    except DraftmillError as error:
        return error  # the disk was full when the dataset was opened or closed
    finally:
        watcher.stop()


def finish(dataset: Dataset, staging: Path) -> None:
    """With room and without faults, what is left is extracted, nothing twice, nothing lost."""
    with dataset.writer() as writer:
        left = [
            row[0]
            for row in writer.manifest.rows(
                "SELECT id FROM state WHERE state IN ('failed', 'timed_out', 'rejected')"
            )
        ]
        with writer.manifest.transaction("retry"):
            writer.manifest.revert(left, "retried", "test", None)

    async def go() -> None:
        async with TargetServer(staging=str(staging)) as server:
            await run(dataset, server.url, staging, headroom_bytes=3 << 20)

    asyncio.run(go())
    assert look(dataset).states == {"extracted": SAMPLES}
    assert os.listdir(staging) == []


@pytest.mark.parametrize("seed", range(2))
def test_the_budget_holds_when_writes_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The disk is full at some write or sync, with random sizes and a server that fails often."""
    rng = random.Random(seed)
    names = ("write.hidden_states", "sync.hidden_states", "create.hidden_states", "write.status")
    point = f"{rng.choice(names)}.before@{rng.randrange(1, 12)}=enospc"
    dataset = make_dataset(tmp_path / "d", [rng.randrange(20, 900) for _ in range(SAMPLES)])
    staging = tmp_path / "staging"
    staging.mkdir()
    limit = folder_bytes(dataset.path) + rng.randrange(4 << 20, 6 << 20)
    files._hits.clear()
    monkeypatch.setenv("DRAFTMILL_FAILPOINT", point)
    watcher = Watcher([dataset.path, staging])
    extract_watched(dataset, staging, watcher, limit_bytes=limit, fault_rate=0.05)
    monkeypatch.delenv("DRAFTMILL_FAILPOINT")
    assert len(watcher.peaks) > 10
    assert max(watcher.peaks) <= limit
    finish(dataset, staging)
