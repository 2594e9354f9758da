"""Bad results, held back until something good follows: a bad server must not spoil a dataset.

A server with the wrong layers, a broken kernel or a dead engine would turn every row into a
rejected one. After so many bad results in a row the run stops, and those rows stay as they are.
"""

from __future__ import annotations

from draftmill.manifests.types import Result

BAD = ("rejected", "failed", "timed_out")


class HeldBack:
    """Holds results until `release`; more than `limit` in a row are a reason to stop. 0: none."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[Result] = []

    def takes(self, result: Result) -> bool:
        """Whether the result was held back: it is bad, and a server had a part in it."""
        attempt = result.attempt
        if not self._limit or attempt.endpoint is None or attempt.outcome not in BAD:
            return False
        self._held.append(result)
        return True

    @property
    def reason(self) -> str | None:
        """Why the run should stop, if it should."""
        if not self._limit or len(self._held) < self._limit:
            return None
        return (
            f"{len(self._held)} samples in a row were bad, the last one: "
            f"{self._held[-1].attempt.error}. Their rows were not changed; correct the server and "
            "run again (extract.stop_after_bad sets the number)."
        )

    def release(self) -> list[Result]:
        """What was held; it may be committed."""
        held, self._held = self._held, []
        return held
