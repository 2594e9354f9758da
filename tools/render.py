"""How progress and figures look on a screen: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment
from rich.text import Text

from draftmill.builder.progress import Progress, StageReport
from draftmill.manifests.sizes import format_size
from draftmill.tools.terminal import clean, echo

_LINE_EVERY_S = 10.0


def duration(seconds: float) -> str:
    """Seconds as people say them: `45 s`, `12 min`, `3.4 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def eta(progress: Progress) -> str:
    """Time that is left, as a range: the rate of the last minute is only an estimate."""
    left = progress.total - progress.done
    if left <= 0 or progress.samples_per_s <= 0:
        return ""
    seconds = left / progress.samples_per_s
    return f"{duration(0.85 * seconds)} to {duration(1.3 * seconds)} left"


def describe(progress: Progress) -> str:
    """One line of figures."""
    parts = [f"{progress.done:,}/{progress.total:,}"]
    if progress.stage != "train":  # whose rows go nowhere
        parts.append(f"{progress.in_flight} in flight")
    if progress.tokens_per_s:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    for name in ("timed_out", "failed", "rejected"):
        if count := getattr(progress, name):
            parts.append(f"{count:,} {name.replace('_', ' ')}")
    if progress.budget_bytes:
        used, budget = format_size(progress.used_bytes), format_size(progress.budget_bytes)
        parts.append(f"{used} of {budget}")
    if left := eta(progress):
        parts.append(left)
    if progress.note:
        parts.append(progress.note)
    return ", ".join(parts)


def console(*, stderr: bool = False) -> Console:
    """A console that shows text as it is.

    Names, paths and servers' words may hold square brackets (`[/INST]`), which would be markup.
    """
    return _Screen(stderr=stderr, markup=False, emoji=False)


class _Screen(Console):
    """A console that obeys nobody but this program."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        # Before it is laid out where that is possible, so that lines stay within the screen.
        if isinstance(renderable, Text) and clean(renderable.plain) != renderable.plain:
            renderable = Text(clean(renderable.plain), renderable.style, end=renderable.end)
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else clean(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)


class Display:
    """Shows a stage's progress while it is entered; call it with each Progress."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._console = console(stderr=True)
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._line_at = 0.0
        self._last: Progress | None = None
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(24),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self._console,
            )

    def __enter__(self) -> Callable[[Progress], None]:
        if self._bar is not None:
            self._bar.start()
        return self

    def __call__(self, progress: Progress) -> None:
        self._last = progress
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self.label, total=progress.total, figures="")
            self._bar.update(
                self._task,
                total=progress.total,
                completed=progress.done,
                figures=describe(progress),
            )
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            echo(f"{self.label}: {describe(progress)}", err=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._last is not None:
            echo(f"{self.label}: {describe(self._last)}", err=True)


def say(text: str) -> None:
    """A line about what is happening; goes to stderr, results go to stdout."""
    echo(text, err=True)
    sys.stderr.flush()


def stage_line(report: StageReport) -> str:
    """How a stage ended, in one line."""
    counts = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(report.outcomes.items())
    ) or ("nothing done" if report.interrupted or report.stopped else "nothing to do")
    line = f"{report.stage}: {counts}"
    if report.tokens and report.seconds:
        rate = report.tokens / report.seconds
        line += f"; {report.tokens:,} tokens in {duration(report.seconds)} ({rate:,.0f} tokens/s)"
    if report.truncated:
        line += f"; {report.truncated:,} truncated"
    if report.given:
        line += f"; {report.given:,} answers were given (mode prefill)"
    if report.stopped:
        line += f"\n  stopped: {report.stopped}"
    return line
