"""Files of another run, or of this one as it was before: one error that names them, nothing done.

Each is whole, so that no checksum of its own tells.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from draftmill.manifests.errors import DraftmillError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import checkpoint
from draftmill.trainer.checkpoint import folder_of
from tests.trainer import tiny
from tests.trainer.test_refused_runs import contents
from tests.trainer.test_train import Killed, Steps, run

pytestmark = pytest.mark.slow

MORE: dict[str, Any] = {"checkpoint_every": 2, "steps": 6}
MAPPING = "vocab/mapping.safetensors"
DRAFT = ("model.safetensors", "config.json")


def died(dataset: Path, target: TargetModel, output: Path, at: int = 5, **changes: Any) -> Path:
    with pytest.raises(Killed):
        run(dataset, target, output, Steps(die_at=at), **{**MORE, **changes})
    return output


@pytest.fixture(scope="module")
def runs(
    dataset: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The same five steps: as they are, with another seed, and of other data."""
    folder = tmp_path_factory.mktemp("runs")
    other = tiny.build_dataset(
        folder / "data", list(tiny.answers(target.folder, 40, length=20, seed=9))
    )
    return {
        "run": died(dataset, target, folder / "run"),
        "seed": died(dataset, target, folder / "seed", seed=3),
        "data": died(other.path, target, folder / "data-run"),
    }


def put(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.rmtree(to)
        shutil.copytree(source, to)
    else:
        shutil.copyfile(source, to)


@pytest.mark.parametrize("grow", [False, True], ids=["", "grow"])
@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("seed", "checkpoints"),
        ("seed", "checkpoints/step-000004"),
        ("seed", "checkpoints/step-000004/training"),
        ("seed", "run.json"),
        ("data", "checkpoints"),
        ("data", "checkpoints/step-000004"),
        ("data", "plan.parquet"),
        ("data", "vocab"),
        ("data", MAPPING),
    ],
)
def test_of_another_run(
    runs: dict[str, Path],
    dataset: Path,
    target: TargetModel,
    tmp_path: Path,
    other: str,
    name: str,
    grow: bool,
) -> None:
    own = Path(shutil.copytree(runs["run"], tmp_path / "run"))
    whole = Steps()
    put(runs[other] / name, own / name)
    before = contents(own)
    with pytest.raises(DraftmillError, match=f"{own}|were planned with|was planned with"):
        run(dataset, target, own, whole, grow=grow, **MORE)
    assert whole.seen == []
    assert {**contents(own), ".lock": b""} == {**before, ".lock": b""}
    put(runs["run"] / name, own / name)
    rest = Steps()
    run(dataset, target, own, rest, **MORE)
    assert [step for step, _, _ in rest.seen] == [5, 6]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_of_this_run_before_it_grew(
    runs: dict[str, Path], dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    """The plan of before would go on with fewer samples than the checkpoint has counted."""
    path = Path(shutil.copytree(dataset, tmp_path / "dataset"))
    own, more = tmp_path / "run", {**MORE, "steps": 0, "epochs": 3.0}
    died(path, target, own, **more)
    shutil.copy(own / "plan.parquet", tmp_path / "before")
    tiny.build_dataset(path, list(tiny.answers(target.folder, 30, seed=9)))
    with pytest.raises(Killed):
        run(path, target, own, Steps(die_at=9), grow=True, **more)
    assert checkpoint.checkpoints(own)[-1] == 8
    shutil.copy(own / "plan.parquet", tmp_path / "after")
    shutil.copy(tmp_path / "before", own / "plan.parquet")
    for grow in (False, True):
        with pytest.raises(DraftmillError, match=r"plan\.parquet are not of the same run"):
            run(path, target, own, grow=grow, **more)
    shutil.copy(tmp_path / "after", own / "plan.parquet")
    rest = Steps()
    with pytest.raises(Killed):
        run(path, target, own, rest_until(rest, 11), **more)
    assert rest.seen[0][0] == 9


def rest_until(steps: Steps, die_at: int) -> Steps:
    steps.die_at = die_at
    return steps


@pytest.mark.parametrize("grow", [False, True], ids=["", "grow"])
def test_a_damaged_checkpoint_is_told_with_grow_too(
    runs: dict[str, Path], dataset: Path, target: TargetModel, tmp_path: Path, grow: bool
) -> None:
    own = Path(shutil.copytree(runs["run"], tmp_path / "run"))
    damage(folder_of(own, 4) / "training" / "state.pt")
    said: list[str] = []
    run(dataset, target, own, note=said.append, grow=grow, **MORE)
    assert sum("damaged-step-000004" in each for each in said) == 1


@pytest.mark.parametrize("name", DRAFT)
@pytest.mark.parametrize("which", ["best", "newest"])
def test_a_draft_that_was_damaged_is_not_published(
    runs: dict[str, Path],
    dataset: Path,
    target: TargetModel,
    tmp_path: Path,
    name: str,
    which: str,
) -> None:
    """The newest one is written again; for the best one the newest stands."""
    own = Path(shutil.copytree(runs["run"], tmp_path / "run"))
    report = run(dataset, target, own, **{**MORE, "keep_checkpoints": 3})
    assert report.best_step is not None
    newest = folder_of(own, 6)
    wanted = (newest / name).read_bytes()
    for each in DRAFT:
        (own / each).unlink()
    damaged = folder_of(own, report.best_step) if which == "best" else newest
    damage(damaged / name)
    said: list[str] = []
    run(dataset, target, own, note=said.append, **{**MORE, "keep_checkpoints": 3})
    assert (newest / name).read_bytes() == wanted
    assert (own / name).read_bytes() == (
        wanted if which == "best" else (folder_of(own, report.best_step) / name).read_bytes()
    )
    stands = which == "best" and report.best_step != 6
    assert any("the newest stands for it" in each for each in said) == stands
