"""Ctrl-C during a validation: it stops after the batch, and the run makes up for it later."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import checkpoint, validate
from draftmill.trainer.runlog import read_log
from draftmill.trainer.train import TrainReport
from tests.trainer.test_train import Steps, run

pytestmark = pytest.mark.slow

MORE = {"checkpoint_every": 3, "steps": 6, "max_seq_len": 28}  # a row is a sample


class Validations:
    """Counts the batches of validations, and sends this process a signal at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int = 0) -> None:
        self.count, self.at = 0, at
        self.real = validate.row_acceptance
        monkeypatch.setattr(validate, "row_acceptance", self)

    def __call__(self, *given):
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return self.real(*given)


@pytest.fixture(scope="module")
def whole(
    dataset: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainReport, Steps]:
    output = tmp_path_factory.mktemp("whole") / "run"
    steps = Steps()
    report = run(dataset, target, output, steps, **MORE)
    assert report.validation_samples > 4
    return output, report, steps


def logged(output: Path) -> list[dict]:
    return [each for each in read_log(output / "log.jsonl") if each["kind"] == "validation"]


@pytest.mark.parametrize("number", [1, 2], ids=["first", "last"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_stops_at_once_and_is_made_up_for(
    whole: tuple[Path, TrainReport, Steps],
    dataset: Path,
    target: TargetModel,
    tmp_path: Path,
    number: int,
    again: bool,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, steps = tmp_path / "run", Steps()
    each = whole[1].validation_samples
    seen = Validations(monkeypatch, at=(number - 1) * each + 2)
    report = run(dataset, target, output, steps, decode_workers=workers, **MORE)
    assert report.interrupted
    assert report.step == 3 * number
    assert seen.count == seen.at, "the batch that was under way, and no other"
    assert checkpoint.checkpoints(output)[-1] == 3 * number
    assert len(logged(output)) == number - 1
    assert not (output / "model.safetensors").exists()
    if again:
        seen.count, seen.at = 0, 1
        report = run(dataset, target, output, steps, decode_workers=workers, **MORE)
        assert report.interrupted
        assert (report.step, seen.count) == (3 * number, 1)
    seen.count = seen.at = 0
    report = run(dataset, target, output, steps, decode_workers=workers, **MORE)
    assert not report.interrupted
    assert seen.count == (3 - number) * each
    assert steps.seen == whole[2].seen
    assert logged(output) == logged(whole[0])
    assert report.validation == whole[1].validation
    for name in ("model.safetensors", "README.md"):
        assert (output / name).read_bytes() == (whole[0] / name).read_bytes()
    # and nothing is owed any more
    seen.count = 0
    said: list[str] = []
    run(dataset, target, output, note=said.append, **MORE)
    assert seen.count == 0
    assert "this run is finished" in said[-1]
