"""A file that one process at a time holds locked, with its pid inside.

The operating system gives the lock back however its holder ends. What is locked, and what to do
about a holder, is for callers to say.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftmill.manifests.errors import DatasetError, LockedError

# Whoever only asks for the holder locks the file for an instant; that is not worth an error.
_GLANCE_S = 0.2
_AGAIN_S = 0.02


def acquire(path: Path, refusal: str) -> int:
    """A descriptor that holds the lock at `path` until it is closed.

    Raises LockedError if another process holds it: `refusal` with its pid in place of {owner}.
    Raises DatasetError if the file cannot be made.
    """
    while True:
        fd = _acquired(path, refusal)
        # Whoever held it may have removed the file just before giving it back.
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _acquired(path: Path, refusal: str) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DatasetError(f"{path.parent} cannot be written: {error.strerror}") from error
    try:
        if not _locked(fd):
            pid = _owner(fd)
            raise LockedError(refusal.replace("{owner}", str(pid or "unknown")), pid=pid)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def held(path: Path, refusal: str) -> Iterator[None]:
    """The lock at `path`, for a while; raises what `acquire` raises."""
    fd = acquire(path, refusal)
    try:
        yield
    finally:
        os.close(fd)


def holder(path: Path) -> int | None:
    """The pid of the process that holds the lock at `path`; None if nobody does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(fd)
    finally:
        os.close(fd)
    return None


def _locked(fd: int) -> bool:
    give_up = time.monotonic() + _GLANCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(_AGAIN_S)
        else:
            return True


def _owner(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdigit() else None
