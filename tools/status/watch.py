"""`draftmill status --watch`: a live view of a dataset on a terminal, from status.json alone.

Never opens the database: a writer that starts meanwhile finds it free. Figures are those that the
writer last published; how old they are is shown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftmill.builder.progress import Progress
from draftmill.manifests import lock, published
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DatasetError
from draftmill.manifests.sizes import format_size
from draftmill.tools.render import describe, duration, eta
from draftmill.tools.status.command import precision_line
from draftmill.tools.terminal import echo, echo_json

EVERY_S = 2.0
_QUIET_S = 20.0
_HISTORY = 48
_BAR = 44
_SPARKS = "▁▂▃▄▅▆▇█"
# State, how it is drawn, how it is coloured: told apart without colours too.
_STATES = (
    ("extracted", "█", "green"),
    ("generated", "▓", "cyan"),
    ("pending", "░", "dim"),
    ("timed_out", "▒", "yellow"),
    ("failed", "x", "red"),
    ("rejected", "-", "magenta"),
)


def watch(dataset: Dataset, *, as_json: bool, console: Console) -> NoReturn:
    """Show the dataset until Ctrl-C: a live view on a terminal, one line at a time elsewhere."""
    if as_json or not console.is_terminal:
        while True:
            found = read(dataset)
            echo_json(found, indent=None) if as_json else echo(line(found))
            time.sleep(EVERY_S)
    rates: deque[float] = deque(maxlen=_HISTORY)

    def now() -> RenderableType:
        found = read(dataset)
        rates.append(rate(found))
        return view(
            str(dataset.path),
            found,
            rates=rates,
            now=time.time(),
            alive=lock.holder(dataset.lock_path) is not None,
        )

    live = Live(now(), console=console, screen=True, auto_refresh=False)
    try:
        # Not `with live`: a Ctrl-C while it starts would leave the terminal on the other screen.
        live.start(refresh=True)
        while True:
            time.sleep(EVERY_S)
            live.update(now(), refresh=True)
    finally:
        live.stop()


def read(dataset: Dataset) -> dict[str, Any]:
    """What the writer last published."""
    try:
        return published.read(dataset)
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{dataset.status_path} cannot be read ({error}); `draftmill status {dataset.path}` "
            "asks the database instead"
        ) from error


def rate(found: Mapping[str, Any]) -> float:
    """Tokens per second of the running stage, 0 if there is none."""
    return float((found.get("running") or {}).get("tokens_per_s", 0.0))


def line(found: Mapping[str, Any]) -> str:
    """The same in one line, for a log."""
    if running := found.get("running"):
        return f"{running['stage']}: {describe(Progress.of(running))}"
    prompts = found["prompts"]
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in prompts.items())


def view(
    name: str, found: Mapping[str, Any], *, rates: Sequence[float], now: float, alive: bool
) -> RenderableType:
    """The whole screen. Pure: everything it shows is in its arguments."""
    parts: list[RenderableType] = [_head(name, found, now, alive)]
    parts += [
        Panel(
            _prompts(found["prompts"], found.get("truncated", 0)),
            title="prompts",
            title_align="left",
        )
    ]
    if found.get("running"):
        running = Progress.of(found["running"])
        title = running.stage if alive else f"{running.stage} (ended without saying so)"
        parts.append(Panel(_stage(running, rates, alive), title=title, title_align="left"))
    parts.append(Panel(_disk(found), title="disk", title_align="left"))
    return Group(*parts)


def _head(name: str, found: Mapping[str, Any], now: float, alive: bool) -> Text:
    age = max(0.0, now - found.get("time", now))
    head = Text(name, style="bold")
    if not found.get("running"):
        head.append("  nothing runs", style="dim")
        head.append(f", last written {duration(age)} ago", style="dim")
    elif not alive:
        head.append(
            f"  process {found['pid']} has been gone for {duration(age)}; the same command goes on "
            "where it was",
            style="bold yellow",
        )
    else:
        head.append(f"  process {found['pid']}, {duration(age)} ago", style="dim")
        if age > _QUIET_S:
            head.append(f"  no news for {duration(age)}", style="yellow")
    return head


def _prompts(prompts: Mapping[str, int], truncated: int = 0) -> RenderableType:
    total = max(1, prompts["total"])
    bar, legend = Text(), []
    for name, mark, style in _STATES:
        bar.append(mark * _cells(prompts[name], total), style=style)
        share = f"{100 * prompts[name] / total:.1f} %"
        label = Text(f"{mark} {name.replace('_', ' ')}", style=style)
        legend.append((label, _right(f"{prompts[name]:,}", 9), _right(share, 8)))
    bar.append(f"  {prompts['total']:,} in all", style="bold")
    if truncated:
        bar.append(f", {truncated:,} truncated", style="yellow")
    return Group(bar, _two_by_two(legend))


def _two_by_two(rows: Sequence[Sequence[RenderableType]]) -> Table:
    """Rows in two blocks side by side, read downwards: a terminal is wider than high."""
    grid = Table.grid(padding=(0, 2))
    half = (len(rows) + 1) // 2
    for place in range(half):
        right = rows[place + half] if place + half < len(rows) else [""] * len(rows[0])
        grid.add_row(*rows[place], "  ", *right)
    return grid


def _cells(part: int, whole: int) -> int:
    """Cells of a bar; what is there at all is seen."""
    return max(1, round(_BAR * part / whole)) if part else 0


def _stage(running: Progress, rates: Sequence[float], alive: bool) -> RenderableType:
    done = _cells(running.done, max(1, running.total))
    bar = Text("█" * done, style="green").append("░" * max(0, _BAR - done), style="dim")
    bar.append(f"  {running.done:,} of {running.total:,}", style="bold")
    grid = Table.grid(padding=(0, 2))
    rows: list[tuple[str, Text]] = []
    if alive:
        left = eta(running).removesuffix(" left") or "not known yet"
        speed = Text(f"{running.tokens_per_s:,.0f}  ").append(spark(rates), style="green")
        rows = [("left", Text(left)), ("tokens/s", speed)]
        rows.append(("in flight", Text(f"{running.in_flight:,}")))
    wrong = [
        f"{getattr(running, name):,} {name.replace('_', ' ')}"
        for name in ("timed_out", "failed", "rejected")
        if getattr(running, name)
    ]
    if wrong:
        rows.append(("this run", Text(", ".join(wrong), style="yellow")))
    if running.note:
        rows.append(("note", Text(running.note)))
    for label, value in rows:
        grid.add_row(Text(label, style="dim"), value)
    return Group(bar, grid)


def spark(values: Sequence[float]) -> str:
    """A line of blocks, the highest for the largest value."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(_SPARKS[min(7, int(8 * value / top))] for value in values)


