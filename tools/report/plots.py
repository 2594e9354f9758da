"""The charts of a report as SVG text, from its document. The only module that knows matplotlib.

Colours are names of CSS variables, so that a page shows them light or dark; one accent marks what
is wrong or missing, everything else is grey. Text stays text.
"""

from __future__ import annotations

import io
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from draftmill.manifests.sizes import format_size
from draftmill.tools.report.sections import GROUP_NAMES

# matplotlib wants real colours; each of these stands for a variable of the page.
INK, MUTED, GRID, ACCENT, DEEP = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", ACCENT: "accent", DEEP: "deep"}
_WIDTH, _HEIGHT = 6.4, 2.7
_LABELLED_SERVERS = 4
_LABEL_CHARACTERS = 32
# Of the width of a drawing; text is set by the browser, so its width is only about this.
_KEY_MARK, _KEY_GAP, _KEY_CHARACTER = 0.025, 0.03, 0.0125

Document = Mapping[str, Any]


def chart(name: str, found: Document) -> str:
    """The chart `name` as an <svg> element with a text alternative."""
    title, draw = _CHARTS[name]
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "DejaVu Sans",
        "font.size": 9.0,
        "text.parse_math": False,  # names may hold dollar signs
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # The browser sets the text, with its own fonts.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        axes.tick_params(length=0)
        axes.set_axisbelow(True)
        draw(axes, found)
        return _svg(figure, name, title)


def titles() -> dict[str, str]:
    """What each chart shows, in words."""
    return {name: title for name, (title, _) in _CHARTS.items()}


def _svg(figure: Figure, name: str, title: str) -> str:
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Several drawings share one page: names must differ between them.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _states(axes: Axes, found: Document) -> None:
    rows = [(k.replace("_", " "), v) for k, v in found["prompts"].items() if k != "total" and v]
    _bars(axes, rows, lambda v: f"{v:,.0f}", accent={"timed out", "failed", "rejected"})


def _disk(axes: Axes, found: Document) -> None:
    disk = found["disk"]
    rows = [("used now", disk["used_bytes"])]
    end, budget = disk["forecast"]["bytes_at_completion"], disk["budget_bytes"]
    rows.append(("at the end", end))
    if budget:
        rows.append(("budget", budget))
    too_much = budget and end > budget
    _bars(axes, rows, format_size, accent={"at the end"} if too_much else set())


def _bytes_by_length(axes: Axes, found: Document) -> None:
    rows = found["disk"]["by_length"]
    heights = [row["bytes"] for row in rows]
    axes.bar(range(len(rows)), heights, 0.72, color=MUTED)
    for place, row in enumerate(rows):
        label = f"{format_size(row['bytes'])}"
        axes.annotate(label, (place, row["bytes"]), (0, 3), textcoords="offset points",
                      ha="center", va="bottom")  # fmt: skip
    _length_axis(axes, rows)
    axes.set_yticks([])
    axes.margins(y=0.15)


def _lengths(axes: Axes, found: Document) -> None:
    rows = found["lengths"]["histogram"]
    bottom = [0.0] * len(rows)
    peak = max(sum(row[name] for name in _GROUP_COLOURS) for row in rows)
    names = []
    for name, colour in _GROUP_COLOURS.items():
        heights = [row[name] for row in rows]
        axes.bar(range(len(rows)), heights, 0.72, bottom=bottom, color=colour)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        names.append((f"{GROUP_NAMES[name]} ({sum(heights):,})", colour))
    _keys(axes, names)
    late = found["lengths"]["by_group"][3]
    if late["rows"] and late["at_least_tokens"]:
        where = _place(rows, late["at_least_tokens"])
        axes.annotate(
            "", (len(rows) - 0.3, peak * 1.12), (where, peak * 1.12),
            arrowprops={"arrowstyle": "->", "color": ACCENT, "linewidth": 1.6},
        )  # fmt: skip
        axes.plot([where, where], [0, peak * 1.12], color=ACCENT, linewidth=1, linestyle=":")
        axes.text(
            len(rows) - 0.3, peak * 1.16, f"{late['rows']:,} timed out: longer than "
            f"{late['at_least_tokens']:,}", color=ACCENT, ha="right", va="bottom",
        )  # fmt: skip
    axes.set_ylim(0, peak * 1.3)
    axes.set_xlim(-0.6, len(rows) - 0.2)
    _length_axis(axes, rows)
    _count_axis(axes, "rows")


_GROUP_COLOURS = {"completed": MUTED, "recovered": ACCENT, "truncated": DEEP}


def _keys(axes: Axes, names: Sequence[tuple[str, str]]) -> None:
    """Names the colours above the drawing, one after the other."""
    place = 0.0
    for text, colour in names:
        axes.text(place, 1.03, "■", color=colour, transform=axes.transAxes)
        axes.text(place + _KEY_MARK, 1.03, text, color=INK, transform=axes.transAxes)
        place += _KEY_MARK + _KEY_GAP + _KEY_CHARACTER * len(text)


