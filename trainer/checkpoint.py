"""Checkpoints of a run: complete or not there, servable as they are, exact to resume from.

RUN/checkpoints/step-NNNNNN/ holds the draft as vLLM loads it and, under training/, what the run
needs to go on: float32 weights, optimizer, random state and the place in the data. Which
checkpoint is best is the training loop's judgement.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash

from draftmill.manifests import files
from draftmill.manifests.errors import DamagedError, DatasetError, DraftmillError
from draftmill.manifests.target.target import find_folder
from draftmill.trainer.drafts.forms import CONFIG_FILE
from draftmill.trainer.drafts.weight_files import WEIGHTS_FILE
from draftmill.trainer.loading.data import Cursor
from draftmill.trainer.settings import OnNote

_NAME = re.compile(r"step-(\d{6,})")
_STATE = "training/state.json"
_TENSORS = "training/state.pt"
# What stands where a file should is no fault of the disk.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
# What the folder of a checkpoint is called while another one of the same step takes its place.
_REPLACED = ".replaced"
_DRAFT = (WEIGHTS_FILE, CONFIG_FILE)

# The files of a run that a checkpoint is worth nothing without, and the digests that they may have
# had when it was written. The last one is what they have now.
Ties: TypeAlias = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run stands: steps done, rows consumed (not merely read), and what was best.

    `owes_validation` where it was stopped before the validation of this step was done.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    tokens: int = 0
    seconds: float = 0.0
    validation: dict[str, float] = field(default_factory=dict)
    best_step: int | None = None
    best_validation: dict[str, float] = field(default_factory=dict)
    owes_validation: bool = False

    def validated(self, result: dict[str, float]) -> Position:
        """The position after a validation; the best is what a server would accept most of."""
        value = result.get("accepted_per_step", 0.0)
        if self.best_step is not None and value < self.best_validation["accepted_per_step"]:
            return replace(self, validation=result, owes_validation=False)
        return replace(
            self,
            validation=result,
            best_step=self.step,
            best_validation={"accepted_per_step": 0.0, **result},
            owes_validation=False,
        )


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
    ties: Ties,
) -> Path:
    """Write a checkpoint under another name, sync it, rename it: it is whole once it is there."""
    target = folder_of(run, position.step)
    temporary = target.with_name(f".{target.name}.tmp")
    _delete(temporary)
    try:
        (temporary / "training").mkdir(parents=True)
        write_draft(temporary)
        # Through a file of ours: torch's own hides what the system says of a full disk.
        with (temporary / _TENSORS).open("wb") as file:
            torch.save(tensors, file)
        state: dict[str, Any] = {
            "position": asdict(position),
            "run": {name: digests[-1] for name, digests in ties.items()},
            "draft": _draft_digests(temporary),
        }
        state["xxh3"] = _digest(state, temporary / _TENSORS)
        text = json.dumps(state, indent=2, sort_keys=True)
        (temporary / _STATE).write_text(text + "\n", encoding="utf-8")
        for folder in (temporary / "training", temporary):
            for path in sorted(folder.iterdir()):
                if path.is_file():
                    files.sync_file(path, "checkpoint")
            files.sync_folder(folder, "checkpoint")
    except Exception:
        # Half of a checkpoint on a full disk would keep it full.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if not target.exists():
        files.rename(temporary, target, "checkpoint")
        return target
    replaced = target.with_name(f".{target.name}{_REPLACED}")
    files.rename(target, replaced, "checkpoint")
    files.rename(temporary, target, "checkpoint")
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def load(run: Path, step: int, ties: Ties) -> tuple[Position, dict[str, Any]]:
    """What a checkpoint holds for going on.

    Raises DamagedError when that is not what was written, DatasetError when the run that it was
    written in is not `ties`', DraftmillError when the disk fails.
    """
    folder = folder_of(run, step)
    path = folder / _STATE
    try:
        state = _state(path)
        position = _position(state["position"], step)
        path = folder / _TENSORS
        _check_file(path)
        if _digest(state, path) != state["xxh3"]:
            path = path.parent
            raise ValueError("state.json and state.pt are not the bytes that were written")
        _check_ties(run, folder, state["run"], ties)
        # Plain tensors and containers only: a checkpoint from elsewhere cannot run code.
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.errno in _GONE:
            raise DamagedError(f"{path}: {error.strerror}") from error
        raise DraftmillError(
            f"{path} cannot be read: {error.strerror}. Once the disk answers again, the same "
            "command goes on."
        ) from error
    except DatasetError:
        raise
    except Exception as error:  # unpickling raises whatever it meets
        raise DamagedError(f"{path}: {str(error) or type(error).__name__}") from error
    return position, tensors


def _check_file(path: Path) -> None:
    """A pipe would be waited for."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("it is no file")


def _state(path: Path) -> dict[str, Any]:
    """What state.json says. Raises ValueError and its kin."""
    _check_file(path)
    state = json.loads(path.read_text(encoding="utf-8"))
    parts = {"position", "run", "draft", "xxh3"}
    if not isinstance(state, dict) or not parts <= state.keys():
        raise ValueError(f"an object with {', '.join(sorted(parts))} was expected")
    return state


