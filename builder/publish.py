"""The committer's view of a dataset writer: what is published says how far the run is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from draftmill.builder.progress import Progress
from draftmill.manifests.types import Result


class PublishingWriter(Protocol):
    """The part of a dataset writer that a running stage commits to."""

    def commit(self, results: Sequence[Result], /) -> object: ...
    def publish(self, *, running: Mapping[str, Any] | None = None) -> object: ...


class Publisher:
    """Commits to the writer as it is; publishes with the stage's `progress` and bytes used."""

    def __init__(
        self, writer: PublishingWriter, progress: Progress, used_bytes: Callable[[], int]
    ) -> None:
        self._writer = writer
        self._progress = progress
        self._used_bytes = used_bytes

    def commit(self, results: Sequence[Result], /) -> None:
        """Make results durable."""
        self._writer.commit(results)

    def publish(self) -> None:
        """Refresh what other processes see."""
        self._progress.used_bytes = self._used_bytes()
        self._writer.publish(running=asdict(self._progress))
