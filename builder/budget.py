"""The disk budget: what may still be written, and who has to wait for room.

Counts the dataset folder, the staging folder and what has been promised to work in flight. What is
worth dropping when the budget is full is left to whoever evicts.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from draftmill.manifests.errors import BudgetError
from draftmill.manifests.files import folder_bytes
from draftmill.manifests.headroom import default_headroom
from draftmill.manifests.sizes import format_size, parse_size

_MEASURE_EVERY_S = 2.0
_RETRY_S = 0.2


def parse_budget(text: str, folder: Path) -> int:
    """Bytes of a budget as a person writes it: 500GB, 2TiB, or 80% of the volume of `folder`.

    Raises ValueError with the forms that are understood.
    """
    share = parse_share(text)
    if share is None:
        try:
            size = parse_size(text)
        except ValueError as error:
            raise ValueError(f"{error}, or a share of the volume like 80%") from error
    else:
        volume = os.statvfs(_existing(folder))
        size = int(volume.f_blocks * volume.f_frsize * share / 100)
    if size < 1:
        raise ValueError(f"{text!r} is nothing at all")
    return size


def parse_share(text: str) -> float | None:
    """Percent of "80%", None where it is no share; ValueError outside of 0% to 100%."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if found is None:
        return None
    if not 0 < float(found[1]) <= 100:
        raise ValueError(f"{text!r} is not within 0% and 100% of the volume")
    return float(found[1])


def check_budget(limit_bytes: int) -> None:
    """Raises ValueError, with the arithmetic, for a budget that leaves no byte for samples."""
    headroom = default_headroom(limit_bytes)
    if limit_bytes <= headroom:
        raise ValueError(
            f"{format_size(limit_bytes)} are no room for samples: {format_size(headroom)} are kept "
            "for the database, its log and snapshots, and samples need what is above that"
        )


class Reservation:
    """Room promised to one piece of work. What it holds is given back piece by piece."""

    def __init__(self, budget: Budget, key: str, stored_bytes: int, staged_bytes: int) -> None:
        self.key = key
        self.stored_bytes = stored_bytes
        self.staged_bytes = staged_bytes
        self._budget = budget

    def stored(self, num_bytes: int) -> None:
        """The work is committed with `num_bytes`; only the staged file still holds room."""
        self._budget._stored(self, num_bytes)

    def release(self) -> None:
        """Nothing of it takes room any more (or its bytes were counted by `stored`)."""
        self._budget._release(self)


