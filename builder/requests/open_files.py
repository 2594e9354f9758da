"""How many requests may be in flight: each holds a connection, which is an open file."""

from __future__ import annotations

from pathlib import Path

from draftmill.manifests.open_files import allow_many

# Shards, the database, prompt files, standard streams, what libraries keep open.
OTHERS = 128


def connections(servers: int) -> int:
    """The most requests at once to each of so many servers, one at least."""
    used = len(list(Path("/proc/self/fd").iterdir()))
    return max(1, (allow_many() - used - OTHERS) // servers)
