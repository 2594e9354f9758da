"""However a run of extract ends, no file of its own requests stays in staging."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftmill.builder.extraction import sample, stage
from draftmill.builder.extraction.stage import Layers
from draftmill.builder.progress import Progress, StageReport
from draftmill.manifests.files import folder_bytes
from draftmill.manifests.target.target import TargetModel
from tests.builder.extraction import IDS, make_dataset, run
from tests.fakes.target_server import TargetServer
from tests.fakes.tiny_target import TinyTarget
from tests.trainer.tiny import HIDDEN, LAYER_IDS, LAYERS, save_target

pytestmark = pytest.mark.slow

ROWS = 60
# requests that hang until they are given up, and leave a file a moment after that
LATE = range(20, 24)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for comes; a busy machine may take longer for it than a run waits."""
    monkeypatch.setattr(stage, "LAST_SWEEP_S", 60.0)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def end_of_run(
    path: Path,
    staging: Path,
    *,
    server_options: dict[str, Any] | None = None,
    others: list[str] | None = None,
    late: list[str] | None = None,
    **options: Any,
) -> tuple[StageReport | BaseException, int]:
    """How a run ended in which four requests hang, and how many late files were written. `others`
    are faults of all rows after those."""
    dataset = make_dataset(path, [60] * ROWS)

    async def go() -> tuple[StageReport | BaseException, int]:
        async with TargetServer(staging=str(staging), **(server_options or {})) as server:
            for number in LATE:
                server.plan(IDS[path][number], late or ["late"])
            for number in range(LATE.stop, ROWS + 1):
                server.plan(IDS[path][number], others or [])
            before = set(os.listdir(staging))
            try:
                ended: StageReport | BaseException = await run(
                    dataset, server.url, staging, **options
                )
            except RuntimeError as error:
                ended = error
            assert set(os.listdir(staging)) == before
            written = server.staged.files_written
        return ended, written

    return asyncio.run(go())


def late_files(written: int, report: StageReport) -> int:
    return written - report.outcomes["extracted"]


def when_done(done: int, action: Callable[[], None]) -> Callable[[Progress], None]:
    called: list[int] = []

    def on_progress(progress: Progress) -> None:
        if progress.done >= done and not called:
            called.append(progress.done)
            action()

    return on_progress


def test_by_too_many_bad_samples(tmp_path: Path, staging: Path) -> None:
    ended, written = end_of_run(tmp_path / "d", staging, others=["http_400"], stop_after_bad=3)
    assert isinstance(ended, StageReport)
    assert "samples in a row were bad" in (ended.stopped or "")
    assert late_files(written, ended) == len(LATE)
    assert os.listdir(staging) == []


def test_by_a_server_that_is_none(tmp_path: Path, staging: Path) -> None:
    ended, written = end_of_run(tmp_path / "d", staging, others=["no_path"])
    assert isinstance(ended, StageReport)
    assert "answers without hidden states" in (ended.stopped or "")
    assert late_files(written, ended) >= len(LATE)
    assert os.listdir(staging) == []


def test_by_the_budget(tmp_path: Path, staging: Path) -> None:
    """Then requests in flight are waited for; these are given up at their deadline."""
    limit = folder_bytes(make_dataset(tmp_path / "measure", [60] * ROWS).path) + 800_000
    ended, written = end_of_run(
        tmp_path / "d",
        staging,
        limit_bytes=limit,
        headroom_bytes=0,
        request_timeout_s=2.0,
    )
    assert isinstance(ended, StageReport)
    assert ended.over_budget
    assert late_files(written, ended) >= len(LATE)
    assert os.listdir(staging) == []


def test_by_ctrl_c(tmp_path: Path, staging: Path) -> None:
    ended, written = end_of_run(
        tmp_path / "d",
        staging,
        others=["late"],
        stop_grace_s=0.1,
        on_progress=when_done(8, lambda: os.kill(os.getpid(), signal.SIGINT)),
    )
    assert isinstance(ended, StageReport)
    assert ended.interrupted
    assert late_files(written, ended) >= len(LATE)
    assert os.listdir(staging) == []


def test_by_a_fault_of_draftmill(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in = sample.take_in

    def fails_later(*arguments: Any) -> Any:
        if len(IDS[tmp_path / "d"][30]) and (arguments[2] == IDS[tmp_path / "d"][30]).all():
            raise RuntimeError("a fault")
        return take_in(*arguments)

    monkeypatch.setattr(sample, "take_in", fails_later)
    ended, written = end_of_run(tmp_path / "d", staging)
    assert str(ended) == "a fault"
    assert written > len(LATE)
    assert os.listdir(staging) == []


def test_by_the_canary(tmp_path: Path, staging: Path) -> None:
    """The look that stops the run comes while other requests, and looks, are in flight."""
    folder = save_target(tmp_path / "target")
    layer_ids = (*LAYER_IDS, LAYERS)
    tiny = TinyTarget(folder, layer_ids, other=save_target(tmp_path / "wrong", seed=6))
    tiny.fault, tiny.right_for = "last_is_one_before", 24
    ended, written = end_of_run(
        tmp_path / "d",
        staging,
        server_options={"target": tiny, "hidden": HIDDEN},
        layers=Layers(layer_ids=layer_ids, hidden_size=HIDDEN),
        target=TargetModel.from_folder(folder),
        canary_every=8,
        canary_memory="0",
    )
    assert isinstance(ended, StageReport)
    assert "are in doubt" in (ended.stopped or "")
    assert late_files(written, ended) >= len(LATE)
    assert os.listdir(staging) == []
