"""A run's folder: one process at a time, and bound to the settings that it was started with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from draftmill.manifests import files, lock
from draftmill.manifests.errors import DamagedError, DatasetError, SettingsMismatch
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.settings import TrainSettings

_VERSION = 1
RUN_FILE = "run.json"
PLAN_FILE = "plan.parquet"
LOG_FILE = "log.jsonl"
MAPPING_FILE = "vocab/mapping.safetensors"
TENSORBOARD = "tensorboard"
_LOCK = ".lock"
# What is written before the first step.
_FIRST = (_LOCK, RUN_FILE, PLAN_FILE, LOG_FILE, "vocab", TENSORBOARD)
RESTORE = "Restore it from a copy, or name another output folder."


@contextmanager
def locked_run(output: Path) -> Iterator[Callable[[], None]]:
    """Make the folder and hold its lock; the operating system gives it back whatever happens.

    Yields what is to be called once nothing can be refused any more. An error before that leaves
    of the folder what was there before, and nothing else.
    """
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    kept = False

    def keep() -> None:
        nonlocal kept
        kept = True

    try:
        try:
            output.mkdir(parents=True, exist_ok=True)
            before = _first_files(output)
        except OSError as error:
            raise DatasetError(f"{output} cannot be written: {error.strerror}") from error
        refusal = (
            f"{output} is in use by process {{owner}}. Wait until it ends, or name another output "
            "folder."
        )
        with lock.held(output / _LOCK, refusal):
            try:
                yield keep
            except BaseException:
                if not kept:
                    for path in sorted(_first_files(output) - before, reverse=True):
                        path.rmdir() if path.is_dir() else path.unlink()
                raise
    except BaseException:
        for folder in made:
            with suppress(OSError):  # somebody else is using it
                folder.rmdir()
        raise


def _first_files(output: Path) -> set[Path]:
    """What is there of the files and folders that are written before the first step."""
    tops = [output / each for name in _FIRST for each in (name, f".{name}.tmp")]
    return {path for top in tops if top.exists() for path in (top, *top.rglob("*"))}


def bind_run(
    output: Path,
    settings: TrainSettings,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    finetuned_from: str | None,
    *,
    new: bool,
) -> str:
    """Write run.json for a new run; for one that is there, refuse settings that differ.

    Returns the digest of the settings. `finetuned_from` is that of the checkpoint that the run
    starts from. Raises DamagedError when the file is no such thing, or is not there and the run is
    not `new`.
    """
    binding: dict[str, Any] = {
        "version": _VERSION,
        "target": target.name,
        "target_fingerprint": target.fingerprint(),
        "target_layer_ids": list(target_layer_ids),
        "finetuned_from": finetuned_from,
        **settings.binding(),
    }
    text = json.dumps(binding, indent=2, sort_keys=True) + "\n"
    digest = xxhash.xxh3_128(text.encode()).hexdigest()
    path = output / RUN_FILE
    if not path.exists():
        if not new:
            raise DamagedError(f"{path} is gone, which has the settings of this run. {RESTORE}")
        if (output / "config.json").exists() or (output / "config.toml").exists():
            raise DatasetError(f"{output} holds something that is no run. Name another folder.")
        files.write_atomic(path, text, "run")
        return digest
    stored = _stored(path, binding)
    differing = [
        f"{key} was {stored.get(key)!r} and is now {binding.get(key)!r}"
        for key in sorted({*stored, *binding})
        if stored.get(key) != binding.get(key)
    ]
    if differing:
        raise SettingsMismatch(
            f"{output} holds a run with other settings: {'; '.join(differing)}. "
            "Use the same settings to go on with it, or name another output folder."
        )
    return digest


def _stored(path: Path, binding: dict[str, Any]) -> dict[str, Any]:
    if not path.is_file():  # a pipe would be waited for
        raise DamagedError(f"{path} is no file. {RESTORE}")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}. {RESTORE}") from error
    if not isinstance(stored, dict):
        raise DamagedError(f"{path} cannot be read: an object was expected. {RESTORE}")
    lacking = sorted(binding.keys() - stored.keys())
    if lacking and stored.get("version", _VERSION) == _VERSION:
        raise DamagedError(f"{path} lacks {', '.join(lacking)}. {RESTORE}")
    return stored
