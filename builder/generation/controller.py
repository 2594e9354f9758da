"""How many requests one server gets at once: grows until more brings nothing, yields to pressure.

Pure decisions on readings that `endpoint` takes; nothing here waits or asks. A decision is a new
limit and the sentence that goes into the `control` table.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftmill.builder.requests.metrics import ServerLoad

START = 16  # a calibration costs at most so many requests
KV_FULL = 0.95
SETTLE_READINGS = 2
MIN_EFFICIENCY = 0.15  # a step must bring this share of what its size promises
HOLD_READINGS = 12
OVERLOAD_SHARE = 0.05
MAX_HOLD_READINGS = 96


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was seen since the last reading. `load` is None without /metrics."""

    in_flight: int
    tokens_per_s: float
    completions: int
    overloads: int
    load: ServerLoad | None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A new limit, and why."""

    limit: int
    reason: str


class Controller:
    """Limit of one server. With `fixed` it never grows or yields on its own."""

    def __init__(self, *, maximum: int, fixed: int | None = None) -> None:
        self.limit = fixed if fixed is not None else min(START, maximum)
        self._maximum = maximum
        self._fixed = fixed
        self._doubling = True
        self._before: tuple[int, float] | None = None  # limit and rate before the last step
        self._rates: list[float] = []
        self._completions = 0
        self._hold = 0
        self._next_hold = HOLD_READINGS
        self._preemptions: float | None = None
        self._queued: ServerLoad | None = None
        self._answers = self._overloads = 0

    def restart(self) -> Decision | None:
        """The server was away: begin again below what it could take."""
        self._rates.clear()
        self._before = self._preemptions = None
        if self._fixed is not None:
            return None
        return self._to(max(1, min(self.limit, max(START, self.limit // 2))), "server is back")

    def read(self, reading: Reading) -> Decision | None:
        """Takes one reading; returns a decision when the limit changes."""
        if self._fixed is not None:
            return None
        pressure = self._pressure(reading)
        if pressure is not None:
            return self._yield(reading, pressure)
        queued, self._queued = self._queued, None
        if reading.load is not None and _queues(reading.load):
            self._queued = reading.load
            # what waits at one instant may be what just came; what waits twice is a queue
            return self._queueing(queued, reading.load) if queued is not None else None
        if self._hold > 0:
            self._hold -= 1
            return None
        if reading.in_flight < 0.9 * self.limit:
            self._rates.clear()  # not limited by us: such a rate says nothing about the limit
            return None
        self._rates.append(reading.tokens_per_s)
        self._completions += reading.completions
        # without metrics a rate is that of the completions, and needs enough of them
        enough = reading.load is not None or self._completions >= max(8, self.limit // 2)
        if len(self._rates) < SETTLE_READINGS or not enough:
            return None
        rate = sum(self._rates[1:]) / (len(self._rates) - 1)
        self._rates.clear()
        self._completions = 0
        return self._judge(rate)

    def _pressure(self, reading: Reading) -> str | None:
        load = reading.load
        self._answers += reading.completions + reading.overloads
        self._overloads += reading.overloads
        overloads, share = self._overloads, self._overloads / max(1, self._answers)
        if overloads >= 2 and share > OVERLOAD_SHARE:
            self._answers = self._overloads = 0
            return f"{overloads} requests were answered with 429 or 503, {share:.0%} of all"
        if self._answers >= 64:
            self._answers = self._overloads = 0
        if load is None:
            return None
        before, self._preemptions = self._preemptions, load.preemptions
        if before is not None and load.preemptions - before > max(1.0, 0.02 * load.running):
            return f"{load.preemptions - before:.0f} pre-emptions since the last reading"
        if load.kv_usage >= KV_FULL and load.waiting > 0:
            return f"KV memory {load.kv_usage:.0%} full and {load.waiting} requests wait"
        return None

    def _yield(self, reading: Reading, reason: str) -> Decision | None:
        self._doubling = False
        self._before = None
        self._rates.clear()
        if reading.in_flight > self.limit:
            return None  # the last step down is still draining
        self._hold = self._next_hold
        # what was refused is not in flight any more, and of what is only tokenised nothing ever is
        busy = max(reading.in_flight, reading.overloads, 1)
        limit = max(1, int(min(self.limit, busy) * 0.8))
        return self._to(limit, reason)

    def _queueing(self, before: ServerLoad, load: ServerLoad) -> Decision | None:
        self._doubling = False
        self._rates.clear()
        self._before = None
        running = max(before.running, load.running)
        target = max(1, running + max(1, running // 50))
        if target >= self.limit:
            return None  # the queue is somebody else's
        self._hold = self._next_hold
        return self._to(target, f"{load.waiting} requests wait in the server, {load.running} run")

    def _judge(self, rate: float) -> Decision | None:
        if self._before is not None:
            limit, earlier = self._before
            self._before = None
            promised = self.limit / limit - 1.0
            if earlier > 0 and rate / earlier - 1.0 < MIN_EFFICIENCY * promised:
                self._doubling = False
                self._hold = self._next_hold
                self._next_hold = min(MAX_HOLD_READINGS, 2 * self._next_hold)
                return self._to(
                    limit,
                    f"{self.limit} instead of {limit} requests bring {rate:,.0f} instead of "
                    f"{earlier:,.0f} tokens/s: step taken back",
                )
        step = self.limit if self._doubling else max(1, self.limit // 10)
        limit = min(self._maximum, self.limit + step)
        if limit == self.limit:
            return None
        self._before = (self.limit, rate)
        return self._to(limit, f"{rate:,.0f} tokens/s at {self.limit} requests: trying more")

    def _to(self, limit: int, reason: str) -> Decision | None:
        if limit == self.limit:
            return None
        self.limit = limit
        return Decision(limit=limit, reason=reason)


def _queues(load: ServerLoad) -> bool:
    return load.waiting > 2 + load.running // 10
