"""SIGKILL at every write, sync, rename, unlink and commit: nothing acknowledged is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.manifests import workload


class Zygote:
    """The workload program: one forked child per call."""

    def __init__(self, trace: Path | None = None) -> None:
        environment = dict(os.environ)
        if trace is not None:
            environment["DRAFTMILL_FAILPOINT_TRACE"] = str(trace)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.manifests.workload"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, folder: Path, failpoint: str = "") -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{folder} {failpoint}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def failpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Every failpoint that an undisturbed job reaches, with how often it is reached."""
    folder = tmp_path_factory.mktemp("trace")
    trace = folder / "names"
    tracer = Zygote(trace)
    assert tracer.run(folder / "dataset") == 0
    tracer.close()
    found: dict[str, int] = {}
    for name in trace.read_text().split():
        found[name] = found.get(name, 0) + 1
    return found


def _journal(folder: Path) -> list[str]:
    path = Path(f"{folder}.journal")
    return path.read_text().splitlines() if path.exists() else []


def test_the_job_reaches_every_kind_of_operation(failpoints: dict[str, int]) -> None:
    kinds = {name.split(".")[0] for name in failpoints}
    assert kinds >= {"create", "write", "sync", "rename", "unlink", "syncdir", "commit"}
    assert {"write.completions.before", "write.hidden_states.seal.before"} <= set(failpoints)


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_at_every_failpoint(
    zygote: Zygote, failpoints: dict[str, int], tmp_path: Path, every: int
) -> None:
    cases = []
    for number, (name, count) in enumerate(failpoints.items()):
        # The first, a middle and the last time, in turn: more would test the same moment again.
        hit = (1, (count + 1) // 2, count)[number % 3]
        cases.append(f"{name}@{hit}")
        if name.startswith("write.") and name.endswith(".before"):
            cases.append(f"{name}@{hit}=torn")
    for number, case in enumerate(cases[::every]):
        folder = tmp_path / f"d{number}"
        assert zygote.run(folder, case) == -9, f"{case} was not reached"
        # A second crash while recovering must not make it worse; then the job runs to its end.
        if number % 5 == 0:
            zygote.run(folder, "commit.adopt.before")
        assert zygote.run(folder) == 0, case
        workload.check(folder, _journal(folder), complete=True)
        on_disk = workload.records_on_disk(folder)
        assert len(on_disk) == len(set(on_disk)), f"{case}: stored twice"
        assert len(on_disk) == 2 * (workload.PROMPTS - 2), f"{case}: {len(on_disk)} records"


@pytest.mark.slow
@pytest.mark.parametrize("gone", [("manifest.duckdb",), ("manifest.duckdb", "manifest.parquet")])
def test_kill_then_lose_the_manifest(zygote: Zygote, tmp_path: Path, gone: tuple[str, ...]) -> None:
    for case in ("commit.results.before@4", "commit.results.after@8", "sync.hidden_states.after@3"):
        folder = tmp_path / case
        assert zygote.run(folder, case) == -9
        for name in gone:
            for suffix in ("", ".wal"):
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
        assert zygote.run(folder) == 0
        on_disk = workload.records_on_disk(folder)
        assert len(on_disk) == len(set(on_disk)) == 2 * (workload.PROMPTS - 2)


@pytest.mark.slow
def test_disk_full_at_every_write_leaves_a_dataset(
    zygote: Zygote, failpoints: dict[str, int], tmp_path: Path
) -> None:
    kinds = ("write.", "sync.", "create.")
    names = [name for name in failpoints if name.startswith(kinds) and name.endswith("before")]
    for number, name in enumerate(names):
        folder = tmp_path / f"d{number}"
        assert zygote.run(folder, f"{name}@1=enospc") in (0, 1), name
        assert zygote.run(folder) == 0, name
        workload.check(folder, _journal(folder), complete=True)
