"""The form in which every bench gives what it measured."""

from __future__ import annotations

from typing import TypedDict


class Figure(TypedDict):
    """One figure; `ratio` is `value` over that of `baseline` in the same run."""

    name: str
    value: float
    unit: str
    baseline: str | None
    ratio: float | None


def figure(
    name: str, value: float, unit: str, *, baseline: str | None = None, base: float | None = None
) -> Figure:
    """A figure; `base` is the value of the figure that is called `baseline`."""
    ratio = value / base if base else None
    return Figure(name=name, value=value, unit=unit, baseline=baseline, ratio=ratio)
