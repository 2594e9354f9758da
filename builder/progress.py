"""What a running stage tells whoever watches it. Rendering is left to tools."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Progress:
    """A snapshot of a stage, after each commit. Rates are over the last minute."""

    stage: str
    done: int = 0
    total: int = 0
    in_flight: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    samples_per_s: float = 0.0
    timed_out: int = 0
    failed: int = 0
    rejected: int = 0
    used_bytes: int = 0
    budget_bytes: int | None = None
    note: str | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Progress:
        """From `running` in status.json; what another draftmill adds to it is left out."""
        return cls(**{name: document[name] for name in cls.__slots__ if name in document})


OnProgress = Callable[[Progress], None]

RATE_S = 60.0


class RateMeter:
    """Tokens and samples per second over the last minute, or since it was made."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counts: deque[tuple[float, int, int]] = deque()

    def add(self, tokens: int, samples: int) -> None:
        """Count what was just committed."""
        now = time.monotonic()
        self._counts.append((now, tokens, samples))
        # What falls out marks the start of the span that is left: commits come in batches, and a
        # span from the first one kept would be too short by one batch.
        while self._counts[0][0] < now - RATE_S:
            self._since = self._counts.popleft()[0]

    def show(self, progress: Progress) -> None:
        """Write the rates into `progress`."""
        span = max(1.0, time.monotonic() - self._since)
        progress.tokens_per_s = sum(each[1] for each in self._counts) / span
        progress.samples_per_s = sum(each[2] for each in self._counts) / span


@dataclass(kw_only=True, slots=True)
class StageReport:
    """How a stage ended. `stopped` says why it ended before its work was done, if it did.

    `given` counts those of the generated rows whose answer came with the prompt; their tokens are
    not among `tokens`.
    """

    stage: str
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    stopped: str | None = None
    over_budget: bool = False
    truncated: int = 0
    given: int = 0
