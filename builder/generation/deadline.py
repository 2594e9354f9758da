"""Deadlines from arithmetic: how long a request may take, from what its server is measured to do.

Pure clocks and sums. Measuring is left to `endpoint`, cancelling to `watch`.

The worst case that is assumed: every request on the server grows to `max_tokens`. With N requests
there (running or waiting) and G tokens generated since a request came, each had its share, G / N.
The request must be done when that share reaches `max_tokens`, whatever the speed was meanwhile: a
slow hour moves the deadline, and a server that stands still is the watchdog's case, not a timeout.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from draftmill.builder.requests.metrics import ServerLoad

SAMPLES = 64
CALIBRATION_REQUESTS = 16


class ActiveClock:
    """Seconds in which this process could work: a suspended process (SIGSTOP, a laptop's lid)
    finds its answers in the sockets when it wakes up, and must not find its deadlines passed."""

    MAX_STEP_S = 2.0

    def __init__(self, now: float) -> None:
        self._last = now
        self.seconds = 0.0
        self.gaps = 0  # how many steps were cut

    def tick(self, now: float) -> float:
        """Advances; returns the seconds that count."""
        step = now - self._last
        self._last = now
        if step > self.MAX_STEP_S:
            step = self.MAX_STEP_S
            self.gaps += 1
        self.seconds += step
        return step


class PaceClock:
    """Tokens that each request on one server can have got: `tokens` only grows.

    From /metrics where the server has it; otherwise from the slowest of the recent completions.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self.tokens_per_s: float | None = None  # of the whole server
        self._seconds_per_token: float | None = None
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._previous: ServerLoad | None = None
        self.has_metrics = False

    @property
    def calibrated(self) -> bool:
        """Whether there is a measurement at all."""
        return self.seconds_per_token is not None

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds in which each request gets one token, in the worst case; None if unknown."""
        if self._seconds_per_token is not None:
            return self._seconds_per_token
        if not self._samples:
            return None
        ordered = sorted(self._samples)
        return ordered[int(0.9 * (len(ordered) - 1))]

    def completed(self, tokens: int, seconds: float) -> None:
        """A request finished with so many tokens, queue and prefill included in the seconds."""
        if tokens > 0:
            self._samples.append(seconds / tokens)

    def read(
        self, load: ServerLoad | None, seconds: float, *, gap: bool = False, ours: int = 0
    ) -> float:
        """Takes one reading of /metrics, `seconds` after the last; returns tokens generated.

        `ours` is the most requests that we had there meanwhile: those that came and went between
        two readings had their share too.

        After a `gap` in which nothing could be read it only takes the new starting point.
        """
        previous, self._previous = self._previous, load
        if load is None:
            self.has_metrics = False
            self._seconds_per_token = None
            return 0.0
        self.has_metrics = True
        if previous is None or gap or seconds <= 0:
            return 0.0
        generated = load.generated_tokens - previous.generated_tokens
        if generated < 0:  # the server was restarted and counts from zero again
            return 0.0
        requests = (load.requests + previous.requests) / 2.0
        rate = generated / seconds
        self.tokens_per_s = (
            rate if self.tokens_per_s is None else 0.7 * self.tokens_per_s + 0.3 * rate
        )
        if generated > 0:
            share = generated / max(1.0, requests, ours)
            self.tokens += share
            measured = seconds / share
            old = self._seconds_per_token
            self._seconds_per_token = measured if old is None else 0.7 * old + 0.3 * measured
        return generated

    def elapse(self, seconds: float) -> None:
        """Time passes; moves the clock only when there are no metrics to move it."""
        if self.has_metrics:
            return
        pace = self.seconds_per_token
        if pace:
            self.tokens += seconds / pace


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a server may show no progress, and how often it is looked at."""

    interval_s: float = 2.0
    watchdog_s: float = 120.0
    probe_s: float = 120.0
    lost_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class DeadlineRule:
    """How much longer than the arithmetic says a request may take."""

    margin: float = 1.5
    floor_s: float = 30.0
    timeout_s: float | None = None
    uncalibrated_s: float = 1800.0

    def tokens(self, max_tokens: int, load: ServerLoad | None) -> float:
        """Share of tokens after which a request is late that found `load` when it came.

        Behind a queue, those that run may all just have started, and count once more.
        """
        queue = 0.0
        if load is not None and load.waiting > 0 and load.running > 0:
            queue = load.running / load.requests
        return self.margin * max_tokens * (1.0 + queue)


@dataclass(slots=True)
class Deadline:
    """The deadline of one request, in its server's tokens and in active seconds."""

    started_s: float
    started_tokens: float
    tokens: float
    floor_s: float

    def seconds(self, clock: PaceClock) -> float | None:
        """Seconds that the arithmetic allows at today's pace; None before any measurement."""
        pace = clock.seconds_per_token
        return None if pace is None else max(self.floor_s, self.tokens * pace)

    def sums(self, clock: PaceClock) -> str:
        """The arithmetic behind it, for the history of a request that was late."""
        pace = clock.seconds_per_token
        if pace is None:
            return "no speed could be measured"
        return f"{self.tokens:,.0f} tokens at {pace:.3g} s each, at least {self.floor_s:g} s"

    def passed(self, clock: PaceClock, now_s: float, rule: DeadlineRule) -> bool:
        """Whether the request is late by the arithmetic and by any fixed timeout."""
        elapsed = now_s - self.started_s
        if elapsed < max(self.floor_s, rule.timeout_s or 0.0):
            return False
        if not clock.calibrated:
            return elapsed >= max(rule.uncalibrated_s, rule.timeout_s or 0.0)
        return clock.tokens - self.started_tokens >= self.tokens


def timeout_arithmetic(
    timeout_s: float, requests: int, max_tokens: int, clock: PaceClock, margin: float
) -> str | None:
    """Why a fixed timeout does not fit the measured speed, in one line; None if it fits."""
    pace = clock.seconds_per_token
    if pace is None:
        return None
    needed = margin * max_tokens * pace
    if needed <= timeout_s:
        return None
    return (
        f"a timeout of {timeout_s:,.0f} s does not fit: {requests} requests of up to "
        f"{max_tokens:,} tokens at {pace:.3g} s a token each need {max_tokens * pace:,.0f} s, "
        f"with a margin of {margin:g} {needed:,.0f} s; the deadline is raised to that"
    )
