"""A fake server in a thread, for commands that run in this process or in one of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fakes.target_server import TargetServer


@contextmanager
def served(server: TargetServer) -> Iterator[TargetServer]:
    """Runs the server until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
