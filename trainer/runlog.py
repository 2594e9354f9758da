"""What a run leaves for people and plots: log.jsonl, one JSON object a line, and for TensorBoard.

Lines of steps that were lost by an interruption are cut when the run goes on, so every step stands
there once.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from draftmill.manifests import files
from draftmill.manifests.errors import ConfigError


class RunLog:
    """Appends to a run's log; `after_step` is where the run goes on (0 for a new one).

    With `tensorboard`, a folder, the figures of training and validation go there as well. Raises
    ConfigError when that is wanted and the package is not installed.
    """

    def __init__(self, path: Path, *, after_step: int, tensorboard: Path | None = None) -> None:
        self._board = None if tensorboard is None else _summary_writer(tensorboard, after_step + 1)
        kept = [line for line in read_log(path) if line["step"] <= after_step]
        if path.exists():
            files.write_atomic(path, "".join(_line(entry) for entry in kept), "log")
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line: `kind` is train, validation, checkpoint, start or end."""
        self._file.write(_line({"kind": kind, "step": step, **values}))
        self._file.flush()
        if self._board is not None and kind in ("train", "validation"):
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _summary_writer(folder: Path, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoard is wanted and not installed: pip install tensorboard, or train without "
            "it (log.jsonl and training.png have the same figures)."
        ) from error
    # What an interrupted run wrote beyond its checkpoint is hidden.
    return SummaryWriter(str(folder), purge_step=purge_step)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a log; what a crash or a person left between them is left out."""
    entries: list[dict[str, Any]] = []
    if not path.exists():
        return entries
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and "kind" in entry:
            entries.append(entry)
    return entries


def _line(entry: dict[str, Any]) -> str:
    rounded = {
        key: float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value
        for key, value in entry.items()
    }
    return json.dumps(rounded, default=str) + "\n"
