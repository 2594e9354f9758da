"""How many files this process may have open: every request in flight holds a connection.

Shells allow 1,024 unless asked for more, which is less than a server takes at once.
"""

from __future__ import annotations

import errno
import resource
from pathlib import Path

WANTED = 65536
# Shards, the database, prompt files, standard streams, what libraries keep open.
OTHERS = 128
# What an OSError says when there are no more, of this process or of the machine.
USED_UP = (errno.EMFILE, errno.ENFILE)


def allow_many() -> int:
    """Raise the limit to what the system grants without asking; returns what holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return WANTED if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


def connections(servers: int) -> int:
    """The most requests at once to each of so many servers, one at least."""
    used = len(list(Path("/proc/self/fd").iterdir()))
    return max(1, (allow_many() - used - OTHERS) // servers)
