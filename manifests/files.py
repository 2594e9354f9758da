"""Durable file operations: the only place of this room that writes, syncs, renames or unlinks.

Every operation is a failpoint (before and after) and is told to `observer`, so that tests can stop
the process at each of them and replay any prefix of them. What is written where is left to callers.

DRAFTMILL_FAILPOINT=NAME[@N][=ACTION] acts at the N-th time (default 1) that NAME is reached.
ACTION is `kill` (SIGKILL to this process, the default), `torn` (on a write: the first half of the
bytes, then kill), `enospc` or `eio` (that OSError). DRAFTMILL_FAILPOINT_TRACE=FILE appends every
name reached to FILE. Both are read when a process starts; `arm` sets them later.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.manifests.errors import BudgetError

Buffer = bytes | bytearray | memoryview

# Called as observer(operation, path, details) after an operation was done. Tests set it.
observer: Callable[[str, Path, dict[str, Any]], None] | None = None

# Errors that mean "no room": handled like the disk budget.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_ERRNO = {"enospc": errno.ENOSPC, "eio": errno.EIO}


@dataclass(slots=True)
class _Failpoint:
    """Where to act, and how often that place is still to be passed before."""

    name: str
    left: int
    action: str


_armed: _Failpoint | None = None
_trace: str | None = None


def arm(text: str, trace: str | None = None) -> None:
    """Set the failpoint NAME[@N][=ACTION] of this process, counting from now; "" sets none. With
    `trace`, also the file that tells which were reached."""
    global _armed, _trace
    _trace = trace or _trace
    target, _, action = text.partition("=")
    name, _, count = target.partition("@")
    _armed = _Failpoint(name, int(count or 1), action) if name else None


arm(os.environ.get("DRAFTMILL_FAILPOINT", ""), os.environ.get("DRAFTMILL_FAILPOINT_TRACE"))


def reach(name: str) -> str | None:
    """Pass the failpoint `name`; returns "torn" when the caller is to write half and die."""
    if _trace is not None:
        with open(_trace, "a", encoding="utf-8") as file:
            file.write(name + "\n")
    if _armed is None or _armed.name != name:
        return None
    _armed.left -= 1
    if _armed.left != 0:
        return None
    if _armed.action in _ERRNO:
        raise OSError(_ERRNO[_armed.action], os.strerror(_ERRNO[_armed.action]))
    if _armed.action == "torn":
        return "torn"
    die()
    return None


def die() -> None:
    """End this process as a power cut would: no handlers, no flushing."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _operation(kind: str, label: str, path: Path, **details: Any) -> Iterator[str | None]:
    action = reach(f"{kind}.{label}.before")
    yield action
    if observer is not None:
        observer(kind, path, details)
    reach(f"{kind}.{label}.after")


class File:
    """An open file with positioned reads and writes. `label` names its failpoints."""

    def __init__(self, path: Path, label: str, *, create: bool = False) -> None:
        self.path = path
        self.label = label
        flags = os.O_RDWR | os.O_CLOEXEC
        if create:
            with _operation("create", label, path):
                self._fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        else:
            self._fd = os.open(path, flags)

    def write_at(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`; on an error a part of it may have been written."""
        view = memoryview(data)
        with _operation("write", self.label, self.path, offset=offset, data=view) as action:
            if action == "torn":
                os.pwrite(self._fd, view[: len(view) // 2], offset)
                die()
            while view.nbytes:
                done = os.pwrite(self._fd, view, offset)
                view = view[done:]
                offset += done

    def read_at(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer only at the end of the file."""
        return read_at(self._fd, length, offset)

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""
        with _operation("sync", self.label, self.path):
            os.fsync(self._fd)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        with _operation("truncate", self.label, self.path, size=size):
            os.ftruncate(self._fd, size)

    def size(self) -> int:
        """The file's size in bytes."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close without syncing; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_at(fd: int, length: int, offset: int) -> bytes:
    """Up to `length` bytes of the open file `fd` from `offset`."""
    parts: list[bytes] = []
    while length > 0:
        # One pread returns at most 2 GiB - 4 KiB on Linux.
        part = os.pread(fd, min(length, 1 << 30), offset)
        if not part:
            break
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def rename(source: Path, target: Path, label: str) -> None:
    """Move `source` over `target` (same folder) and make that survive a power cut."""
    with _operation("rename", label, source, target=target):
        os.rename(source, target)
    sync_folder(target.parent, label)


def unlink(path: Path, label: str) -> None:
    """Remove a file if it is there. Call `sync_folder` when the removal has to be durable."""
    with _operation("unlink", label, path):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path, label: str) -> None:
    """Make names created, renamed or removed in `folder` survive a power cut."""
    with _operation("syncdir", label, folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_atomic(path: Path, data: Buffer | str, label: str) -> None:
    """Replace `path` by `data`: a reader sees the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    unlink(temporary, label)
    file = File(temporary, label, create=True)
    try:
        file.write_at(data.encode() if isinstance(data, str) else data, 0)
        file.sync()
    finally:
        file.close()
    rename(temporary, path, label)


def sync_file(path: Path, label: str) -> None:
    """Make what a library wrote into a file survive a power cut."""
    file = File(path, label)
    try:
        file.sync()
    finally:
        file.close()


def publish(temporary: Path, path: Path, label: str) -> None:
    """Sync a file that a library wrote under a temporary name, then rename it into place."""
    sync_file(temporary, label)
    rename(temporary, path, label)


@contextmanager
def disk_full_is_budget(
    path: Path,
    advice: str = "Free space on the disk or evict hidden states; what was committed is safe.",
) -> Iterator[None]:
    """Map ENOSPC and its kin to BudgetError: a full disk is handled like a full budget."""
    try:
        yield
    except BudgetError:  # who saw it first knows best
        raise
    except Exception as error:
        if (words := full_disk(error)) is None:
            raise
        raise BudgetError(f"{path}: {words}. {advice}") from error


def full_disk(error: BaseException | None) -> str | None:
    """The system's words where `error` comes of a full disk, however a library wrapped it."""
    while error is not None:
        for code in DISK_FULL:
            # Rust libraries hand on nothing but this text.
            if getattr(error, "errno", None) == code or f"(os error {code})" in str(error):
                return os.strerror(code)
        error = error.__cause__ or error.__context__
    return None


def numbered(folder: Path, suffix: str) -> dict[int, Path]:
    """Regular files NNNNNN + `suffix` in `folder` by number, in order; nothing else that is there.

    A person's copy or note beside them must not be taken for one of them.
    """
    found = {}
    for path in folder.glob(f"*{suffix}"):
        stem = path.name[: -len(suffix)]
        if stem.isascii() and stem.isdigit() and stem == f"{int(stem):06d}" and path.is_file():
            found[int(stem)] = path
    return dict(sorted(found.items()))


def folder_bytes(folder: Path) -> int:
    """Sum of the sizes of all files below `folder`; files that vanish meanwhile count nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total
