"""The run's log, and what TensorBoard is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftmill.manifests.errors import ConfigError
from draftmill.trainer.runlog import RunLog, read_log


@pytest.mark.slow
def test_tensorboard_sees_every_figure_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path / "log.jsonl", after_step=0, tensorboard=tmp_path / "board")
    for step in (1, 2, 3):
        log.write("train", step, loss=1.0 / step, lr=0.1)
    log.write("validation", 3, full_acc_0=0.5)
    log.close()
    # step 3 was lost by a kill and is done again
    log = RunLog(tmp_path / "log.jsonl", after_step=2, tensorboard=tmp_path / "board")
    log.write("train", 3, loss=0.25, lr=0.1)
    log.write("end", 3, interrupted=False)
    log.close()
    seen = EventAccumulator(str(tmp_path / "board"))
    seen.Reload()
    assert set(seen.Tags()["scalars"]) >= {"train/loss", "train/lr"}
    losses = {event.step: event.value for event in seen.Scalars("train/loss")}
    assert losses == pytest.approx({1: 1.0, 2: 0.5, 3: 0.25})
    assert [entry["step"] for entry in read_log(tmp_path / "log.jsonl")] == [1, 2, 3, 3]


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        RunLog(tmp_path / "log.jsonl", after_step=0, tensorboard=tmp_path / "board")
    RunLog(tmp_path / "log.jsonl", after_step=0).close()
