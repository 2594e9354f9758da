"""Which samples a run trains on, in which split, order and packed row: pure planning, no reading.

A plan is made from the manifest alone, so starting costs the same for samples of any size. What it
says is frozen in the run's folder (`plan.py`); reading the samples is left to `loader`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, takewhile
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from draftmill.manifests.errors import DamagedError
from draftmill.manifests.types import Location

# Samples are packed among this many neighbours of the epoch's order: enough to fill rows well,
# few enough that the first row of a million samples is known at once.
SEGMENT = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Columns of the samples that can be trained on, in id order; one row is one sample.

    `tokens` counts prompt and completion after every cut, so `tokens - prompt_tokens` of them are
    supervised. Locations are rows of (shard, offset, length), digests of two words. No column holds
    Python objects: a million samples take 92 MB.
    """

    id: NDArray[np.int64]
    digest: NDArray[np.uint64]
    conversation: NDArray[np.uint64]
    prompt_tokens: NDArray[np.int32]
    tokens: NDArray[np.int32]
    completion_at: NDArray[np.int64]
    states_at: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.id)

    def take(self, rows: NDArray[Any]) -> Samples:
        """The samples at `rows` (indices or a mask)."""
        # Most often nothing is left out, and a million samples take a while to copy.
        if rows.dtype == np.bool_ and rows.all():
            return self
        return replace(self, **{item.name: getattr(self, item.name)[rows] for item in fields(self)})

    def completion_location(self, row: int) -> Location:
        """Where the token ids of a sample lie."""
        return Location(*self.completion_at[row].tolist())

    def states_location(self, row: int) -> Location:
        """Where the hidden states of a sample lie."""
        return Location(*self.states_at[row].tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The usable samples of a dataset, and how many were cut or left out."""

    samples: Samples
    cut: int
    nothing_supervised: int


def select(table: pa.Table, max_seq_len: int) -> Selection:
    """Samples that supervise at least one token after the cut at `max_seq_len` from the end.

    A draft model learns to predict what follows a generated token; the first generated token is
    the target's own, so a sample needs one generated token whose hidden state is there.
    """

    def column(name: str, dtype: Any) -> NDArray[Any]:
        return np.asarray(table.column(name).to_numpy(zero_copy_only=False), dtype=dtype)

    def location(stage: str) -> NDArray[np.int64]:
        names = [f"{stage}_{part}" for part in ("shard", "offset", "length")]
        return np.stack([column(name, np.int64) for name in names], axis=1)

    stored = column("tokens", np.int32)
    tokens = np.minimum(stored, np.int32(max_seq_len))
    prompt_tokens = column("prompt_tokens", np.int32)
    samples = Samples(
        id=column("id", np.int64),
        digest=_digests(table.column("digest")),
        conversation=_hashes(table.column("conversation")),
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        completion_at=location("generate"),
        states_at=location("extract"),
    )
    usable = (tokens > prompt_tokens) & (tokens >= 2)
    return Selection(
        samples=samples.take(usable),
        cut=int(np.count_nonzero(stored[usable] > max_seq_len)),
        nothing_supervised=int(np.count_nonzero(~usable)),
    )


def _digests(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Digests of 32 hex digits as words [N, 2], without a Python object for each."""
    try:
        fixed = column.combine_chunks().cast(pa.binary()).cast(pa.binary(32))
    except pa.ArrowInvalid as error:
        raise DamagedError(f"a completion's digest is not 32 hex digits: {error}") from error
    if len(fixed) == 0:
        return np.empty((0, 2), np.uint64)
    digits = np.frombuffer(fixed.buffers()[1], np.uint8, 32 * len(fixed), 32 * fixed.offset)
    # 0 to 9 are 0x30 to 0x39, a to f are 0x61 to 0x66
    values = (digits & 15) + 9 * (digits >> 6)
    return (values[0::2] << 4 | values[1::2]).view(np.uint64).reshape(-1, 2)


# The salt is fixed and not the run's seed: two runs are compared on the same held-out samples.
_SPLIT_SEED = 0x73706C6974


def _hashes(conversations: pa.ChunkedArray) -> NDArray[np.uint64]:
    result = np.empty(len(conversations), np.uint64)
    digest = xxhash.xxh3_64_intdigest
    start = 0
    # In pieces, so that never a million strings are in memory.
    for batch in pa.table({"name": conversations.cast(pa.binary())}).to_batches(
        max_chunksize=65536
    ):
        names = batch.column(0).to_pylist()
        result[start : start + len(names)] = [digest(name, _SPLIT_SEED) for name in names]
        start += len(names)
    return result


def is_validation(samples: Samples, fraction: float) -> NDArray[np.bool_]:
    """Mask of the samples whose conversation belongs to validation.

    Depends on the conversation alone: turns of one stay together, and adding data moves nothing.
    """
    return samples.conversation < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))


