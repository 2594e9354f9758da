"""Room that the database keeps for itself, and what of a budget and a disk is left for samples.

One account for whoever reserves room and for whoever only says how much there is.
"""

from __future__ import annotations

MIN_HEADROOM = 8 << 20
MAX_HEADROOM = 512 << 20
UNLIMITED_HEADROOM = 64 << 20


def default_headroom(limit_bytes: int | None) -> int:
    """Bytes kept for the database, its log and snapshot rewrites: a sixteenth, within limits."""
    if limit_bytes is None:
        return UNLIMITED_HEADROOM
    return max(MIN_HEADROOM, min(MAX_HEADROOM, limit_bytes // 16))


def room_for_samples(*, limit_bytes: int | None, used_bytes: int, free_bytes: int) -> int:
    """Bytes that may still become samples, within the budget (None: no limit) and the disk."""
    room = free_bytes if limit_bytes is None else min(free_bytes, limit_bytes - used_bytes)
    return max(0, room - default_headroom(limit_bytes))