class Budget:
    """Promises room within `limit_bytes` (None: within the disks alone), and measures what is used.

    A measurement that meets a half-written commit counts it twice until the next one: errors are
    always on the side of too much. Belongs to one event loop.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None,
        dataset: Path,
        staging: Path | None = None,
        staging_limit_bytes: int | None = None,
        headroom_bytes: int | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.staging_limit_bytes = staging_limit_bytes
        self.headroom_bytes = (
            default_headroom(limit_bytes) if headroom_bytes is None else headroom_bytes
        )
        self._dataset = dataset
        inside = staging is not None and dataset.resolve() in staging.resolve().parents
        self._staging = staging
        self._staging_inside = inside
        self._held: dict[str, Reservation] = {}
        self._held_stored = self._held_staged = 0  # their sums, for every prompt asks for them
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._refusal: str | None = None
        self._measured_at = 0.0
        self._measure_s = 0.0
        self._dataset_bytes = 0
        self._foreign_bytes = 0  # in staging, promised to nobody here
        self._live_bytes = 0  # in staging, of files that reservations stand for
        self.measure()

    @property
    def used_bytes(self) -> int:
        """Bytes on disk as last measured, plus what was committed since."""
        return self._dataset_bytes + self._foreign_bytes + self._live_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes promised to work in flight."""
        return self._held_stored + self._held_staged

    @property
    def held(self) -> frozenset[str]:
        """Keys of all reservations that are not released."""
        return frozenset(self._held)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for room: the time to commit and to delete what is done."""
        return self._turn.locked()

    def refuse(self, reason: str) -> None:
        """Nobody gets room any more, those who wait included: what is held may never come back."""
        self._refusal = reason
        self._freed.set()

    def measure(self) -> None:
        """Read the true sizes from the disk."""
        start = time.monotonic()
        self._dataset_bytes = folder_bytes(self._dataset)
        self._foreign_bytes = self._live_bytes = 0
        if self._staging is not None and self._staging.is_dir():
            for entry in os.scandir(self._staging):
                try:
                    size = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
                if any(key in entry.name for key in self._held):
                    self._live_bytes += size
                else:
                    self._foreign_bytes += size
            if self._staging_inside:
                self._dataset_bytes -= self._foreign_bytes + self._live_bytes
        self._measured_at = time.monotonic()
        self._measure_s = self._measured_at - start

    async def reserve(
        self,
        key: str,
        *,
        stored_bytes: int,
        staged_bytes: int = 0,
        on_wait: Callable[[], None] | None = None,
    ) -> Reservation:
        """Room for one piece of work, waiting while others may give some back, first come first.

        `key` is unique and part of the names of its staged files; `on_wait` is called before each
        wait. Raises BudgetError when nothing is held that could be given back.
        """
        async with self._turn:
            while True:
                age_s = time.monotonic() - self._measured_at
                if age_s > max(_MEASURE_EVERY_S, 50 * self._measure_s):
                    self.measure()
                self._freed.clear()
                if self._refusal is not None:
                    raise BudgetError(self._refusal)
                if self._lack(stored_bytes, staged_bytes) is None:
                    break
                nothing_held = not self._held
                if nothing_held or age_s > max(_RETRY_S, 20 * self._measure_s):
                    self.measure()
                    lack = self._lack(stored_bytes, staged_bytes)
                    if lack is None:
                        break
                    if nothing_held:
                        raise BudgetError(lack)
                if on_wait is not None:
                    on_wait()
                try:
                    await asyncio.wait_for(self._freed.wait(), _RETRY_S)
                except TimeoutError:
                    pass
            reservation = Reservation(self, key, stored_bytes, staged_bytes)
            assert key not in self._held, "keys are unique"
            self._held[key] = reservation
            self._held_stored += stored_bytes
            self._held_staged += staged_bytes
            return reservation

    def _lack(self, stored_bytes: int, staged_bytes: int) -> str | None:
        """Why there is no room for this much more now; None when there is."""
        need = stored_bytes + staged_bytes
        stored, staged = self._held_stored, self._held_staged
        if self.limit_bytes is not None:
            # a file may turn out larger than promised; what is on disk counts
            taken = self._dataset_bytes + self._foreign_bytes + max(staged, self._live_bytes)
            if taken + stored + need + self.headroom_bytes > self.limit_bytes:
                return (
                    f"The disk budget of {format_size(self.limit_bytes)} is used up: "
                    f"{format_size(self.used_bytes)} are stored, the next sample needs up to "
                    f"{format_size(need)} and {format_size(self.headroom_bytes)} are kept for the "
                    "database. Raise disk_budget or evict hidden states."
                )
        if self.staging_limit_bytes is not None and staged_bytes:
            room = self.staging_limit_bytes - self._foreign_bytes - max(staged, self._live_bytes)
            if staged_bytes > room:
                return (
                    f"{self._staging}: the next sample's file takes {format_size(staged_bytes)}, "
                    f"{format_size(max(0, room))} of {format_size(self.staging_limit_bytes)} are "
                    "left for staging. Raise staging_size under [extract] or empty the folder."
                )
        return self._disk_lack(stored_bytes, staged_bytes, stored, staged)

    def _disk_lack(
        self, stored_bytes: int, staged_bytes: int, stored: int, staged: int
    ) -> str | None:
        """The same for the disks themselves. Staged files in place are no longer to be written."""
        # by device: a folder on it, and bytes for the next sample, what is in flight, the database
        demands = {
            os.stat(self._dataset).st_dev: (
                self._dataset,
                [stored_bytes, stored, self.headroom_bytes],
            )
        }
        if self._staging is not None and self._staging.is_dir():
            device = os.stat(self._staging).st_dev
            _, parts = demands.setdefault(device, (self._staging, [0, 0, 0]))
            parts[0] += staged_bytes
            parts[1] += max(0, staged - self._live_bytes)
        for folder, parts in demands.values():
            volume = os.statvfs(folder)
            free = volume.f_bavail * volume.f_frsize
            if sum(parts) > free:
                shares = zip(
                    parts, ("the next sample", "samples in flight", "the database"), strict=True
                )
                needs = " + ".join(f"{format_size(size)} for {who}" for size, who in shares if size)
                return (
                    f"{folder}: the disk has {format_size(free)} left, needed are up to {needs}. "
                    "Free space on it or evict hidden states."
                )
        return None

    def _stored(self, reservation: Reservation, num_bytes: int) -> None:
        self._dataset_bytes += num_bytes
        if reservation.key in self._held:
            self._held_stored -= reservation.stored_bytes
        reservation.stored_bytes = 0
        self._freed.set()

    def _release(self, reservation: Reservation) -> None:
        if self._held.pop(reservation.key, None) is not None:
            self._held_stored -= reservation.stored_bytes
            self._held_staged -= reservation.staged_bytes
            self._live_bytes = max(0, self._live_bytes - reservation.staged_bytes)
            self._freed.set()


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
