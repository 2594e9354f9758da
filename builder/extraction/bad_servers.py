"""Bad samples of each extraction server, held back until a good one comes from it: is it they?

A server that sends nothing else is given up, and its rows stay `generated`: for the other servers,
or the next run. What a server is, and that a run without any ends, is `servers`'.
"""

from __future__ import annotations

from collections.abc import Callable

from draftmill.builder.extraction.servers import ExtractServers
from draftmill.builder.held_back import HeldByServer
from draftmill.manifests.errors import ServerError
from draftmill.manifests.types import Outcome, Result

BAD: tuple[Outcome, ...] = ("rejected", "failed", "timed_out")


class BadServers(HeldByServer):
    """Gives a server up after `limit` bad samples in a row, which it says. 0: never."""

    def __init__(self, servers: ExtractServers, limit: int, say: Callable[[str], None]) -> None:
        super().__init__(limit, BAD, "extract")
        self._servers = servers
        self._say = say

    def takes(self, result: Result) -> bool:
        """Whether the result was held back, or is dropped with all that its server held."""
        name = result.attempt.endpoint or ""
        server = next((each for each in self._servers.servers if each.name == name), None)
        if server is None or not self._held[name].takes(result):
            return False
        reason = self._held[name].reason
        # One that is away is probed, and may come back as another: then one more is enough.
        if reason is not None and server.state == "up":
            self._servers.lost(server, ServerError(reason))
            if len(self._servers.servers) > 1:
                self._say(f"{name}: given up, its samples go to the other servers: {reason}")
        if server.state == "dead":
            self.spare(name)
        return True

    def answered(self, result: Result) -> list[Result]:
        """What was held of the server of this good result: it was the samples."""
        return self._held[result.attempt.endpoint or ""].release()
