"""A run's folder: one process at a time, and bound to the settings that it was started with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftmill.manifests import files, lock
from draftmill.manifests.errors import DamagedError, DatasetError, SettingsMismatch
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.settings import TrainSettings

_VERSION = 1


@contextmanager
def locked_run(output: Path) -> Iterator[None]:
    """Make the folder and hold its lock; the operating system gives it back whatever happens."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(f"{output} cannot be written: {error.strerror}") from error
    refusal = (
        f"{output} is in use by process {{owner}}. Wait until it ends, or name another output "
        "folder."
    )
    with lock.held(output / ".lock", refusal):
        yield


def bind_run(
    output: Path,
    settings: TrainSettings,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    finetuned_from: str | None,
) -> None:
    """Write run.json for a new run; for one that is there, refuse settings that differ.

    `finetuned_from` is the digest of the checkpoint that the run starts from.
    """
    binding: dict[str, Any] = {
        "version": _VERSION,
        "target": target.name,
        "target_fingerprint": target.fingerprint(),
        "target_layer_ids": list(target_layer_ids),
        "finetuned_from": finetuned_from,
        **settings.binding(),
    }
    path = output / "run.json"
    if not path.exists():
        if (output / "config.json").exists() or (output / "config.toml").exists():
            raise DatasetError(f"{output} holds something that is no run. Name another folder.")
        text = json.dumps(binding, indent=2, sort_keys=True) + "\n"
        files.write_atomic(path, text, "run")
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("an object was expected")
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
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
