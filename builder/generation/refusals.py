"""Rows that a server refused, held back until it answers one: is it they, or is it the server?

A server that refuses whatever it is sent is given up for this run, and its rows stay as they were:
pending, for another server or the next run.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftmill.builder.generation.endpoint import Endpoint
from draftmill.builder.held_back import HeldBack
from draftmill.manifests.types import Outcome, Result

BAD: tuple[Outcome, ...] = ("failed",)


class Refusals:
    """The refused rows of each server. After `limit` in a row it gets no new request until one of
    those in flight is answered; when none is left, it is judged. 0: never."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._servers: dict[str, tuple[Endpoint, HeldBack]] = {}
        self._spared = False

    def watch(self, endpoints: Sequence[Endpoint]) -> None:
        """The servers of this run."""
        for each in endpoints:
            self._servers[each.name] = (each, HeldBack(self._limit, BAD, "generate"))

    def takes(self, result: Result) -> bool:
        """Whether the result was held back."""
        found = self._servers.get(result.attempt.endpoint or "")
        if found is None or not found[1].takes(result):
            return False
        endpoint, held = found
        endpoint.suspect = held.reason is not None
        return True

    def answered(self, result: Result) -> list[Result]:
        """What the server of this result refused before it, now that it is known to answer."""
        found = self._servers.get(result.attempt.endpoint or "")
        if found is None or result.attempt.completion_tokens is None:
            return []
        endpoint, held = found
        if endpoint.suspect:
            endpoint.suspect = False
            endpoint.changed()
        return held.release()

    def judge(self, *, all_asked: bool = False) -> None:
        """Gives up servers that refuse everything: when `all_asked` is over, or nothing is left in
        flight there. One that is away meanwhile may come back as another, and gets requests again;
        then one more refusal is enough."""
        for endpoint, held in self._servers.values():
            if held.reason is None or endpoint.state == "dead":
                continue
            if all_asked or (endpoint.suspect and endpoint.state == "up" and not endpoint.taken):
                endpoint.die(held.reason)
                self._spared |= bool(held.release())
            elif endpoint.state != "up":
                endpoint.suspect = False

    def spared(self) -> bool:
        """Whether there are rows of such servers, since the last call, to be asked once more."""
        spared, self._spared = self._spared, False
        return spared

    def release(self) -> list[Result]:
        """All that is held back, when nothing more will be asked."""
        return [result for _, held in self._servers.values() for result in held.release()]
