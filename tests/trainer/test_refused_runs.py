"""A run that is refused leaves nothing that was not there before, whatever it is refused for."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError, LockedError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.run_folder import locked_run
from draftmill.trainer.settings import Finetune, TrainSettings
from draftmill.trainer.train import initial_draft, train
from tests.trainer import tiny
from tests.trainer.test_match import made_with, save_tokenizer

SETTINGS = TrainSettings(
    draft_vocab_size=256, max_seq_len=60, steps=2, validation=0.2, decode_workers=0, ttt_steps=2
)


@dataclass
class Run:
    """What `train` is called with; each fault changes something of it."""

    dataset: Path
    target: TargetModel
    scratch: Path
    layer_ids: tuple[int, ...] = tiny.LAYER_IDS
    settings: TrainSettings = SETTINGS
    more: dict[str, Any] = field(default_factory=dict)

    def start(self, output: Path) -> None:
        train(
            self.dataset,
            self.settings,
            target=self.target,
            target_layer_ids=self.layer_ids,
            output=output,
            **self.more,
        )


def other_model(run: Run) -> None:
    made_with(run.dataset, "generate", model="org/another")


def other_layers(run: Run) -> None:
    run.layer_ids = (2, 3, 5)


def other_tokenizer(run: Run) -> None:
    folder = Path(shutil.copytree(run.target.folder, run.scratch / "t"))
    save_tokenizer(folder, "y")
    run.target = replace(run.target, folder=folder)


def no_dataset(run: Run) -> None:
    run.dataset = run.scratch / "nowhere"


def nothing_extracted(run: Run) -> None:
    run.dataset = Dataset.create(run.scratch / "empty", "# empty\n").path


def all_cut_away(run: Run) -> None:
    """Prompts of eight tokens and nothing of the answers behind them."""
    samples = [
        replace(
            sample,
            prompt=np.zeros(8, np.int32),
            states=sample.states[[0] * (8 + len(sample.completion))],
        )
        for sample in tiny.random_samples(4)
    ]
    run.dataset = tiny.build_dataset(run.scratch / "cut", samples).path
    run.settings = replace(SETTINGS, max_seq_len=8)


def too_large_vocabulary(run: Run) -> None:
    run.settings = replace(SETTINGS, draft_vocab_size=10_000)


def no_weights(run: Run) -> None:
    folder = Path(shutil.copytree(run.target.folder, run.scratch / "t"))
    (folder / "model.safetensors").unlink()
    run.target = replace(run.target, folder=folder)


def rubbish_to_finetune(run: Run) -> None:
    folder = run.scratch / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    run.more["finetune"] = Finetune(checkpoint=folder)


def sharing_alone(run: Run) -> None:
    run.settings = replace(SETTINGS, fsdp=True)


def no_tensorboard(run: Run) -> None:
    run.settings = replace(SETTINGS, tensorboard=True)
    run.more["no_tensorboard"] = True


def no_room_for_settings(run: Run) -> None:
    files.arm("write.run.before=enospc")


def no_room_for_vocabulary(run: Run) -> None:
    """The dataset's own, which is written first, is no loss."""
    files.arm("write.vocab.before@2=enospc")


FAULTS = [
    other_model,
    other_layers,
    other_tokenizer,
    no_dataset,
    nothing_extracted,
    all_cut_away,
    too_large_vocabulary,
    no_weights,
    rubbish_to_finetune,
    sharing_alone,
    no_tensorboard,
    no_room_for_settings,
    no_room_for_vocabulary,
]


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("place", ["new", "deep", "empty", "used"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_is_left(
    dataset: Path,
    target: TargetModel,
    tmp_path: Path,
    place: str,
    fault: Callable[[Run], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Path(shutil.copytree(dataset, tmp_path / "d", ignore=shutil.ignore_patterns("vocab")))
    (own / "vocab").mkdir()
    (tmp_path / "scratch").mkdir()
    run = Run(own, target, tmp_path / "scratch")
    home = tmp_path / "home"
    output = home / "a" / "b" / "run" if place == "deep" else home / "run"
    (home if place in ("new", "deep") else output).mkdir(parents=True)
    if place == "used":
        (output / "notes.txt").write_text("mine")
        (output / "vocab").mkdir()
        (output / "vocab" / "words.txt").write_text("mine, too")
    before = contents(home)
    fault(run)
    if run.more.pop("no_tensorboard", False):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    try:
        with pytest.raises(DraftmillError):
            run.start(output)
    finally:
        files.arm("")
    assert contents(home) == before


@pytest.mark.parametrize("name", ["config.toml", "config.json"])
def test_a_folder_of_something_else_stays_as_it_is(
    dataset: Path, target: TargetModel, tmp_path: Path, name: str
) -> None:
    """A dataset, or a model: whose name was written by mistake."""
    output = tmp_path / "other"
    output.mkdir()
    (output / name).write_text("x")
    with pytest.raises(DraftmillError, match="no run"):
        Run(dataset, target, tmp_path).start(output)
    assert contents(output) == {name: b"x"}
    (tmp_path / "file").write_text("x")
    with pytest.raises(DraftmillError, match="cannot be written"):
        Run(dataset, target, tmp_path).start(tmp_path / "file")
    with pytest.raises(DraftmillError, match="cannot be written"):
        Run(dataset, target, tmp_path).start(tmp_path / "file" / "below")


def test_a_run_that_is_refused_its_settings_stays_as_it_is(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    run = Run(dataset, target, tmp_path)
    run.start(tmp_path / "run")
    before = contents(tmp_path / "run")
    for changed in (
        replace(SETTINGS, lr=0.5),
        replace(SETTINGS, steps=9),
        replace(SETTINGS, seed=1),
    ):
        run.settings = changed
        with pytest.raises(DraftmillError, match="other settings"):
            run.start(tmp_path / "run")
    # the lock is not taken from whoever has it, either
    with locked_run(tmp_path / "run"), pytest.raises(LockedError):
        run.start(tmp_path / "run")
    assert {**contents(tmp_path / "run"), ".lock": b""} == {**before, ".lock": b""}


def test_an_interrupt_before_the_first_step_leaves_nothing(
    dataset: Path, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert json.loads((tmp_path / "run" / "run.json").read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr("draftmill.trainer.train.create_draft", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Run(dataset, target, tmp_path).start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_baseline_that_is_refused_leaves_nothing(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(target.folder, tmp_path / "t"))
    (folder / "model.safetensors").unlink()
    for changed in (replace(target, folder=folder), target):
        with pytest.raises(DraftmillError):
            initial_draft(
                dataset,
                SETTINGS if changed is not target else replace(SETTINGS, draft_vocab_size=10_000),
                target=changed,
                target_layer_ids=tiny.LAYER_IDS,
                output=tmp_path / "base",
            )
        assert not (tmp_path / "base").exists()