def _place(rows: Sequence[Mapping[str, Any]], tokens: float) -> float:
    """Where a length lies on an axis of buckets: bucket k reaches from k - 1/2 to k + 1/2."""
    for place, row in enumerate(rows):
        low, high = row["from_tokens"], row["to_tokens"] + 1
        if tokens < high:
            return place - 0.5 + max(0.0, float((tokens - low) / (high - low)))
    return len(rows) - 0.5


def _sources(axes: Axes, found: Document) -> None:
    rows = found["lengths"]["bias"]["by_source"]
    shares = [(row["source"], 100 * (row["timed_out_share"] or 0)) for row in rows[:10]]
    worst = max(value for _, value in shares)
    _bars(axes, shares, lambda v: f"{v:.1f} %", accent={n for n, v in shares if v and v == worst})


def _errors(axes: Axes, found: Document) -> None:
    rows = found["errors"]["over_time"]
    times = _dates(row["time"] for row in rows)
    width = found["throughput"]["bin_s"] / 86_400 * 0.85
    bottom = [0.0] * len(rows)
    kinds = {"timed_out": ACCENT, "failed": DEEP, "rejected": MUTED, "transient": GRID}
    names = []
    for name, colour in kinds.items():
        heights = [row[name] for row in rows]
        axes.bar(times, heights, width, bottom=bottom, color=colour)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        names.append((f"{name.replace('_', ' ')} ({sum(heights):,})", colour))
    _keys(axes, names)
    _time_axis(axes)
    _count_axis(axes, "attempts")


def _throughput(axes: Axes, found: Document) -> None:
    rows = found["throughput"]["over_time"]
    colours = {"generate": MUTED, "extract": DEEP}
    for stage, colour in colours.items():
        own = [row for row in rows if row["stage"] == stage]
        times = _dates(row["time"] for row in own)
        values = [row["tokens_per_s"] for row in own]
        axes.plot(times, values, color=colour, linewidth=1.6, marker="o", markersize=2)
    _keys(axes, list(colours.items()))
    axes.set_ylim(bottom=0)
    _time_axis(axes)
    _count_axis(axes, "tokens/s")


def _control(axes: Axes, found: Document) -> None:
    rows = found["throughput"]["control"]
    servers = sorted({row["endpoint"] for row in rows})
    colours = [MUTED, DEEP, INK, ACCENT]
    for number, server in enumerate(servers):
        own = [row for row in rows if row["endpoint"] == server]
        few = len(servers) <= _LABELLED_SERVERS
        colour = colours[number] if few else MUTED
        times = _dates(row["time"] for row in own)
        limits = [row["limit"] for row in own]
        axes.step(times, limits, where="post", color=colour, linewidth=1.4 if few else 0.8)
    if len(servers) <= _LABELLED_SERVERS:
        short = [_label(re.sub("^https?://", "", server)) for server in servers]
        _keys(axes, list(zip(short, colours, strict=False)))
    axes.set_ylim(bottom=0)
    _time_axis(axes)
    _count_axis(axes, "requests at once")


def _bars(
    axes: Axes,
    rows: Sequence[tuple[str, float]],
    label: Callable[[float], str],
    accent: set[str],
) -> None:
    """Horizontal bars from the top down, each with its value at its end."""
    names = [_label(name) for name, _ in rows]
    values = [value for _, value in rows]
    places = range(len(rows))
    axes.barh(places, values, 0.62, color=[ACCENT if n in accent else MUTED for n, _ in rows])
    for place, value in enumerate(values):
        axes.annotate(label(value), (value, place), (4, 0), textcoords="offset points",
                      va="center")  # fmt: skip
    axes.set_yticks(list(places), names, color=INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xticks([])
    axes.set_xlim(0, max([*values, 1e-9]) * 1.18)
    axes.spines["bottom"].set_visible(False)


def _label(name: str) -> str:
    """A name as it can stand beside a drawing: one short line; tables have it whole."""
    clean = "".join(each if each.isprintable() else " " for each in name)
    return clean if len(clean) <= _LABEL_CHARACTERS else clean[: _LABEL_CHARACTERS - 1] + "…"


def _length_axis(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xticks(range(len(rows)), [f"< {_short(row['to_tokens'] + 1)}" for row in rows])
    axes.set_xlabel("tokens")


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _count_axis(axes: Axes, name: str) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_ylabel(name)


def _time_axis(axes: Axes) -> None:
    locator = dates.AutoDateLocator(minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = dates.ConciseDateFormatter(locator)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(formatter)


def _dates(moments: Any) -> list[float]:
    """Unix seconds as matplotlib's days, in the time zone of this machine."""
    return [(moment + time.localtime(moment).tm_gmtoff) / 86_400 for moment in moments]


_CHARTS: dict[str, tuple[str, Callable[[Axes, Document], None]]] = {
    "states": ("Rows by state", _states),
    "disk": ("Bytes used now, at the end, and the budget", _disk),
    "bytes_by_length": ("Bytes of hidden states by length of the sample", _bytes_by_length),
    "lengths": ("Completions by length, and where the timed-out rows lie", _lengths),
    "sources": ("Share of asked rows that timed out, by source", _sources),
    "errors": ("Attempts that went wrong over time", _errors),
    "throughput": ("Tokens per second over time", _throughput),
    "control": ("Requests that the controller allows each server", _control),
}
