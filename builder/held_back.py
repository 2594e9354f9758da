"""Bad results, held back until something good follows: a bad server must not spoil a dataset.

A server with the wrong layers, a broken kernel, or one that refuses whatever it is sent would turn
every row into a rejected or failed one. What follows from too many of them is left to the stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from draftmill.manifests.types import Outcome, Result, Stage


class HeldBack:
    """Holds results of the kinds `bad` until `release`; `limit` in a row are too many. 0: none."""

    def __init__(self, limit: int, bad: Collection[Outcome], stage: Stage) -> None:
        self._limit, self._bad, self._stage = limit, bad, stage
        self._held: list[Result] = []

    def takes(self, result: Result) -> bool:
        """Whether the result was held back: it is bad, and a server had a part in it."""
        attempt = result.attempt
        if not self._limit or attempt.endpoint is None or attempt.outcome not in self._bad:
            return False
        self._held.append(result)
        return True

    @property
    def reason(self) -> str | None:
        """What is wrong, if there are too many."""
        if not self._limit or len(self._held) < self._limit:
            return None
        return (
            f"{len(self._held)} samples in a row were bad, the last one: "
            f"{self._held[-1].attempt.error}. Their rows were not changed; correct the server and "
            f"run again ({self._stage}.stop_after_bad sets the number)."
        )

    def release(self) -> list[Result]:
        """What was held; it may be committed."""
        held, self._held = self._held, []
        return held


class HeldByServer:
    """What is held back of each server. The stages differ in when a server is given up."""

    def __init__(self, limit: int, bad: Collection[Outcome], stage: Stage) -> None:
        self._held = defaultdict[str, HeldBack](lambda: HeldBack(limit, bad, stage))
        self._spared = False

    def spare(self, name: str) -> None:
        """Drop what is held of a server that was given up: its rows stay as they were."""
        self._spared |= bool(self._held[name].release())

    def spared(self) -> bool:
        """Whether there are rows of such servers, since the last call, to be asked once more."""
        spared, self._spared = self._spared, False
        return spared

    def release(self) -> list[Result]:
        """All that is held back, when nothing more will be asked."""
        return [result for held in self._held.values() for result in held.release()]