def _position(given: Any, step: int) -> Position:
    """The position in state.json. Raises ValueError and its kin."""
    lacking = [item.name for item in fields(Position) if item.name not in given]
    if lacking:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    position = Position(**{**given, "cursor": Cursor(**given["cursor"])})
    if position.step != step:
        raise ValueError(f"it is of step {position.step}")
    return position


def _check_ties(run: Path, folder: Path, stored: Mapping[str, str], ties: Ties) -> None:
    """Raise DatasetError unless the run's files are those that the checkpoint was written with."""
    for name, digests in ties.items():
        if stored.get(name) not in digests:
            raise DatasetError(
                f"{folder} and {run / name} are not of the same run: one of them was put there "
                "later. Restore what belongs there from a copy, or name another output folder."
            )


def _digest(state: Mapping[str, Any], tensors: Path) -> str:
    """32 hex digits of what state.json says, but for these, and the tensors beside it."""
    rest = {name: value for name, value in state.items() if name != "xxh3"}
    hasher = xxhash.xxh3_128(json.dumps(rest, sort_keys=True).encode())
    return _add_file(hasher, tensors)


def _add_file(hasher: xxhash.xxh3_128, path: Path) -> str:
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            hasher.update(block)
    return hasher.hexdigest()


def _draft_digests(folder: Path) -> dict[str, str]:
    present = [name for name in _DRAFT if (folder / name).is_file()]
    return {name: _add_file(xxhash.xxh3_128(), folder / name) for name in present}


def latest(
    run: Path,
    check: Callable[[dict[str, Any]], None] = lambda _: None,
    note: OnNote = lambda _: None,
    *,
    ties: Ties,
) -> tuple[Position, dict[str, Any]] | None:
    """The newest checkpoint that can be gone on from, and None for a run that has none yet.

    `check` raises DamagedError for tensors that are not the model's. A checkpoint that is whole and
    not of a run with these `ties` is a DatasetError: something was replaced. Newer ones than the
    one that is found are put aside, or they would pass for what comes next; `note` is told.
    """
    clean(run)
    faults: dict[int, DamagedError] = {}
    for step in reversed(checkpoints(run)):
        try:
            position, tensors = load(run, step, ties)
            _checked(check, tensors, folder_of(run, step))
        except DamagedError as error:
            faults[step] = error
            continue
        for newer, fault in faults.items():
            aside = _put_aside(folder_of(run, newer))
            note(f"{fault.reason}. Going on from step {step:,}; it lies in {aside.name} now")
        return position, tensors
    if not faults:
        return None
    newest = max(faults)
    raise DamagedError(
        f"{faults[newest].reason}. No checkpoint of this run can be gone on from ({len(faults)} "
        "looked at). Restore one from a copy, or name another output folder; with --finetune-from "
        f"{folder_of(run, newest)} it starts from that draft."
    )


def _checked(check: Callable[[dict[str, Any]], None], tensors: Any, folder: Path) -> None:
    try:
        check(tensors)
    except DamagedError as error:
        raise DamagedError(f"{folder / _TENSORS}: {error.reason}") from error


def _put_aside(folder: Path) -> Path:
    names = chain([""], (f"-{number}" for number in count(2)))
    paths = (folder.with_name(f"damaged-{folder.name}{end}") for end in names)
    aside = next(path for path in paths if not path.exists())
    folder.rename(aside)
    return aside


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for step in checkpoints(run)[:-keep]:
        if step != best_step:
            _remove(folder_of(run, step))


def clean(run: Path) -> None:
    """Remove what an interrupted save or removal left."""
    root = run / "checkpoints"
    if root.is_dir():
        for path in root.glob(f".step-*{_REPLACED}"):
            target = path.with_name(path.name[1 : -len(_REPLACED)])
            if not target.exists():
                path.rename(target)
        for path in root.glob(".step-*"):
            _delete(path)


def publish(run: Path, step: int) -> None:
    """Put the draft of a checkpoint at the top of the run's folder, where people look for it."""
    for name in _DRAFT:
        temporary = run / f".{name}.tmp"
        shutil.copyfile(folder_of(run, step) / name, temporary)
        files.publish(temporary, run / name, "draft")


def draft_is_whole(run: Path, step: int) -> bool:
    """Whether a checkpoint's draft is there, with the bytes that were written."""
    folder = folder_of(run, step)
    try:
        written = _state(folder / _STATE)["draft"]
        return bool(written) and _draft_digests(folder) == written
    except (OSError, ValueError, RecursionError):
        return False


def has_draft(folder: Path) -> bool:
    """Whether a draft to serve lies in `folder`."""
    return all((folder / name).is_file() for name in _DRAFT)


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
    _delete(doomed)
    folder.rename(doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """A folder and all in it, or what stands in its place."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
