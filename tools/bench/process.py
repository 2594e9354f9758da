"""What the operating system says about processes: CPU seconds, memory. Linux only, as draftmill."""

from __future__ import annotations

import os
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
