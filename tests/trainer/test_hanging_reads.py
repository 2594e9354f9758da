"""Reads that never come back: said with their place, and no reason not to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from multiprocessing import active_children
from pathlib import Path

import pytest

from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import checkpoint
from draftmill.trainer.interrupt import Interrupted
from draftmill.trainer.loading import data, loader, waiting
from draftmill.trainer.loading.loader import RowLoader
from draftmill.trainer.loop import TrainProgress
from tests.trainer import tiny
from tests.trainer.test_loader import rows_of
from tests.trainer.test_train import Steps, run

WAYS = [
    pytest.param(0, False, id="in line"),
    pytest.param(2, False, id="threads"),
    pytest.param(2, True, id="processes", marks=pytest.mark.slow),
]


# The first row of what a process is asked for at once, so that the rows before it come.
STUCK = 8


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LOOK_UP_S", 0.02)
    monkeypatch.setattr(waiting, "_SAY_EVERY_S", 0.1)
    monkeypatch.setattr(waiting, "_HANGS_S", 0.1)


def hanging_loader(
    workers: int, processes: bool, stop: Callable[[], bool]
) -> tuple[RowLoader, Iterator[data.Row], tiny.MemoryReader]:
    samples = tiny.random_samples(60)
    columns = tiny.columns(samples)
    rows = list(islice(rows_of(columns), 40))
    reader = tiny.MemoryReader(samples)
    reader.stuck = rows[STUCK].members[0]
    source = RowLoader(
        reader,
        columns,
        tiny.SHAPE,
        workers=workers,
        processes=processes,
        prefetch_bytes=1 << 30,
        stop=stop,
    )
    return source, iter(rows), reader


@pytest.mark.parametrize(("workers", "processes"), WAYS)
def test_it_is_said_what_is_waited_for_and_asking_ends_it(
    workers: int, processes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of rows that were not asked to stop before they were there, none is lost."""
    place = "hidden_states/000000 at byte"

    def said() -> list[str]:
        return [each for each in caplog.messages if place in each]

    source, rows, reader = hanging_loader(workers, processes, lambda: len(said()) > 2)
    got = []
    with closing(source.batches(rows)) as batches:
        with pytest.raises(Interrupted):
            got.extend(batch.row.cursor.row for batch in batches)
    assert got == list(range(STUCK))
    for message in said():
        assert "training has waited" in message
        assert f"{place} {reader.stuck} has been read for" in message
    assert active_children() == []
    reader.stuck = -1


@pytest.mark.parametrize(("workers", "processes"), WAYS)
def test_closing_waits_for_no_read_that_hangs(workers: int, processes: bool) -> None:
    source, rows, reader = hanging_loader(workers, processes, lambda: False)
    with closing(source.batches(rows)) as batches:
        got = [batch.row.cursor.row for batch in islice(batches, STUCK)]
    assert got == list(range(STUCK))
    assert active_children() == []
    reader.stuck = -1


PROGRAM = """
import sys

if __name__ == "__main__":
    from tests.trainer import test_hanging_reads as hanging

    source, rows, _ = hanging.hanging_loader(int(sys.argv[1]), sys.argv[2] == "True", lambda: False)
    for number, batch in enumerate(source.batches(rows), 1):
        if number == hanging.STUCK:
            print("hangs now", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "processes"), WAYS)
def test_a_process_ends_with_readers_that_hang(
    tmp_path: Path, workers: int, processes: bool
) -> None:
    """As by the second Ctrl-C, which is a KeyboardInterrupt in the thread that trains."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    home = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, str(program), str(workers), str(processes)],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "hangs now\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert "KeyboardInterrupt" in err
    assert child.returncode == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("hangs_after", [0, 1, 3])
def test_a_run_whose_disk_hangs_is_saved_by_one_signal(
    dataset: Path,
    target: TargetModel,
    tmp_path: Path,
    workers: int,
    hangs_after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, first, rest = Steps(), Steps(), Steps()
    more = {"steps": 6, "checkpoint_every": 3, "decode_workers": workers}
    monkeypatch.setattr(loader, "_AHEAD", 1)
    run(dataset, target, tmp_path / "whole", whole, **more)
    answers = threading.Event()
    real = ShardReader.blocks
    hanging = False

    def blocks(self, location, *, tokens=None):
        if hanging:
            signals.submit_once()
            answers.wait()
        return real(self, location, tokens=tokens)

    def on_progress(progress: TrainProgress) -> None:
        nonlocal hanging
        first(progress)
        hanging = hanging or progress.step == hangs_after

    hanging = hangs_after == 0
    signals = _OneSignal()
    monkeypatch.setattr(ShardReader, "blocks", blocks)
    try:
        report = run(dataset, target, tmp_path / "run", on_progress, **more)
    finally:
        hanging = False
        answers.set()
    assert report.interrupted
    done = checkpoint.latest(tmp_path / "run", ties={})
    assert (0 if done is None else done[0].step) == report.step >= hangs_after
    assert not run(dataset, target, tmp_path / "run", rest, **more).interrupted
    assert first.seen + rest.seen == whole.seen


class _OneSignal:
    """Ctrl-C, once, a moment after it was first wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def submit_once(self) -> None:
        if self._lock.acquire(blocking=False):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