def row_tokens(samples: Samples) -> NDArray[np.int64]:
    """Places that each sample takes in a packed row.

    One less than its tokens: place i joins token i + 1 with the hidden states of token i.
    """
    return samples.tokens.astype(np.int64) - 1


def pack(lengths: NDArray[np.int64], members: NDArray[np.int64], room: int) -> list[list[int]]:
    """Rows of sample indices with at most `room` places each; nothing is cut or left out.

    Deterministic best-fit decreasing. Rows come in the order of their earliest sample, so that an
    epoch is not sorted by length. No length exceeds `room`.
    """
    sizes = lengths[members].tolist()
    rows: list[list[int]] = []
    # (places left, row), ascending: the first entry that is large enough fits best.
    gaps: list[tuple[int, int]] = []
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[place]
        at = bisect_left(gaps, (size, -1))
        if at == len(gaps):
            rows.append([])
            left, row = room, len(rows) - 1
        else:
            left, row = gaps.pop(at)
        rows[row].append(place)
        if left > size:
            insort(gaps, (left - size, row))
    return [members[row].tolist() for row in sorted(sorted(row) for row in rows)]


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of `count` samples in an epoch: one permutation of all of them."""
    return np.random.default_rng([seed, epoch]).permutation(count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A place in a run: the next row, and the segment of the epoch's order that it lies in.

    The segment makes resuming cheap: only it is packed again, not the whole run up to there.
    """

    row: int = 0
    epoch: int = 0
    segment: int = 0
    segment_row: int = 0  # the first row of the segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One packed row of a run: its sample indices, and the cursor that starts at it."""

    members: tuple[int, ...]
    cursor: Cursor

    @property
    def after(self) -> Cursor:
        """Where to go on once this row has been used."""
        return replace(self.cursor, row=self.cursor.row + 1)


def training_rows(
    samples: Samples,
    *,
    seed: int,
    room: int,
    start: Cursor,
    since: NDArray[np.int32] | None = None,
) -> Iterator[Row]:
    """The endless run of packed rows from `start` on; the same for every number of readers.

    `since` is the first epoch of each sample, rising; without it all take part from the first on.
    """
    lengths = row_tokens(samples)
    epoch, begin, first = start.epoch, start.segment, start.segment_row
    while len(samples):
        count = len(samples) if since is None else int(np.searchsorted(since, epoch, "right"))
        order = epoch_order(count, seed, epoch)
        for segment in range(begin, -(-len(order) // SEGMENT)):
            part = order[segment * SEGMENT : (segment + 1) * SEGMENT]
            rows = pack(lengths, part, room)
            for row, members in enumerate(rows, first):
                if row >= start.row:
                    at = Cursor(row=row, epoch=epoch, segment=segment, segment_row=first)
                    yield Row(members=tuple(members), cursor=at)
            first += len(rows)
        epoch, begin = epoch + 1, 0


def step_rows(rows: Iterator[Row], rows_per_step: int) -> Iterator[tuple[Row, ...]]:
    """The rows of each optimizer step, over all devices: the global batches of a run."""
    while len(batch := tuple(islice(rows, rows_per_step))) == rows_per_step:
        yield batch


def share(batch: Sequence[Row], rank: int, size: int) -> Sequence[Row]:
    """The rows of a global batch that device `rank` of `size` works on; `size` divides it."""
    each = len(batch) // size
    return batch[rank * each : (rank + 1) * each]


def validation_rows(samples: Samples, *, room: int, limit: int) -> list[Row]:
    """At most `limit` packed rows of the validation samples, always the same ones."""
    rows = training_rows(samples, seed=0, room=room, start=Cursor())
    first_epoch = takewhile(lambda row: row.cursor.epoch == 0, rows)
    return list(islice(first_epoch, limit))


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How well the first epoch fills its rows: per epoch, and the part of all places left empty."""

    rows: int
    tokens: int
    waste: float


def packing(
    samples: Samples, *, seed: int, room: int, epoch: int = 0, segments: int = 16
) -> Packing:
    """Rows and waste of an epoch, judged by its first `segments` where it has more."""
    lengths = row_tokens(samples)
    order = epoch_order(len(samples), seed, epoch)[: segments * SEGMENT]
    tokens = int(lengths.sum())
    rows = sum(
        len(pack(lengths, order[start : start + SEGMENT], room))
        for start in range(0, len(order), SEGMENT)
    )
    if rows == 0:
        return Packing(rows=0, tokens=0, waste=0.0)
    seen = int(lengths[order].sum())
    return Packing(rows=-(-rows * tokens // seen), tokens=tokens, waste=1 - seen / (rows * room))


def fingerprint(samples: Samples) -> str:
    """32 hex digits of which completions these are and how much of each is used."""
    hasher = xxhash.xxh3_128()
    for column in (samples.id, samples.prompt_tokens, samples.tokens, samples.digest):
        hasher.update(np.ascontiguousarray(column).data)
    return hasher.hexdigest()
