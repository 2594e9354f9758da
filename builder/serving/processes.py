"""The processes of a server that draftmill started: found again, ended, and swept up after.

A server and all its children carry a mark in their environment. So they are known by more than a
pid that may have been given to somebody else, also when the parent died and left workers behind.
What is started and when is left to `launcher`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

MARK = "DRAFTMILL_SERVER"
# vLLM renames its processes with setproctitle, which overwrites the environment that /proc shows
# unless it is told not to.
KEEP_MARK = {"SPT_NOENV": "1"}

SHARED_MEMORY = Path("/dev/shm")
_DELETED = " (deleted)"


def marked(mark: str) -> list[psutil.Process]:
    """The living processes with this mark, parents first."""
    found = []
    for process in psutil.process_iter():
        # processes of other users, and those that end meanwhile, cannot be read
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and is_alive(process):
                found.append(process)
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def is_marked(pid: int, mark: str) -> bool:
    """Whether `pid` lives and carries this mark."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return is_alive(process) and bool(process.environ().get(MARK) == mark)
    return False


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that ended and was not yet waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def root_of(processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """The process that started the others, if it is still among them."""
    processes = list(processes)
    pids = {process.pid for process in processes}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            # a session of its own is what the launcher gives to the server alone
            if process.ppid() not in pids and os.getsid(process.pid) == process.pid:
                return process
    return None


def end(mark: str, grace_s: float) -> bool:
    """Ends all processes with this mark: SIGTERM, SIGKILL after `grace_s`. True if it took SIGKILL.

    Shared memory that they leave in /dev/shm is removed. Blocks until all are gone.
    """
    found = marked(mark)
    shared = shared_memory(found)
    root = root_of(found)
    # the server ends its workers in order; signalled all at once they trip over each other
    for process in [root] if root is not None else found:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    if root is not None:
        _wait_gone([root], grace_s)
    # when their parent is gone, workers end by themselves in a moment
    _wait_gone(found, min(grace_s, 5.0))
    forced = False
    while left := marked(mark):
        shared |= shared_memory(left)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
                forced = True
        _wait_gone(left, 10.0)
    for path in shared:
        with contextlib.suppress(OSError):
            path.unlink()
    return forced


def _wait_gone(found: list[psutil.Process], timeout_s: float) -> None:
    """Not psutil's own wait: a zombie that nobody waits for counts as gone here."""
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, found)) and time.monotonic() < deadline:
        time.sleep(0.05)


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files below /dev/shm that these processes, and nobody before them, made and use.

    One may have been made by a parent for its child, and be in use there alone.
    """
    found: set[Path] = set()
    processes = list(processes)
    born = min((each.create_time() for each in processes), default=0.0)
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            for path in _used_by(process):
                about = path.stat()
                if about.st_uid == os.getuid() and about.st_ctime >= born - 1.0:
                    found.add(path)
    return found


def in_use(paths: Collection[Path]) -> set[Path]:
    """Those of these files below /dev/shm that a living process has mapped or open."""
    found: set[Path] = set()
    for process in psutil.process_iter() if paths else ():
        with contextlib.suppress(psutil.Error, OSError):
            found |= _used_by(process) & set(paths)
    return found


def _used_by(process: psutil.Process) -> set[Path]:
    names = {each.path for each in process.memory_maps(grouped=True)}
    names |= {each.path for each in process.open_files()}
    paths = (Path(name.removesuffix(_DELETED)) for name in names)
    return {path for path in paths if path.is_relative_to(SHARED_MEMORY)}
