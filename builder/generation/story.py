"""What the generate stage tells while it runs: progress, outcomes, decisions about servers.

Only counts and keeps; writing decisions into the dataset and drawing are left to others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from draftmill.builder.budget import Budget
from draftmill.builder.generation.endpoint import Endpoint
from draftmill.builder.progress import OnProgress, Progress, RateMeter, StageReport
from draftmill.manifests.types import GIVEN, Result
from draftmill.manifests.writer import DatasetWriter

log = logging.getLogger(__name__)


class Story:
    """Progress and report of one run. `decisions` wait to be written to the `control` table."""

    def __init__(
        self,
        report: StageReport,
        on_progress: OnProgress | None,
        *,
        in_flight: Callable[[], int],
        budget_bytes: int | None,
    ) -> None:
        self.report = report
        self.progress = Progress(stage=report.stage, budget_bytes=budget_bytes)
        self.decisions: list[dict[str, Any]] = []
        self._on_progress = on_progress
        self._in_flight = in_flight
        self._rates = RateMeter()

    def decided(self, endpoint: Endpoint, decision: str) -> None:
        """A decision about a server, with the readings that it came from."""
        load = endpoint.load
        self.decisions.append(
            {
                "time": time.time(),
                "endpoint": endpoint.name,
                "limit": endpoint.controller.limit,
                "running": None if load is None else load.running,
                "waiting": None if load is None else load.waiting,
                "kv_usage": None if load is None else load.kv_usage,
                "tokens_per_s": endpoint.pace.tokens_per_s,
                "decision": decision,
            }
        )
        log.info("%s: %s", endpoint.name, decision)
        self.progress.note = decision

    def asked_again(self, rows: int) -> None:
        """So many timed-out rows, earlier runs' included, are pending once more."""
        self.progress.total += max(0, rows - self.report.outcomes["timed_out"])
        self.report.outcomes["timed_out"] = 0
        log.info("asking %d timed-out prompts again, with longer deadlines", rows)

    def committed(self, results: Sequence[Result]) -> None:
        """Counts results whose commit has returned."""
        tokens = done = 0
        for result in results:
            attempt = result.attempt
            self.report.outcomes[attempt.outcome] += 1
            done += attempt.outcome != "transient"
            if attempt.finish_reason == GIVEN:
                self.report.given += attempt.outcome == "generated"
            elif attempt.outcome == "generated":
                tokens += attempt.completion_tokens or 0
                self.report.truncated += attempt.finish_reason == "length"
        self.report.tokens += tokens
        self._rates.add(tokens, done)
        self.show()

    def show(self) -> None:
        """Tells whoever watches."""
        outcomes, progress = self.report.outcomes, self.progress
        progress.timed_out = outcomes["timed_out"]
        progress.failed, progress.rejected = outcomes["failed"], outcomes["rejected"]
        progress.done = outcomes["generated"] + progress.failed + progress.rejected
        progress.in_flight = self._in_flight()
        progress.tokens = self.report.tokens
        self._rates.show(progress)
        if self._on_progress is not None:
            self._on_progress(progress)


class Publisher:
    """The committer's view of the writer: what is published says how far the run is."""

    def __init__(self, writer: DatasetWriter, progress: Progress, budget: Budget | None) -> None:
        self._writer = writer
        self._progress = progress
        self._budget = budget

    def commit(self, results: Sequence[Result], /) -> None:
        """Make results durable."""
        self._writer.commit(results)

    def publish(self) -> None:
        """Refresh what other processes see."""
        used = self._writer.used_bytes() if self._budget is None else self._budget.used_bytes
        self._progress.used_bytes = used
        self._writer.publish(running=asdict(self._progress))
