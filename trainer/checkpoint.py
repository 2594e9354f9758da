"""Checkpoints of a run: complete or not there, servable as they are, exact to resume from.

RUN/checkpoints/step-NNNNNN/ holds the draft as vLLM loads it and, under training/, what the run
needs to go on: float32 weights, optimizer, random state and the place in the data. Which
checkpoint is best is the training loop's judgement.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftmill.manifests import files
from draftmill.manifests.errors import DamagedError, DatasetError
from draftmill.manifests.target.target import find_folder
from draftmill.trainer.loading.data import Cursor

_NAME = re.compile(r"step-(\d{6,})")
_STATE = "training/state.json"
_TENSORS = "training/state.pt"
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run stands: steps done, rows consumed (not merely read), and what was best."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    tokens: int = 0
    seconds: float = 0.0
    validation: dict[str, float] = field(default_factory=dict)
    best_step: int | None = None
    best_validation: dict[str, float] = field(default_factory=dict)

    def validated(self, result: dict[str, float]) -> Position:
        """The position after a validation; the best is what a server would accept most of."""
        value = result.get("accepted_per_step", 0.0)
        if self.best_step is not None and value < self.best_validation["accepted_per_step"]:
            return replace(self, validation=result)
        best = {"accepted_per_step": 0.0, **result}
        return replace(self, validation=result, best_step=self.step, best_validation=best)


def folder_of(run: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return run / "checkpoints" / f"step-{step:06d}"


def checkpoints(run: Path) -> list[int]:
    """Steps of all complete checkpoints, rising."""
    root = run / "checkpoints"
    if not root.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in root.iterdir())
    return sorted(int(match[1]) for match in found if match)


def save(
    run: Path,
    position: Position,
    tensors: dict[str, Any],
    write_draft: Callable[[Path], None],
) -> Path:
    """Write a checkpoint under another name, sync it, rename it: it is whole once it is there."""
    target = folder_of(run, position.step)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "training").mkdir(parents=True)
    write_draft(temporary)
    torch.save(tensors, temporary / _TENSORS)
    text = json.dumps(asdict(position), indent=2, sort_keys=True)
    (temporary / _STATE).write_text(text + "\n", encoding="utf-8")
    for folder in (temporary / "training", temporary):
        for path in sorted(folder.iterdir()):
            if path.is_file():
                files.sync_file(path, "checkpoint")
        files.sync_folder(folder, "checkpoint")
    if target.exists():
        _remove(target)
    files.rename(temporary, target, "checkpoint")
    return target


def load(run: Path, step: int) -> tuple[Position, dict[str, Any]]:
    """What a checkpoint holds for going on. Raises DamagedError when it cannot be read."""
    folder = folder_of(run, step)
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        state["cursor"] = Cursor(**state["cursor"])
        position = Position(**state)
        # Plain tensors and containers only: a checkpoint from elsewhere cannot run code.
        tensors = torch.load(folder / _TENSORS, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise DamagedError(f"{folder} cannot be resumed from: {error}") from error
    return position, tensors


def latest(run: Path) -> tuple[Position, dict[str, Any]] | None:
    """The newest checkpoint that can be read, and None for a run that has none yet."""
    clean(run)
    steps = checkpoints(run)
    fault: DamagedError | None = None
    for step in reversed(steps):
        try:
            return load(run, step)
        except DamagedError as error:
            fault = fault or error
    if fault is not None:
        raise fault
    return None


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for step in checkpoints(run)[:-keep]:
        if step != best_step:
            _remove(folder_of(run, step))


def clean(run: Path) -> None:
    """Remove what an interrupted save or removal left."""
    root = run / "checkpoints"
    if root.is_dir():
        for path in root.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)


def publish(run: Path, step: int, names: tuple[str, ...]) -> None:
    """Put the draft of a checkpoint at the top of the run's folder, where people look for it."""
    for name in names:
        temporary = run / f".{name}.tmp"
        shutil.copyfile(folder_of(run, step) / name, temporary)
        files.publish(temporary, run / name, "draft")


def resolve_draft(draft: str | Path) -> Path:
    """The folder to serve: `draft` itself when it holds one, else its newest checkpoint.

    What is no folder is a model in the local Hugging Face cache. Raises DatasetError for a folder
    with neither, ConfigError for a name that is not there.
    """
    path = Path(draft)
    if not path.is_dir():
        return find_folder(draft)
    if (path / "config.json").is_file():
        return path
    steps = checkpoints(path)
    if not steps:
        raise DatasetError(
            f"{path} holds no draft model (no config.json, no checkpoints). Train one with "
            "`draftmill train DATASET --output DIR`."
        )
    return folder_of(path, steps[-1])


def _remove(folder: Path) -> None:
    # Renamed first: a folder that is half removed must not pass for a checkpoint.
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
