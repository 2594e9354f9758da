"""A budget and a disk that fill up while a stage runs: the budget holds, and the run ends."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftmill.builder.budget import Budget
from draftmill.builder.generation.room import most_stored_bytes
from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.generation.stage import generate
from draftmill.builder.progress import StageReport
from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError
from draftmill.manifests.files import folder_bytes
from draftmill.manifests.writer import DatasetWriter
from tests.builder.extraction import look, make_dataset, run
from tests.builder.generation import QUICK, check_served, prompt, states, writer_of
from tests.fakes.target_server import TargetServer

pytestmark = pytest.mark.slow
SAMPLES = 30
FAULTS = ("no_file", "truncated_file", "drop", "wrong_length", "http_503")


class Watcher(threading.Thread):
    """Looks at the sizes all the time, in a thread of its own; fills the disk now and then.

    However fast a run is, it looks after each of the run's own file operations, and one of the
    first of them finds the disk full.
    """

    def __init__(self, folders: list[Path], ballast: Path | None, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.peaks: list[int] = []
        self._folders = folders
        self._ballast = ballast
        self._rng = rng
        self._left = rng.randrange(2, 20)
        self.fills = 0
        self._wanted, self._full = threading.Event(), threading.Event()
        self._done = threading.Event()

    def start(self) -> None:
        files.observer = self._operation
        super().start()

    def run(self) -> None:
        while not self._done.is_set():
            self._look()
            if self._ballast is not None and (self._wanted.is_set() or self._rng.random() < 0.02):
                self._fill(self._ballast)
            time.sleep(0.001)

    def _look(self) -> None:
        self.peaks.append(sum(map(folder_bytes, self._folders)))

    def _operation(self, *_: object) -> None:
        self._look()
        self._left -= 1
        if self._ballast is not None and self._left == 0:
            self._full.clear()
            self._wanted.set()
            assert self._full.wait(60)

    def _fill(self, ballast: Path) -> None:
        free = shutil.disk_usage(ballast.parent).free
        with ballast.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, free - self._rng.randrange(200_000)))
            except OSError:
                pass  # somebody was faster, which is as good
        self.fills += 1
        self._wanted.clear()
        self._full.set()
        time.sleep(self._rng.random() * 0.05)
        ballast.unlink()

    def stop(self) -> None:
        files.observer = None
        self._done.set()
        self.join()
        if self._ballast is not None:
            self._ballast.unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "draftmill-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"no right to mount a disk: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


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


@pytest.mark.parametrize("seed", range(3))
def test_a_full_disk_and_a_budget_on_a_small_disk(small_disk: Path, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(20, 900) for _ in range(SAMPLES)]
    dataset = make_dataset(small_disk / "d", lengths)
    staging = small_disk / "staging"
    staging.mkdir()
    limit = folder_bytes(dataset.path) + rng.randrange(4 << 20, 6 << 20)
    watcher = Watcher([dataset.path, staging], small_disk / "ballast", rng)
    extract_watched(dataset, staging, watcher, limit_bytes=limit, fault_rate=0.05)
    assert watcher.fills > 0
    assert max(watcher.peaks) <= limit
    finish(dataset, staging)


@pytest.mark.parametrize(
    ("point", "most"),
    [
        ("create.hidden_states", 3),
        ("write.hidden_states", 8),
        ("sync.hidden_states", 4),
        ("write.hidden_states.seal", 2),
        ("rename.hidden_states.seal", 2),
        ("write.status", 2),
    ],
)
def test_the_budget_holds_when_writes_fail(tmp_path: Path, point: str, most: int) -> None:
    """The same where nothing can be mounted: the disk is full at some write or sync."""
    rng = random.Random(point)
    failpoint = f"{point}.before@{rng.randint(1, most)}=enospc"
    dataset = make_dataset(tmp_path / "d", [rng.randrange(20, 900) for _ in range(SAMPLES)])
    staging = tmp_path / "staging"
    staging.mkdir()
    limit = folder_bytes(dataset.path) + rng.randrange(4 << 20, 6 << 20)
    watcher = Watcher([dataset.path, staging], None, rng)
    files.arm(failpoint)
    try:
        extract_watched(dataset, staging, watcher, limit_bytes=limit, fault_rate=0.05)
        assert files._armed is not None
        assert files._armed.left <= 0, "the disk was never full"
    finally:
        files.arm("")
    assert len(watcher.peaks) > 10
    assert max(watcher.peaks) <= limit
    finish(dataset, staging)


@pytest.mark.parametrize(
    "point",
    ["create.completions.before@1", "write.completions.before@3", "sync.completions.before@2"],
)
def test_generation_ends_when_rows_wait_for_room_that_will_not_come(
    tmp_path: Path, point: str
) -> None:
    """A failed commit keeps the room of its rows, and those that wait for it must hear of that."""

    async def go(writer: DatasetWriter, budget: Budget) -> StageReport:
        async with TargetServer() as server:
            settings = GenerateSettings(**QUICK)
            stage = generate(writer, settings, [server.url], budget=budget)
            return await asyncio.wait_for(stage, 60)

    with writer_of(tmp_path / "d", 60) as writer:
        used = folder_bytes(tmp_path / "d")
        rows = 5 * most_stored_bytes(prompt(1).conversation, QUICK["max_completion_tokens"])
        budget = Budget(
            limit_bytes=used + (4 << 20) + rows, dataset=tmp_path / "d", headroom_bytes=4 << 20
        )
        files.arm(f"{point}=enospc")
        try:
            report = asyncio.run(go(writer, budget))
        finally:
            files.arm("")
        assert report.over_budget
        assert "No space left" in str(report.stopped)
        found = states(writer)  # what fitted is kept
        assert found["pending"] >= 55
        assert found["pending"] + found.get("generated", 0) == 60
    with Dataset.open(tmp_path / "d").writer() as writer:
        asyncio.run(go(writer, Budget(limit_bytes=None, dataset=tmp_path / "d")))
        assert states(writer) == {"generated": 60}
        assert check_served(tmp_path / "d", writer) == 60
