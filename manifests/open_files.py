"""How many files this process may have open: shards of a dataset, and connections to servers.

Shells allow 1,024 unless asked for more, which is less than a server takes at once, and less than
the shards of a terabyte.
"""

from __future__ import annotations

import errno
import resource

WANTED = 65536
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
