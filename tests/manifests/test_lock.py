"""The lock that one process at a time holds: refusals, glances, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from draftmill.manifests import lock
from draftmill.manifests.errors import DatasetError, LockedError

HOLD = (
    "import sys; from pathlib import Path; from draftmill.manifests import lock; "
    "fd = lock.acquire(Path(sys.argv[1]), ''); print(flush=True); sys.stdin.read()"
)


def test_the_holder_is_named_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "{owner} {0} {" / ".lock"  # a path is text, not a form
    path.parent.mkdir()
    assert lock.holder(path) is None
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert lock.holder(path) == child.pid
    with pytest.raises(LockedError, match=f"held by {child.pid}, not free") as caught:
        lock.acquire(path, "held by {owner}, not free")
    assert caught.value.pid == child.pid
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert lock.holder(path) is None
    with lock.held(path, ""):
        assert lock.holder(path) == os.getpid()
    assert lock.holder(path) is None


def test_asking_for_the_holder_never_keeps_a_process_out(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    os.close(lock.acquire(path, ""))
    stop = threading.Event()

    def glance() -> None:
        while not stop.is_set():
            lock.holder(path)

    watchers = [threading.Thread(target=glance) for _ in range(2)]
    for each in watchers:
        each.start()
    try:
        for _ in range(100):
            os.close(lock.acquire(path, "kept out"))
    finally:
        stop.set()
        for each in watchers:
            each.join()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no/such.* cannot be written"):
        lock.acquire(tmp_path / "no" / "such" / ".lock", "")


def test_a_lock_whose_holder_removed_it_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two could hold it: one by the file that is gone, one by the file that is there."""
    path = tmp_path / ".lock"
    first = lock.acquire(path, "")
    opened = lock._locked

    def leaving(fd: int) -> bool:
        """The holder removes the file and ends while another process has just opened it."""
        nonlocal first
        if first >= 0:
            path.unlink()
            os.close(first)
            first = -1
        return opened(fd)

    monkeypatch.setattr(lock, "_locked", leaving)
    with lock.held(path, "kept out"):
        with pytest.raises(LockedError):
            lock.acquire(path, "held by {owner}")
    assert path.exists()
