"""What a running stage tells whoever watches it. Rendering is left to tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


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


OnProgress = Callable[[Progress], None]


@dataclass(kw_only=True, slots=True)
class StageReport:
    """How a stage ended. `stopped` says why it ended before its work was done, if it did."""

    stage: str
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    stopped: str | None = None
    over_budget: bool = False
    truncated: int = 0
