"""Waiting for what happens elsewhere: until it is so, and not for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 120.0  # only a run that hangs needs it


async def until(condition: Callable[[], bool], *, every_s: float = 0.005) -> None:
    """Returns once the condition holds; everybody else on the loop goes on meanwhile."""
    give_up = time.monotonic() + LIMIT_S
    while not condition():  # what is waited for gives no event
        assert time.monotonic() < give_up, "what was waited for did not happen"
        await asyncio.sleep(every_s)
