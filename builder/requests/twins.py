"""Whether two URLs lead to one server: it must not be sent the work of two.

Sure signs only: the same resolved address, or the same start time of its process in /metrics (to
the hundredth of a second; a server without that figure is told by its address alone).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Hashable, Sequence
from urllib.parse import urlsplit

from draftmill.builder.requests.client import TargetClient
from draftmill.manifests.errors import RequestError

_STARTED = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)

log = logging.getLogger(__name__)


async def distinct(clients: Sequence[TargetClient]) -> list[TargetClient]:
    """The clients without those whose server an earlier one has; these are closed, and told."""
    signs = await asyncio.gather(*(_signs(each) for each in clients))
    known: dict[Hashable, TargetClient] = {}
    kept: list[TargetClient] = []
    for client, found in zip(clients, signs, strict=True):
        twin = next((known[sign] for sign in found if sign in known), None)
        known |= dict.fromkeys(found, client if twin is None else twin)
        if twin is None:
            kept.append(client)
            continue
        log.warning("%s is the same server as %s: it is counted once", client.url, twin.url)
        await client.aclose()
    return kept


async def _signs(client: TargetClient) -> set[Hashable]:
    """What only this server has: its addresses, its process's start."""
    parts = urlsplit(client.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found: set[Hashable] = set()
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, port, type=socket.SOCK_STREAM
        )
        # several models may lie behind one address, told apart by their paths
        found |= {(address[4][0], port, parts.path) for address in addresses}
    except OSError:
        pass  # nobody has that name, so nobody else has it either
    try:
        started = _STARTED.search(await client.metrics_text() or "")
    except RequestError:
        return found
    if started is not None:
        found.add(("started", started[1], parts.path))
    return found
