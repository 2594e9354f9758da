"""What the operating system says: CPU seconds and memory of processes, where files cost no disk.

Linux only, as draftmill.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def rss_mb(pid: int | None = None) -> float:
    """Resident memory of a process (None: this one) in MB."""
    statm = Path(f"/proc/{os.getpid() if pid is None else pid}/statm").read_text()
    return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_s_of(pid: int) -> float:
    """CPU seconds of another process so far, all threads, user and system."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def ram_disk(need_bytes: int = 0) -> Path:
    """A folder in memory with so much room; the temporary folder where there is none."""
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > need_bytes:
        return shared
    return Path(tempfile.gettempdir())
