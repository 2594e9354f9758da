"""One figure of a bench, as `bench NAME --json` prints it."""

from __future__ import annotations

from typing import TypedDict


class Figure(TypedDict):
    """One figure; `ratio` is `value` over the same figure of `baseline`."""

    name: str
    value: float
    unit: str
    baseline: str | None
    ratio: float | None
