"""Rows that a server refused, held back until it answers one: is it they, or is it the server?

A server that refuses whatever it is sent is given up for this run, and its rows stay as they were:
pending, for another server or the next run.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftmill.builder.generation.endpoint import Endpoint
from draftmill.builder.held_back import HeldByServer
from draftmill.manifests.types import Outcome, Result

BAD: tuple[Outcome, ...] = ("failed",)


class Refusals(HeldByServer):
    """The refused rows of each server. After `limit` in a row it gets no new request until one of
    those in flight is answered; when none is left, it is judged. 0: never."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, BAD, "generate")
        self._servers: dict[str, Endpoint] = {}

    def watch(self, endpoints: Sequence[Endpoint]) -> None:
        """The servers of this run."""
        self._servers |= {each.name: each for each in endpoints}

    def takes(self, result: Result) -> bool:
        """Whether the result was held back."""
        endpoint = self._servers.get(result.attempt.endpoint or "")
        if endpoint is None or not self._held[endpoint.name].takes(result):
            return False
        endpoint.suspect = self._held[endpoint.name].reason is not None
        return True

    def answered(self, result: Result) -> list[Result]:
        """What the server of this result refused before it, now that it is known to answer."""
        endpoint = self._servers.get(result.attempt.endpoint or "")
        if endpoint is None or result.attempt.completion_tokens is None:
            return []
        if endpoint.suspect:
            endpoint.suspect = False
            endpoint.changed()
        return self._held[endpoint.name].release()

    def judge(self, *, all_asked: bool = False) -> None:
        """Gives up servers that refuse everything: when `all_asked` is over, or nothing is left in
        flight there. One that is away meanwhile may come back as another, and gets requests again;
        then one more refusal is enough."""
        for endpoint in self._servers.values():
            reason = self._held[endpoint.name].reason
            if reason is None or endpoint.state == "dead":
                continue
            if all_asked or (endpoint.suspect and endpoint.state == "up" and not endpoint.taken):
                endpoint.die(reason)
                self.spare(endpoint.name)
            elif endpoint.state != "up":
                endpoint.suspect = False
