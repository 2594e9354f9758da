"""A disk that fills up under a run: one error, the checkpoint before stays, and the run goes on."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from draftmill.manifests import files
from draftmill.manifests.errors import BudgetError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import checkpoint
from draftmill.trainer.convert import convert_draft
from draftmill.trainer.loop import TrainProgress
from draftmill.trainer.runlog import read_log
from tests.trainer.test_train import Killed, Steps, run

pytestmark = pytest.mark.slow

MORE = {"checkpoint_every": 2, "steps": 6}


@pytest.fixture(scope="module")
def whole(dataset: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """A run with room enough."""
    steps = Steps()
    run(dataset, target, tmp_path_factory.mktemp("whole") / "run", steps, **MORE)
    return steps


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    files.arm("")


@contextmanager
def small_files() -> Iterator[Callable[[int], None]]:
    """Gives what limits the size of files: libraries make of it what they do of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_up(path: Path) -> None:
    """From now on this file is on a full disk, for whoever has it open and whoever opens it."""
    full = os.open("/dev/full", os.O_WRONLY)
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{number}") == str(path):
                os.dup2(full, int(number))
    os.close(full)
    path.unlink()
    path.symlink_to("/dev/full")


class Filling(Steps):
    """Fills the disk of a file after the third step."""

    def __init__(self, output: Path, pattern: str) -> None:
        super().__init__()
        self.output, self.pattern = output, pattern

    def __call__(self, progress: TrainProgress) -> None:
        super().__call__(progress)
        if progress.step == 3:
            [path] = self.output.glob(self.pattern)
            self.kept = path.read_bytes()
            self.path = path
            fill_up(path)

    def make_room(self) -> None:
        """The file as a full disk leaves it: what was in it before."""
        self.path.unlink()
        self.path.write_bytes(self.kept)


def assert_goes_on(dataset: Path, target: TargetModel, output: Path, whole: Steps) -> None:
    found = checkpoint.latest(output, ties={})
    done = 0 if found is None else found[0].step
    rest = Steps()
    run(dataset, target, output, rest, **MORE)
    assert rest.seen == whole.seen[done:]
    trained = [each["step"] for each in read_log(output / "log.jsonl") if each["kind"] == "train"]
    assert trained == [1, 2, 3, 4, 5, 6]
    assert (output / "README.md").exists()
    assert not list(output.glob(".*.tmp"))


@pytest.mark.parametrize("form", ["speculators", "flat"])
@pytest.mark.parametrize("most_bytes", [0, 1 << 10, 300_000, 700_000])
def test_while_a_checkpoint_is_written(
    whole: Steps,
    dataset: Path,
    target: TargetModel,
    tmp_path: Path,
    most_bytes: int,
    form: str,
) -> None:
    output = tmp_path / "run"
    steps = Steps()

    with small_files() as limit:

        def small_after_the_third(progress: TrainProgress) -> None:
            steps(progress)
            if progress.step == 3:
                # the log is to be written still
                limit(max(most_bytes, (output / "log.jsonl").stat().st_size + 2000))

        with pytest.raises(BudgetError, match=r"run: .*the same command goes on") as caught:
            run(dataset, target, output, small_after_the_third, checkpoint_format=form, **MORE)
    assert caught.value.exit_code == 3
    assert checkpoint.checkpoints(output) == [2]
    # half of a checkpoint would keep the disk full
    assert not list((output / "checkpoints").glob(".*"))
    assert_goes_on(dataset, target, output, whole)


# TensorBoard's thread prints what it hands on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("pattern", ["log.jsonl", "tensorboard/events.*"])
def test_while_the_log_is_written(
    whole: Steps, dataset: Path, target: TargetModel, tmp_path: Path, pattern: str
) -> None:
    output = tmp_path / "run"
    filling = Filling(output, pattern)
    with pytest.raises(BudgetError, match=r"No space left on device.*the same command goes on"):
        run(dataset, target, output, filling, tensorboard="board" in pattern, **MORE)
    assert filling.seen == whole.seen[: len(filling.seen)]
    filling.make_room()
    assert_goes_on(dataset, target, output, whole)


@pytest.mark.parametrize("name", ["run", "plan", "vocab", "log", "draft", "checkpoint"])
def test_at_every_file_that_is_written_whole(
    whole: Steps, dataset: Path, target: TargetModel, tmp_path: Path, name: str
) -> None:
    output = tmp_path / "run"
    traced = tmp_path / "trace"
    files.arm("", str(traced))
    run(dataset, target, tmp_path / "traced", **MORE)
    files.arm("")
    reached = dict.fromkeys(traced.read_text().split())
    points = [each for each in reached if each.split(".")[1:] == [name, "before"]]
    assert points or name == "log"  # which is written whole when a run goes on
    for point in points or ["write.log.before"]:
        files.arm(f"{point}=enospc")
        if name == "log":
            with pytest.raises(Killed):
                run(dataset, target, output, Steps(die_at=3), **MORE)
        with pytest.raises(BudgetError, match="No space left on device"):
            run(dataset, target, output, **MORE)
        files.arm("")
    assert_goes_on(dataset, target, output, whole)


@pytest.mark.parametrize("point", ["write.card.before", "sync.plot.before", "rename.plot.before"])
def test_without_room_for_card_and_plot_the_draft_is_there(
    dataset: Path, target: TargetModel, tmp_path: Path, point: str
) -> None:
    output = tmp_path / "run"
    said: list[str] = []
    files.arm(f"{point}=enospc")
    report = run(dataset, target, output, note=said.append, **MORE)
    assert not report.interrupted
    assert "No space left on device. The draft is complete but for" in said[-1]
    assert not (output / "README.md").exists()
    assert not list(output.glob(".*.tmp"))
    run(dataset, target, output, **MORE)
    assert (output / "README.md").exists()
    assert (output / "training.png").exists()


def test_a_conversion_without_room_leaves_nothing(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    run(dataset, target, tmp_path / "run", **MORE)
    (tmp_path / "out").mkdir()
    with small_files() as limit:
        limit(10_000)
        with pytest.raises(BudgetError, match="nothing was written"):
            convert_draft(tmp_path / "run", tmp_path / "out" / "flat", "flat")
    assert not list((tmp_path / "out").iterdir())
