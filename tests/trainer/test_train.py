"""Training as a whole on a tiny target: it learns, and it goes on exactly from wherever it died."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from draftmill.manifests.errors import (
    ConfigError,
    DamagedError,
    DatasetError,
    DraftmillError,
    LockedError,
    SettingsMismatch,
)
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import checkpoint
from draftmill.trainer.loop import TrainProgress
from draftmill.trainer.run_folder import locked_run
from draftmill.trainer.runlog import read_log
from draftmill.trainer.settings import TrainSettings
from draftmill.trainer.train import TrainReport, initial_draft, train
from tests.trainer import tiny

pytestmark = pytest.mark.slow

SETTINGS = TrainSettings(
    draft_vocab_size=256,
    max_seq_len=60,
    steps=24,
    lr=5e-3,
    validation=0.2,
    checkpoint_every=8,
    log_every=1,
    decode_workers=1,
    ttt_steps=2,
)


class Steps:
    """What a run reported: step, samples and loss, exactly."""

    def __init__(self, die_at: int | None = None) -> None:
        self.seen: list[tuple[int, tuple[int, ...], float]] = []
        self.die_at = die_at

    def __call__(self, progress: TrainProgress) -> None:
        self.seen.append((progress.step, progress.sample_ids, progress.loss))
        if progress.step == self.die_at:
            raise Killed


class Killed(BaseException):
    """Leaves on disk what a SIGKILL would."""


def run(
    dataset: Path,
    target: TargetModel,
    output: Path,
    on_progress=None,
    *,
    grow=False,
    note=lambda _: None,
    **changes,
) -> TrainReport:
    return train(
        dataset,
        replace(SETTINGS, **changes),
        grow=grow,
        note=note,
        target=target,
        target_layer_ids=tiny.LAYER_IDS,
        output=output,
        on_progress=on_progress,
    )


@pytest.fixture(scope="module")
def whole(
    dataset: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TrainReport, Steps]:
    """A run that nobody interrupted."""
    output = tmp_path_factory.mktemp("whole") / "run"
    steps = Steps()
    return output, run(dataset, target, output, steps), steps


def test_it_learns_and_leaves_a_draft_to_serve(
    whole: tuple[Path, TrainReport, Steps], target: TargetModel
) -> None:
    output, report, steps = whole
    assert (report.step, report.steps, report.interrupted) == (24, 24, False)
    assert report.samples + report.validation_samples == 40
    losses = [loss for _, _, loss in steps.seen]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert report.loss == losses[-1]
    assert report.tokens == sum(27 * len(samples) for _, samples, _ in steps.seen), (
        "every sample has 28 tokens, of which a row holds 27"
    )
    assert 0 < report.coverage <= 1
    assert 0 <= report.waste < 0.2
    assert report.validation["accepted_per_step"] > 0
    assert {"loss", "full_acc_0", "full_acc_1", "cond_acc_1"} <= set(report.validation)
    assert report.best_step in (8, 16, 24)
    config = json.loads((output / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == target.name
    assert checkpoint.resolve_draft(output) == output
    best = checkpoint.folder_of(output, report.best_step)
    assert (best / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


def test_the_log_has_every_step_once(whole: tuple[Path, TrainReport, Steps]) -> None:
    output, _, steps = whole
    entries = read_log(output / "log.jsonl")
    trained = [entry for entry in entries if entry["kind"] == "train"]
    assert [entry["step"] for entry in trained] == list(range(1, 25))
    assert trained[5]["loss"] == pytest.approx(steps.seen[5][2], rel=1e-5)
    assert [e["step"] for e in entries if e["kind"] == "validation"] == [8, 16, 24]
    assert entries[0]["kind"] == "start"
    assert entries[0]["coverage"] > 0


def test_a_finished_run_returns_at_once(
    whole: tuple[Path, TrainReport, Steps], dataset: Path, target: TargetModel
) -> None:
    output, report, _ = whole
    steps = Steps()
    again = run(dataset, target, output, steps)
    assert steps.seen == []
    assert (again.step, again.validation, again.best_step) == (
        24,
        report.validation,
        report.best_step,
    )


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_with_the_same_batches_and_losses(
    whole: tuple[Path, TrainReport, Steps],
    dataset: Path,
    target: TargetModel,
    tmp_path: Path,
) -> None:
    path = shutil.copytree(dataset, tmp_path / "dataset")
    output = tmp_path / "run"
    done: dict[int, tuple[tuple[int, ...], float]] = {}
    for die_at, threads in ((3, 1), (11, 0), (12, 2), (None, 1)):
        steps = Steps(die_at)
        if die_at is None:
            report = run(path, target, output, steps, decode_workers=threads)
        else:
            with pytest.raises(Killed):
                run(path, target, output, steps, decode_workers=threads)
        for step, samples, loss in steps.seen:
            # what is done again after a kill is done in the same way
            assert done.setdefault(step, (samples, loss)) == (samples, loss)
        # the dataset goes on growing while the run is down
        tiny.build_dataset(path, tiny.random_samples(2, seed=die_at or 0))
    wanted = {step: (samples, loss) for step, samples, loss in whole[2].seen}
    assert done == wanted
    assert report.validation == whole[1].validation
    assert (output / "model.safetensors").read_bytes() == (
        whole[0] / "model.safetensors"
    ).read_bytes()
    trained = [e["step"] for e in read_log(output / "log.jsonl") if e["kind"] == "train"]
    assert trained == list(range(1, 25))


def test_grow_takes_new_samples_in_at_the_next_epoch_and_stays_exact(
    whole: tuple[Path, TrainReport, Steps],
    dataset: Path,
    target: TargetModel,
    tmp_path: Path,
) -> None:
    path = shutil.copytree(dataset, tmp_path / "dataset")
    before = Steps(die_at=11)
    with pytest.raises(Killed):
        run(path, target, tmp_path / "run", before, validation=0.2)
    known = {sample for _, samples, _ in whole[2].seen for sample in samples}
    tiny.build_dataset(path, list(tiny.answers(target.folder, 30, seed=9)))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    grown = Steps()
    run(path, target, tmp_path / "run", grown, grow=True)
    steps = {step: samples for step, samples, _ in grown.seen}
    epoch_end = (whole[1].samples + 1) // 2  # two samples fit into a row
    first_new = min(step for step, samples in steps.items() if set(samples) - known)
    assert 9 < epoch_end < first_new < 24
    # up to the end of the epoch that was under way, nothing changed
    assert grown.seen[: epoch_end - 8] == whole[2].seen[8:epoch_end]
    # killed after growing, it goes on by the grown plan without being asked to grow
    died = Steps(die_at=10)
    with pytest.raises(Killed):
        run(path, target, tmp_path / "again", died, grow=True)
    rest = Steps()
    run(path, target, tmp_path / "again", rest)
    assert died.seen + rest.seen[2:] == grown.seen


PROGRAM = """
import sys
from pathlib import Path
from contextlib import suppress
from dataclasses import replace
from draftmill.manifests.target.target import TargetModel
from tests.trainer import test_train, tiny
steps = test_train.Steps()
report = test_train.run(
    Path(sys.argv[1]),
    TargetModel.from_folder(sys.argv[2], name="tests/tiny-llama"),
    Path(sys.argv[3]),
    steps,
)
"""


@pytest.mark.e2e  # a process of its own, which takes torch long to start
def test_sigkill_in_the_middle_of_a_checkpoint(
    whole: tuple[Path, TrainReport, Steps], dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(dataset), str(target.folder), str(output)],
        # the second checkpoint is written, synced, and not yet renamed
        env={**os.environ, "DRAFTMILL_FAILPOINT": "rename.checkpoint.before@2"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoint.checkpoints(output) == [8]
    steps = Steps()
    run(dataset, target, output, steps)
    assert [step for step, _, _ in steps.seen] == list(range(9, 25))
    assert steps.seen == whole[2].seen[8:]
    assert not list((output / "checkpoints").glob(".*"))


def test_sigint_saves_and_the_same_call_goes_on(
    whole: tuple[Path, TrainReport, Steps], dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    output = tmp_path / "run"

    class Interrupting(Steps):
        def __call__(self, progress: TrainProgress) -> None:
            super().__call__(progress)
            if progress.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    first = Interrupting()
    handler = signal.getsignal(signal.SIGINT)
    report = run(dataset, target, output, first)
    assert signal.getsignal(signal.SIGINT) is handler
    assert report.interrupted
    assert report.step == first.seen[-1][0] == 6
    assert checkpoint.checkpoints(output) == [6]
    assert checkpoint.resolve_draft(output) == checkpoint.folder_of(output, 6)
    rest = Steps()
    assert not run(dataset, target, output, rest).interrupted
    assert first.seen + rest.seen == whole[2].seen


def test_grow_says_what_came_of_it(
    whole: tuple[Path, TrainReport, Steps], dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    path = shutil.copytree(dataset, tmp_path / "dataset")
    said: list[str] = []

    def grown(output: Path, die_at: int | None = None, **settings: float) -> str:
        said.clear()
        with suppress(Killed):
            run(path, target, output, Steps(die_at), grow=True, note=said.append, **settings)
        [found] = [each for each in said if each.startswith("--grow: ")]
        return found

    finished = shutil.copytree(whole[0], tmp_path / "finished")
    output = tmp_path / "run"
    settings = {"steps": 0, "epochs": 2, "checkpoint_every": 1}
    with pytest.raises(Killed):
        run(path, target, output, Steps(2), **settings)
    assert grown(output, 3, **settings) == "--grow: the dataset has no new sample to train on"
    tiny.build_dataset(path, tiny.random_samples(6, seed=5))
    found = grown(output, 4, **settings)
    assert re.match(r"--grow: [1-6] new samples from epoch 2 on, \d+ steps", found)
    steps = load_plan_steps(output)
    assert f"{steps} steps" in found
    with pytest.raises(Killed):  # into the last epoch
        run(path, target, output, Steps(steps - 1), **settings)
    tiny.build_dataset(path, tiny.random_samples(6, seed=6))
    found = grown(output, steps, **settings)
    assert "last epoch and takes no more samples in" in found
    found = grown(finished)
    assert "finished (24 steps)" in found
    assert "name another --output" in found
    assert f"--finetune-from {finished}" in found
    said.clear()
    run(path, target, finished, note=said.append)
    assert "this run is finished" in said[-1]


def load_plan_steps(output: Path) -> int:
    return int(
        json.loads(pq.read_schema(output / "plan.parquet").metadata[b"draftmill.plan"])["steps"]
    )


def test_old_checkpoints_go_and_the_best_one_stays(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    report = run(
        dataset, target, tmp_path / "run", checkpoint_every=4, keep_checkpoints=1, steps=16
    )
    assert set(checkpoint.checkpoints(tmp_path / "run")) == {report.best_step, 16}


def test_other_settings_are_refused_by_name(
    whole: tuple[Path, TrainReport, Steps], dataset: Path, target: TargetModel
) -> None:
    with pytest.raises(SettingsMismatch, match=r"lr was 0\.005 and is now 0\.001; seed was 0"):
        run(dataset, target, whole[0], lr=1e-3, seed=3)
    with pytest.raises(SettingsMismatch, match="target was 'tests/tiny-llama'"):
        run(dataset, replace(target, name="other"), whole[0])
    # what cannot change the outcome is free
    run(dataset, target, whole[0], decode_workers=0, log_every=5, keep_checkpoints=9)


def test_a_run_folder_has_one_user(dataset: Path, target: TargetModel, tmp_path: Path) -> None:
    with locked_run(tmp_path / "run"):
        with pytest.raises(LockedError, match="in use by process") as caught:
            run(dataset, target, tmp_path / "run")
    assert caught.value.pid == os.getpid()


def test_a_folder_with_something_else_is_left_alone(dataset: Path, target: TargetModel) -> None:
    with pytest.raises(DatasetError, match="no run"):
        run(dataset, target, dataset)
    with pytest.raises(DatasetError, match="no run"):
        run(dataset, target, target.folder)


def test_layers_that_differ_from_the_hidden_states_are_refused(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=r"of layers \[1, 3, 5, 6\], .* use \[2, 3, 5, 6\]"):
        train(dataset, SETTINGS, target=target, target_layer_ids=(2, 3, 5), output=tmp_path / "run")
    with pytest.raises(ConfigError, match="exactly 3"):
        train(
            dataset, SETTINGS, target=target, target_layer_ids=(1, 2, 3, 5), output=tmp_path / "r"
        )


def test_a_loss_that_is_no_number_stops_the_run(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    bad = tiny.random_samples(2)
    bad[0].states[:] = 0x7FC0  # NaN
    path = tiny.build_dataset(tmp_path / "d", bad).path
    with pytest.raises(DraftmillError, match="The loss is nan at step 1, samples"):
        run(path, target, tmp_path / "run", validation=0.0)


def test_without_validation_the_last_step_is_served(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    report = run(dataset, target, tmp_path / "run", validation=0.0, steps=4, rows_per_step=2)
    assert (report.best_step, report.validation, report.validation_samples) == (None, {}, 0)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    whole: tuple[Path, TrainReport, Steps], dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with pytest.raises(Killed):
        run(dataset, target, output, Steps(die_at=20))
    (checkpoint.folder_of(output, 16) / "training" / "state.pt").write_bytes(b"half")
    steps = Steps()
    run(dataset, target, output, steps)
    assert steps.seen == whole[2].seen[8:]
    (checkpoint.folder_of(output, 24) / "training" / "state.json").write_text("{")
    for step in checkpoint.checkpoints(output)[:-1]:
        shutil.rmtree(checkpoint.folder_of(output, step))
    with pytest.raises(DamagedError, match="No checkpoint of this run can be gone on from"):
        run(dataset, target, output)


def test_checkpoints_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    checkpoint.save(
        tmp_path, checkpoint.Position(step=1), {"weights": Evil()}, lambda folder: None, {}
    )
    with pytest.raises(DamagedError, match="mkdir"):
        checkpoint.load(tmp_path, 1, {})
    assert not (tmp_path / "owned").exists()


def test_the_untrained_draft_can_be_served_for_comparison(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    folder = initial_draft(
        dataset, SETTINGS, target=target, target_layer_ids=tiny.LAYER_IDS, output=tmp_path / "u"
    )
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


def test_nothing_to_serve_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="draftmill train"):
        checkpoint.resolve_draft(tmp_path)
