"""Several sources in the shares that were asked for, each prompt chosen by its content.

Of a source that is limited, the prompts with the smallest hashes are taken. So the choice looks
random and is always the same, and a higher limit or a longer file only adds. What is in the dataset
already counts for its source and is never removed.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftmill.builder.sources.read import SourceError, read_source
from draftmill.builder.sources.settings import SourceSettings
from draftmill.manifests import queries
from draftmill.manifests.types import Prompt
from draftmill.manifests.writer import AddReport, DatasetWriter

_BATCH = 20_000

Keys = NDArray[np.uint64]
OnError = Callable[[SourceError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceReport:
    """What one source gave: new prompts, those that the dataset had, rows that could not be used.

    If the source was limited, `wanted` is its share and `found` what there was to choose from, both
    with those that the dataset had.
    """

    name: str
    added: int
    known: int
    skipped: int
    wanted: int | None = None
    found: int | None = None


def shares(
    total: int, present: Sequence[int], most: Sequence[int], weights: Sequence[float]
) -> list[int]:
    """How many prompts of each source `total` of them are, by weight, never fewer than `present`.

    Gives one after the other to the source that is furthest behind (Sainte-Laguë), so that a larger
    `total` takes nothing away from any of them. Sources that have no more leave their share to the
    others. Less than `total` only when all sources are used up.
    """
    counts = list(present)
    waiting = [
        ((count + 0.5) / weight, index)
        for index, (count, weight) in enumerate(zip(counts, weights, strict=True))
        if count < most[index]
    ]
    heapq.heapify(waiting)
    left = total - sum(counts)
    while left > 0 and waiting:
        _, index = waiting[0]
        counts[index] += 1
        left -= 1
        if counts[index] < most[index]:
            heapq.heapreplace(waiting, ((counts[index] + 0.5) / weights[index], index))
        else:
            heapq.heappop(waiting)
    return counts


def add_sources(
    writer: DatasetWriter,
    sources: Sequence[SourceSettings],
    *,
    folder: Path,
    total: int | None,
    on_error: OnError,
) -> list[SourceReport]:
    """Add the prompts of `sources`, `total` of them at most, and tell what each of them gave.

    Paths start at `folder`. Raises SourceFileError before anything is added when one of them cannot
    be read; single bad rows go to `on_error`. Limited sources are read twice; memory grows by eight
    bytes per prompt of these.
    """
    readers = [_Source(each, folder, on_error) for each in sources]
    limited = [each for each in readers if total is not None or each.settings.limit is not None]
    # What is taken whole goes first: nothing of it is then chosen from a limited source as well.
    reports = {id(each): each.add(writer, None) for each in readers if each not in limited}
    for each, (chosen, quota) in zip(limited, _choose(writer, limited, total), strict=True):
        reports[id(each)] = each.add(writer, chosen, quota)
    return [reports[id(each)] for each in readers]


def _choose(
    writer: DatasetWriter, readers: Sequence[_Source], total: int | None
) -> list[tuple[Keys, _Quota]]:
    """Keys of the prompts that each source is to add, and what they follow from."""
    with writer.lock:
        counts = queries.source_counts(writer.manifest)
    present = [counts.get(each.settings.key, 0) for each in readers]
    new: list[Keys] = []
    for reader in readers:
        keys = _unknown_keys(writer, reader)
        for earlier in new:  # the first source that has a prompt owns it
            keys = np.setdiff1d(keys, earlier, assume_unique=True)
        new.append(keys)
    found = [count + len(keys) for count, keys in zip(present, new, strict=True)]
    most = [
        max(count, min(reader.settings.limit or each, each))
        for reader, each, count in zip(readers, found, present, strict=True)
    ]
    wanted = most
    if total is not None:
        wanted = shares(total, present, most, [each.settings.weight for each in readers])
    return [
        (keys[: want - have], _Quota(present=have, wanted=want, found=each))
        for keys, want, have, each in zip(new, wanted, present, found, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Quota:
    present: int
    wanted: int
    found: int


class _Source:
    """One source that may be read several times; its bad rows are told once."""

    def __init__(self, settings: SourceSettings, folder: Path, on_error: OnError) -> None:
        self.settings = settings
        self._path = folder / settings.path
        self._on_error = on_error
        self._first = self._open()  # raises here when there is nothing to read
        self._read = False
        self.skipped = 0

    def _open(self) -> Iterator[Prompt | SourceError]:
        settings = self.settings
        return read_source(
            self._path,
            format=settings.format,
            name=settings.label,
            turns=settings.turns,
            mode=settings.mode,
        )

    def prompts(self) -> Iterator[Prompt]:
        """All prompts, from the start."""
        again, self._read = self._read, True
        for item in self._open() if again else self._first:
            if isinstance(item, Prompt):
                yield item
            elif not again:
                self.skipped += 1
                self._on_error(item)

    def add(
        self, writer: DatasetWriter, chosen: Keys | None, quota: _Quota | None = None
    ) -> SourceReport:
        """Add the prompts whose keys are `chosen` (ascending); None: all."""
        if chosen is None:
            added = writer.add_prompts(self.prompts())
        elif len(chosen):
            added = writer.add_prompts(p for p in self.prompts() if _among(chosen, _key(p)))
        else:
            added = AddReport()
        return SourceReport(
            name=self.settings.label,
            added=added.added,
            known=added.known if quota is None else quota.present,
            skipped=self.skipped,
            wanted=None if quota is None else quota.wanted,
            found=None if quota is None else quota.found,
        )


def _key(prompt: Prompt) -> int:
    """64 bits of the hash: enough to choose by, and small enough to keep for every prompt."""
    return int(prompt.hash[:16], 16)


def _among(keys: Keys, key: int) -> bool:
    place = int(np.searchsorted(keys, np.uint64(key)))
    return place < len(keys) and int(keys[place]) == key


def _unknown_keys(writer: DatasetWriter, source: _Source) -> Keys:
    """Keys of the source's prompts that the dataset does not have, ascending, each once."""
    keys = array("Q")
    batch: list[str] = []

    def keep() -> None:
        with writer.lock:
            unknown = queries.unknown(writer.manifest, batch)
        keys.extend(int(each[:16], 16) for each in unknown)
        batch.clear()

    for prompt in source.prompts():
        batch.append(prompt.hash)
        if len(batch) == _BATCH:
            keep()
    keep()
    return np.unique(np.frombuffer(keys, np.uint64)) if keys else np.zeros(0, np.uint64)
