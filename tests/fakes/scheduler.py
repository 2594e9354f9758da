"""When the fake server's requests finish: throughput shared by what runs, a queue before it.

Processor sharing in virtual time, as continuous batching behaves: n running requests each advance
at min(per-request limit, total / n) tokens a second. KV memory is counted and pre-empts the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import deque
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Speed:
    """How fast the fake server is. `tokens_per_s` None answers at once."""

    tokens_per_s: float | None = None
    tokens_per_s_each: float = float("inf")
    prefill_tokens_per_s: float = float("inf")
    max_running: int = 256
    kv_tokens: int | None = None
    latency_s: float = 0.0
    # (start, end, factor): within these seconds after the first request it is slower or faster
    phases: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(eq=False)
class _Job:
    prompt_tokens: int
    completion_tokens: int
    prefill_work: float
    done: asyncio.Future[None]
    remaining: float = 0.0
    generated_before: float = 0.0
    admitted_at: float = 0.0
    finish_at: float = 0.0
    order: int = 0
    state: str = "waiting"


class Scheduler:
    """Runs jobs; `stuck` freezes them all while everything else looks healthy."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.stuck = False
        self.preemptions = 0
        self.finished_tokens = 0.0
        self.prompt_tokens = 0
        self.wasted_tokens = 0.0
        self.peak_running = 0
        self.running: list[_Job] = []
        self.waiting: deque[_Job] = deque()
        self._heap: list[tuple[float, int, _Job]] = []
        self._virtual = 0.0
        self._clock = self._start = time.monotonic()
        self.created = time.time()
        self._order = itertools.count()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def run(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Returns when the request's tokens are generated; cancelling it aborts the request."""
        speed = self.speed
        if speed.latency_s:
            await asyncio.sleep(speed.latency_s)
        if speed.tokens_per_s is None and not self.stuck:
            self.finished_tokens += completion_tokens
            self.prompt_tokens += prompt_tokens
            return
        if self._task is None:
            self._start = time.monotonic()
            self._task = asyncio.create_task(self._loop())
        prefill_work = prompt_tokens * (speed.tokens_per_s or 1e9) / speed.prefill_tokens_per_s
        job = _Job(
            prompt_tokens,
            completion_tokens,
            prefill_work,
            asyncio.get_running_loop().create_future(),
            remaining=completion_tokens + prefill_work,
        )
        self.waiting.append(job)
        self._wake.set()
        try:
            await job.done
        except asyncio.CancelledError:
            self._advance()
            self.wasted_tokens += self._generated(job)
            self._drop(job)
            self._wake.set()
            raise

    def kv_used(self) -> float:
        return sum(job.prompt_tokens + self._generated(job) for job in self.running)

    def generated_total(self) -> float:
        self._advance()
        in_flight = sum(map(self._generated, itertools.chain(self.running, self.waiting)))
        return self.finished_tokens + self.wasted_tokens + in_flight

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _generated(self, job: _Job) -> float:
        if job.state != "running":
            return job.generated_before
        progress = self._virtual - job.admitted_at - job.prefill_work
        return min(float(job.completion_tokens), job.generated_before + max(0.0, progress))

    def _factor(self) -> float:
        now = self._clock - self._start
        return next((f for start, end, f in self.speed.phases if start <= now < end), 1.0)

    def _rate(self) -> float:
        if self.stuck or not self.running:
            return 0.0
        total = (self.speed.tokens_per_s or 1e9) * self._factor()
        return min(self.speed.tokens_per_s_each, total / len(self.running))

    def _advance(self) -> None:
        now = time.monotonic()
        self._virtual += self._rate() * (now - self._clock)
        self._clock = now

    def _drop(self, job: _Job) -> None:
        if job.state == "running":
            self.running.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        job.state = "gone"

    def _admit(self) -> None:
        kv_tokens = self.speed.kv_tokens
        used = self.kv_used() if kv_tokens is not None else 0.0
        while self.waiting and len(self.running) < self.speed.max_running:
            job = self.waiting[0]
            need = job.prompt_tokens + job.generated_before
            if kv_tokens is not None and self.running and used + need > kv_tokens:
                break
            used += need
            self.waiting.popleft()
            job.state = "running"
            job.admitted_at = self._virtual
            job.order = next(self._order)
            job.finish_at = self._virtual + job.remaining
            self.running.append(job)
            heapq.heappush(self._heap, (job.finish_at, job.order, job))
        self.peak_running = max(self.peak_running, len(self.running))

    def _preempt(self) -> None:
        kv_tokens = self.speed.kv_tokens
        while kv_tokens is not None and len(self.running) > 1 and self.kv_used() > kv_tokens:
            job = max(self.running, key=lambda each: each.order)
            generated = self._generated(job)
            per_token = job.prefill_work / job.prompt_tokens if job.prompt_tokens else 0.0
            self.running.remove(job)
            job.state = "waiting"
            job.generated_before = generated
            job.prefill_work = (job.prompt_tokens + generated) * per_token
            job.remaining = job.completion_tokens - generated + job.prefill_work
            self.waiting.appendleft(job)
            self.preemptions += 1

    def _finish(self) -> None:
        while self._heap:
            finish_at, order, job = self._heap[0]
            stale = job.state != "running" or job.order != order
            if not stale and finish_at > self._virtual + 1e-9:
                return
            heapq.heappop(self._heap)
            if stale:
                continue
            self.running.remove(job)
            job.state = "done"
            self.finished_tokens += job.completion_tokens
            self.prompt_tokens += job.prompt_tokens
            if not job.done.done():
                job.done.set_result(None)

    async def _loop(self) -> None:
        while True:
            self._wake.clear()
            self._advance()
            self._finish()
            self._preempt()
            self._admit()
            rate = self._rate()
            timeout: float | None = None
            if self.running:
                # phases and KV use change under way: look again at least this often
                timeout = 0.02
                if rate > 0 and self._heap:
                    timeout = min(timeout, max(0.0, (self._heap[0][0] - self._virtual) / rate))
            try:
                await asyncio.wait_for(self._wake.wait(), timeout)
            except TimeoutError:
                continue


def metrics_text(scheduler: Scheduler, model: str) -> str:
    """/metrics as vLLM prints it."""
    kv_tokens = scheduler.speed.kv_tokens
    values: dict[str, float] = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "generation_tokens_total": scheduler.generated_total(),
        "kv_cache_usage_perc": min(1.0, scheduler.kv_used() / kv_tokens) if kv_tokens else 0.0,
        "num_preemptions_total": scheduler.preemptions,
        "prompt_tokens_total": scheduler.prompt_tokens,
    }
    label = f'{{engine="0",model_name="{model}"}}'
    lines = []
    for name, value in values.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# TYPE vllm:{name} {kind}\nvllm:{name}{label} {float(value)}")
    if kv_tokens:
        blocks = f'block_size="16",engine="0",num_gpu_blocks="{kv_tokens // 16}"'
        lines.append(f"vllm:cache_config_info{{{blocks}}} 1.0")
    lines.append(f"process_start_time_seconds {scheduler.created}")
    return "\n".join(lines) + "\n"
