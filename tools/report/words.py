"""What the parts of a report are made of, and how it says numbers and times. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One table; columns whose cells are numbers are set to the right by whoever shows them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # so many columns from the left hold words


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, what the figures say in a sentence or two, tables, and the chart beside them."""

    key: str
    title: str
    text: str
    grids: Sequence[Grid] = field(default_factory=tuple)
    charts: Sequence[str] = field(default_factory=tuple)


def clock(moment: float, *, year: bool = False, seconds: bool = False) -> str:
    """A Unix time as a person in this time zone reads it."""
    form = ("%Y-" if year else "") + "%m-%d %H:%M" + (":%S" if seconds else "")
    return time.strftime(form, time.localtime(moment))


def span(row: Mapping[str, Any]) -> str:
    """A bucket of lengths: `512 to 1,023`."""
    return f"{row['from_tokens']:,} to {row['to_tokens']:,}"


def number(value: float | None) -> str:
    """A count or a mean, without its fraction; nothing for None."""
    return "" if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A share of one as percent; nothing for None."""
    return "" if value is None else f"{100 * value:.1f} %"


def percent(part: float, whole: float) -> str:
    """`part` of `whole` as percent."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
