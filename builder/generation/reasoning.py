"""Whether a server's reasoning parser is on, judged by its first replies.

A server without it must not turn every row into a rejected one: replies without reasoning are held
back until one has some, or until there are enough of them to say so.
"""

from __future__ import annotations

from draftmill.manifests.types import GIVEN, Result

REPLIES = 20


class ReasoningGuard:
    """Holds back rejections for want of reasoning."""

    def __init__(self, *, required: bool) -> None:
        self.seen = not required
        self._held: list[Result] = []

    def takes(self, result: Result) -> bool:
        """Whether the result was held back, until `release`."""
        if self.seen or result.attempt.finish_reason == GIVEN:
            return False  # an answer that came with its prompt tells nothing about a parser
        if result.attempt.error_class == "no_reasoning":
            self._held.append(result)
            return True
        self.seen = result.attempt.outcome == "generated"
        return False

    @property
    def missing(self) -> str | None:
        """What to say when there is no hope left; None before that."""
        if self.seen or len(self._held) < REPLIES:
            return None
        return (
            f"{len(self._held)} replies and no reasoning in any of them, though "
            'generate.reasoning is "required". Start the server with its --reasoning-parser, '
            'or set reasoning to "any".'
        )

    def release(self) -> list[Result]:
        """What was held back; it is the caller's from here on."""
        held, self._held = self._held, []
        return held
