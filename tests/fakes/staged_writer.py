"""How the fake extraction server leaves its files: a lock beside each, held until it is written.

Writes in the background after the reply, as vLLM's example connector does, not atomically.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.fakes import toy_model as toy

STATE_FAULTS = (
    "nan",
    "inf",
    "huge",
    "zeros",
    "zero_layer",
    "constant",
    "wrong_ids",
    "wrong_length",
    "wrong_layers",
    "wrong_hidden",
    "wrong_dtype",
    "truncated_file",
    "no_file",  # the write failed: lock released, nothing there
    "no_lock",  # written before the reply, without a lock file
    "no_path",  # the reply names no file
    "slow_write",
    "lock_held",  # never released
    "traversal",  # a path that climbs out of the folder
    "absolute",  # a path somewhere else
    "symlink",  # the file is a link to one outside
    "hang_after_write",  # the file is there, the reply never comes
    "late",  # no reply; the file comes after the client has gone, from the step that was running
)


class StagedOptions(Protocol):
    staging: str | None
    layers: int
    hidden: int
    slow_write_s: float


class StagedWriter:
    """Writes hidden-state files and keeps the locks that a fault never gives back."""

    def __init__(self) -> None:
        self.files_written = 0
        self._held: list[int] = []
        self._number = itertools.count()
        self._threads: set[threading.Thread] = set()

    def write(
        self,
        options: StagedOptions,
        name: str,
        token_ids: Sequence[int],
        fault: str | None,
        states: NDArray[np.uint16] | None = None,
    ) -> str | None:
        """Starts writing one file, with `states` or the toy's own; returns the path that the reply
        names."""
        assert options.staging is not None
        folder = Path(options.staging)
        path = folder / f"cmpl-{name}-0-{next(self._number):08x}.safetensors"
        lock = -1
        if fault not in ("no_lock", "late"):
            lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if fault == "no_lock":
            self._write(options, path, token_ids, fault, lock, states)
        else:
            thread = threading.Thread(
                target=self._write,
                args=(options, path, token_ids, fault, lock, states),
                daemon=True,
            )
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            thread.start()
        if fault == "no_path":
            return None
        if fault == "traversal":
            return f"{folder}/../../../../etc/passwd"
        if fault == "absolute":
            return "/etc/passwd"
        return str(path)

    def _write(
        self,
        options: Any,
        path: Path,
        token_ids: Sequence[int],
        fault: str | None,
        lock: int,
        states: NDArray[np.uint16] | None,
    ) -> None:
        try:
            if fault == "late":
                time.sleep(options.slow_write_s)
            if fault == "no_file":
                return
            data = toy.hidden_states_file(token_ids, options.layers, options.hidden, fault, states)
            if fault == "symlink":
                outside = path.parent.with_name(f"{path.parent.name}-outside-{path.name}")
                outside.write_bytes(data)
                path.symlink_to(outside)
            elif fault == "slow_write":
                path.write_bytes(data[: len(data) // 2])
                time.sleep(options.slow_write_s)
                with path.open("ab") as file:
                    file.write(data[len(data) // 2 :])
            else:
                path.write_bytes(data)
            self.files_written += 1
        except OSError:
            pass  # a full disk, or the staging folder went away with its test
        finally:
            if fault == "lock_held":
                self._held.append(lock)
            elif lock >= 0:
                os.close(lock)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(timeout=5)
        for lock in self._held:
            os.close(lock)
        self._held.clear()
