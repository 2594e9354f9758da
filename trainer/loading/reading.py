"""Reads one packed row of samples up to byte planes, into one piece of memory.

Knows no torch: processes that only read start in a fraction of a second. What a device makes of the
planes is `planes`'s and `rows`'s, which samples make a row is `data`'s, bytes and their checks are
the shard reader's.

Shapes: T tokens of a sample, P places of a packed row, S stored tokens behind it, L layers
(auxiliary, then the last), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.codec import codec
from draftmill.manifests.errors import DamagedError, DraftmillError
from draftmill.manifests.shards.reader import StatesBlocks
from draftmill.manifests.types import Completion, Location, StatesTLH
from draftmill.trainer.loading.data import Row, Samples
from draftmill.trainer.loading.groups import (
    Bytes,
    Group,
    GroupPlanes,
    StatesShape,
    aligned,
    placed_group,
)

Room = Callable[[int], Bytes]  # gives so many bytes to write to


def _fresh(size: int) -> Bytes:
    return np.empty(size, np.uint8)


class SampleReader(Protocol):
    """What is needed of a shard reader; `ShardReader` is the real one."""

    def completion(self, location: Location, *, text: bool = True) -> Completion:
        """Token ids (and text) of one sample."""

    def blocks(self, location: Location, *, tokens: int | None = None) -> StatesBlocks:
        """Hidden states of one sample, or of its first tokens, checked and not decoded yet."""


# What a model takes of a row besides hidden states, one number a place.
FIELDS: dict[str, type[np.generic]] = {
    "input_ids": np.int64,
    "position_ids": np.int64,
    "document_ids": np.int64,
    "loss_mask": np.bool_,
}
Fields = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneRow:
    """One packed row with its hidden states still in planes.

    `arena` holds everything, so that one copy brings the row to a device; `arrays` says where its
    numbers begin: FIELDS, `token` [P] int32 (the stored token of each place; the next one is stored
    behind it) and `block` [S] int32 (the block of each stored token, counted within its group).
    Stored tokens are those of all `groups`, in order. Places from `filled` on are empty.
    """

    row: Row
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    places: int
    shape: StatesShape
    arrays: dict[str, int]
    groups: tuple[Group, ...]
    num_bytes: int
    arena: Bytes

    @property
    def filled(self) -> int:
        """Places that samples take."""
        return sum(self.lengths)


def read_row(
    reader: SampleReader,
    samples: Samples,
    row: Row,
    shape: StatesShape,
    pad_to: int = 0,
    *,
    room: Room = _fresh,
) -> PlaneRow:
    """Read the samples of one packed row; `pad_to` fixes P, 0 lets it follow from the samples.

    `room` gives the arena; the stored bytes of the row are held beside it. Raises DamagedError,
    naming the sample, when its bytes or sizes are not what they must be.
    """
    lengths = row_lengths(samples, row)
    places = max(pad_to, sum(lengths))
    found = [_read_blocks(reader, samples, member, shape) for member in row.members]
    stored = [blocks for _, blocks in found]
    # Blocks of one codec lie side by side, so that a device merges them all at once.
    order = sorted(range(len(found)), key=lambda index: stored[index].codec)
    lengths_by_codec: dict[str, list[int]] = {}
    for index in order:
        lengths_by_codec.setdefault(stored[index].codec, []).extend(stored[index].lengths)
    total = sum(map(sum, lengths_by_codec.values()))
    arrays, end = {}, 0
    numbers = {name: (places, dtype) for name, dtype in FIELDS.items()}
    numbers |= {"token": (places, np.int32), "block": (total, np.int32)}
    for name, (count, dtype) in numbers.items():
        arrays[name], end = end, aligned(end + count * np.dtype(dtype).itemsize)
    groups = []
    for name, block_lengths in lengths_by_codec.items():
        group, end = placed_group(name, block_lengths, shape, end)
        groups.append(group)
    arena = room(end)
    views = {
        name: arena[arrays[name] :][: count * np.dtype(dtype).itemsize].view(dtype)
        for name, (count, dtype) in numbers.items()
    }
    fill_fields(views, samples, row, [token_ids for token_ids, _ in found])
    starts = np.cumsum([0, *(sum(stored[index].lengths) for index in order)])
    _fill_places(views["token"], lengths, dict(zip(order, starts.tolist(), strict=False)))
    views["block"][:] = np.concatenate(
        [np.repeat(np.arange(len(each)), each) for each in lengths_by_codec.values()]
    )
    for group in groups:
        members = [index for index in order if stored[index].codec == group.codec]
        target = GroupPlanes(group, shape, arena)
        for index in members:
            with naming(samples, row.members[index]):
                for payload, tokens in zip(
                    stored[index].payloads, stored[index].lengths, strict=True
                ):
                    target.decode(payload, tokens)
    return PlaneRow(
        row=row,
        sample_ids=tuple(int(samples.id[member]) for member in row.members),
        lengths=tuple(lengths),
        places=places,
        shape=shape,
        arrays=arrays,
        groups=tuple(groups),
        num_bytes=end,
        arena=arena,
    )


# A row with the columns of its own samples, so that it can be read anywhere.
Item = tuple[Row, Samples]


def item_of(row: Row, samples: Samples) -> Item:
    """What has to be known to read `row`."""
    return row, samples.take(np.array(row.members, np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRow:
    """`read_row` with everything but the row; goes to other processes as it is."""

    reader: SampleReader
    shape: StatesShape
    pad_to: int

    def __call__(self, item: Item, room: Room) -> PlaneRow:
        """The row of `item`, in memory that `room` gives."""
        row, samples = item
        found = read_row(self.reader, samples, renamed(row), self.shape, self.pad_to, room=room)
        return named(found, item)


def named(found: PlaneRow, item: Item) -> PlaneRow:
    """What was found of `item`, with the row and the samples that it is of."""
    row, samples = item
    lengths = tuple(row_lengths(samples, renamed(row)))
    return replace(found, row=row, sample_ids=tuple(samples.id.tolist()), lengths=lengths)


def renamed(row: Row) -> Row:
    """The row as its own samples know it: they are all that there is."""
    return replace(row, members=tuple(range(len(row.members))))


def row_lengths(samples: Samples, row: Row) -> list[int]:
    """Places that each sample of a row takes."""
    return [int(samples.tokens[member]) - 1 for member in row.members]


def fill_fields(
    fields: Fields, samples: Samples, row: Row, token_ids: Sequence[NDArray[Any]]
) -> None:
    """Write every one of FIELDS, empty places included."""
    for name in FIELDS:
        fields[name].fill(-1 if name == "document_ids" else 0)
    start = 0
    for document, (member, ids) in enumerate(zip(row.members, token_ids, strict=True)):
        part = slice(start, start + len(ids) - 1)
        fields["input_ids"][part] = ids[1:]
        # Everything before the first generated token belongs to the prompt, whatever it says.
        # Without a prompt the first token is given all the same.
        first = start + max(0, int(samples.prompt_tokens[member]) - 1)
        fields["loss_mask"][first : part.stop] = True
        fields["position_ids"][part] = np.arange(1, len(ids))
        fields["document_ids"][part] = document
        start = part.stop


def _fill_places(token: NDArray[Any], lengths: Sequence[int], starts: dict[int, int]) -> None:
    """Write which stored token each place begins with; empty places name the first."""
    place = 0
    for index, length in enumerate(lengths):
        token[place : place + length] = np.arange(starts[index], starts[index] + length)
        place += length
    token[place:] = 0


# -- samples ---------------------------------------------------------------------------------------


def read_states(
    reader: SampleReader, samples: Samples, member: int, shape: StatesShape, out: StatesTLH
) -> NDArray[Any]:
    """Decode one sample, cut as planned, into `out` [T, L, H]; returns its token ids [T]."""
    token_ids, found = _read_blocks(reader, samples, member, shape)
    with naming(samples, member):
        codec.decode_states(
            found.codec,
            found.payloads,
            out,
            num_tokens=sum(found.lengths),
            block_tokens=found.lengths[0],
        )
    return token_ids


def _read_blocks(
    reader: SampleReader, samples: Samples, member: int, shape: StatesShape
) -> tuple[NDArray[Any], StatesBlocks]:
    """Token ids [T] and stored states of one sample, cut as planned."""
    tokens = int(samples.tokens[member])
    with naming(samples, member):
        completion = reader.completion(samples.completion_location(member), text=False)
        found = reader.blocks(samples.states_location(member), tokens=tokens)
    token_ids = completion.token_ids[:tokens]
    wanted = (tokens, shape.layers, shape.hidden_size)
    if found.shape != wanted or len(token_ids) != tokens:
        raise DamagedError(
            f"sample {samples.id[member]} has {len(token_ids)} tokens and hidden states of shape "
            f"{list(found.shape)}; the plan and the target model ask for {list(wanted)}"
        )
    return token_ids, found


@contextmanager
def naming(samples: Samples, member: int) -> Iterator[None]:
    """Damage that is found in here, and a disk that fails, is said to be at this sample."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(
            f"sample {samples.id[member]} cannot be read ({error}); "
            "`draftmill verify --repair` takes it out"
        ) from error
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise DraftmillError(
            f"sample {samples.id[member]} cannot be read ({where}{error.strerror}). Once the disk "
            "answers again, the same command goes on from the last checkpoint."
        ) from error