def _disk(found: Mapping[str, Any]) -> RenderableType:
    disk = found["disk"]
    used, budget = disk["used_bytes"], disk["budget_bytes"]
    parts: list[RenderableType] = []
    if budget:
        share = used / budget
        style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
        done = min(_BAR, _cells(used, budget))
        bar = Text("█" * done, style=style).append("░" * (_BAR - done), style="dim")
        text = f"  {format_size(used)} of {format_size(budget)} ({100 * share:.0f} %)"
        parts.append(bar.append(text, style="bold"))
    else:
        parts.append(Text(f"{format_size(used)} used, no budget set", style="bold"))
    rows = [
        ("hidden states", f"{format_size(disk['hidden_states_bytes'])}"),
        ("completions", format_size(disk["completions_bytes"])),
        ("staging", format_size(disk["staging_bytes"])),
        ("free on the volume", format_size(disk["free_bytes"])),
    ]
    if disk["bytes_per_token"]:
        rows.append(("a token takes", f"{disk['bytes_per_token']:,.0f} B"))
        rows.append(("compression", f"{disk['compression_ratio']:.2f}"))
        rows.append(("samples that still fit", f"{disk['samples_that_still_fit']:,}"))
    cells = [(Text(label, style="dim"), _right(value, 9)) for label, value in rows]
    parts.append(_two_by_two(cells))
    if found.get("codecs"):
        parts.append(Text("stored as  ", style="dim").append(precision_line(found), "default"))
    return Group(*parts)


def _right(text: str, width: int) -> Text:
    return Text(text.rjust(width))
