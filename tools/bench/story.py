"""A night that lost its longest answers to a fixed timeout, replayed at a scaled clock.

The night: 2,690 prompts, 200 at once, 1,600 tokens/s on average, at most 8,192 tokens each, and a
timeout of 1,800 s that dropped 8.3 % of the prompts, the longest ones. At an even speed nothing
could have timed out (200 requests share 1,600 tokens/s: 8,192 tokens take 1,024 s). Assumed here
is what makes it true: the server also serves others, who leave it a tenth of its speed in the
second half of every hour; lengths are lognormal (median 4,000, sigma 0.7, cut at the limit). These
numbers were searched for so that plain code with that timeout loses what was lost, at the average
speed that was seen.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.generation.stage import generate
from draftmill.builder.requests.client import TargetClient
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.types import Prompt
from draftmill.tools.bench.fake_server import MODEL, FakeServer, fake_server
from draftmill.tools.bench.figures import Figure, figure
from draftmill.tools.bench.generate import prompts

PROMPTS = 2690
CONCURRENCY = 200
TIMEOUT_S = 1800.0
MAX_TOKENS = 8192
_HOURS = 12
_FAST_TOKENS_PER_S = 2909.0
_SLOW = 0.1
_EVER = 1e9


@dataclass(frozen=True, kw_only=True)
class StoryBench:
    """`scale`: how many seconds of the night pass in one. Above 60 the clients become the limit."""

    scale: float = 60.0
    prompts: int = PROMPTS

    def __post_init__(self) -> None:
        if self.scale <= 0 or self.prompts < 1:
            raise ValueError(f"scale and prompts: more than 0, not {self.scale}, {self.prompts}")

    @property
    def server(self) -> dict[str, Any]:
        """The fake server's options."""
        hour = 3600 / self.scale
        return {
            "tokens_per_s": _FAST_TOKENS_PER_S * self.scale,
            "tokens_per_s_each": 60 * self.scale,
            "median_tokens": 4000,
            "sigma": 0.7,
            "max_model_len": 2 * MAX_TOKENS,
            "phases": [((k + 0.5) * hour, (k + 1) * hour, _SLOW) for k in range(_HOURS)],
        }

    def settings(self, **given: Any) -> GenerateSettings:
        """Settings of a run in the night, at this clock."""
        values: dict[str, Any] = {
            "model": MODEL,
            "concurrency": CONCURRENCY,
            "max_completion_tokens": MAX_TOKENS,
            "max_repetition": 1.0,
            "control_interval_s": max(0.05, 6 / self.scale),
            "min_deadline_s": 30 / self.scale,
            "watchdog_s": 600 / self.scale,
        }
        return GenerateSettings(**values | given)


@dataclass(frozen=True, kw_only=True)
class Night:
    """One replay, in the night's own seconds. `late`: answers that took over the timeout."""

    wall_s: float
    finished: int
    late: int
    wasted_share: float
    tokens_per_s: float


def bench_story(bench: StoryBench) -> list[Figure]:
    """The same night four times: plain code with the timeout, no deadline, and draftmill twice."""
    plain = asyncio.run(_plain(bench))
    free = _replay(bench, deadline_margin=_EVER)
    fixed = _replay(bench, timeout_s=TIMEOUT_S / bench.scale)
    auto = _replay(bench, concurrency="auto")
    found = [*_figures("plain_timeout", bench, plain), *_figures("no_deadline", bench, free)]
    found.append(figure("no_deadline.over_1800s", 100 * free.late / bench.prompts, "%"))
    for name, night in (("draftmill_timeout", fixed), ("draftmill_auto", auto)):
        found += _figures(name, bench, night, base=free)
    return found


def _figures(
    name: str, bench: StoryBench, night: Night, *, base: Night | None = None
) -> list[Figure]:
    lost = 100 * (bench.prompts - night.finished) / bench.prompts
    wall = figure(f"{name}.wall_s", night.wall_s, "s")
    if base is not None:
        other = "no_deadline.wall_s"
        wall = figure(wall["name"], night.wall_s, "s", baseline=other, base=base.wall_s)
    return [
        figure(f"{name}.lost", lost, "%"),
        figure(f"{name}.tokens_thrown_away", 100 * night.wasted_share, "%"),
        wall,
        figure(f"{name}.tokens_per_s", night.tokens_per_s, "1/s"),
    ]


def _night(
    bench: StoryBench, server: FakeServer, seconds: float, *, finished: int, late: int
) -> Night:
    counts, wall_s = server.counts(), seconds * bench.scale
    return Night(
        wall_s=wall_s,
        finished=finished,
        late=late,
        wasted_share=counts["wasted_tokens"] / counts["generated_tokens"],
        tokens_per_s=counts["generated_tokens"] / wall_s,
    )


async def _plain(bench: StoryBench) -> Night:
    """Today's practice: so many requests at once, each cancelled at the timeout and dropped."""
    slots = asyncio.Semaphore(CONCURRENCY)
    finished = 0
    with fake_server(**bench.server) as server:
        async with TargetClient(server.url, model=MODEL) as client:

            async def ask(prompt: Prompt) -> None:
                nonlocal finished
                async with slots:
                    try:
                        async with asyncio.timeout(TIMEOUT_S / bench.scale):
                            await client.chat(
                                prompt.conversation, sampling={}, max_tokens=MAX_TOKENS
                            )
                    except TimeoutError:
                        return
                    finished += 1

            start = time.monotonic()
            await asyncio.gather(*(ask(prompt) for prompt in prompts(bench.prompts)))
            seconds = time.monotonic() - start
        return _night(bench, server, seconds, finished=finished, late=0)


def _replay(bench: StoryBench, **given: Any) -> Night:
    """The generate stage with these settings; its rows are read from the manifest afterwards."""
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-") as folder:
        with Dataset.create(Path(folder) / "dataset", "").writer() as writer:
            writer.add_prompts(prompts(bench.prompts))
            with fake_server(**bench.server) as server:
                report = asyncio.run(generate(writer, bench.settings(**given), [server.url]))
                late = writer.manifest.rows(
                    "SELECT count(*) FROM attempts WHERE outcome = 'generated' AND total_s > ?",
                    [TIMEOUT_S / bench.scale],
                )[0][0]
                finished = writer.count("generated")
                return _night(bench, server, report.seconds, finished=finished, late=int(late))
