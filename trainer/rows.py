"""One packed row of samples, from shards to the tensors that a draft model takes.

Two ways to the same bits: `load_row` decodes wholly on the CPU; `read_row` stops at byte planes in
one piece of memory, which `merge_row` copies to a device and merges there. Which samples make a row
is `data`'s, reading ahead is `loader`'s, bytes and their checks are the shard reader's.

Shapes: T places of a packed row, L layers (auxiliary, then the last), H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from draftmill.manifests.errors import DamagedError
from draftmill.manifests.reader import StatesBlocks
from draftmill.manifests.types import Completion, Location, StatesTLH
from draftmill.trainer import planes
from draftmill.trainer.data import Row, Samples
from draftmill.trainer.planes import ALIGN, BlockPlanes


class SampleReader(Protocol):
    """What is needed of a shard reader; `ShardReader` is the real one."""

    def completion(self, location: Location, *, text: bool = True) -> Completion:
        """Token ids (and text) of one sample."""

    def states(
        self,
        location: Location,
        *,
        tokens: int | None = None,
        out: StatesTLH | None = None,
        threads: int = 1,
    ) -> StatesTLH:
        """Hidden states of one sample, bf16 bit patterns [T, L, H]."""

    def blocks(self, location: Location, *, tokens: int | None = None) -> StatesBlocks:
        """The same, not decoded yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One packed row as speculators' models take it, aligned as its `shift_batch` does.

    `tensors`, each [1, T, ...]: place i of a sample joins token i + 1 (`input_ids`, `loss_mask`,
    `position_ids`, and `verifier_last_hidden_states` [1, T, H] bf16, from which the target's
    choice for token i + 2 follows) with the auxiliary states of token i (`hidden_states`
    [1, T, (L-1)·H] bf16). `document_ids` numbers the samples of the row, -1 for padding.
    `loss_mask` is 0 for every prompt token and 1 from the first generated one.
    """

    row: Row
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    tensors: dict[str, Tensor]

    @property
    def supervised(self) -> int:
        """Places that the loss looks at."""
        return int(self.tensors["loss_mask"].sum())

    def of(self, row: Row) -> Batch:
        """The same under another name."""
        return replace(self, row=row)

    def pinned(self) -> Batch:
        """In memory that a GPU copies from by itself."""
        return replace(self, tensors={n: t.pin_memory() for n, t in self.tensors.items()})

    def to(self, device: torch.device | str) -> Batch:
        """On another device; from pinned memory without waiting."""
        moved = {n: t.to(device, non_blocking=True) for n, t in self.tensors.items()}
        return replace(self, tensors=moved)

    def checksum(self) -> str:
        """16 hex digits of everything in the batch; equal batches have equal ones."""
        hasher = xxhash.xxh3_64()
        for name in sorted(self.tensors):
            tensor = self.tensors[name].cpu().contiguous()
            hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(tensor.view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesShape:
    """Layers (auxiliary and last) and hidden size that every sample must have."""

    layers: int
    hidden_size: int


def load_row(
    reader: SampleReader, samples: Samples, row: Row, shape: StatesShape, pad_to: int = 0
) -> Batch:
    """Read the samples of one packed row; `pad_to` fixes T, 0 lets it follow from the samples.

    Raises DamagedError, naming the sample, when its bytes or sizes are not what they must be.
    """
    lengths = _lengths(samples, row)
    places = max(pad_to, sum(lengths))
    auxiliary = (shape.layers - 1) * shape.hidden_size
    states = np.zeros((places, auxiliary), np.uint16)
    last = np.zeros((places, shape.hidden_size), np.uint16)
    fields: Fields = {name: np.empty(places, dtype) for name, dtype in _FIELDS.items()}
    ids = []
    start = 0
    for member, length in zip(row.members, lengths, strict=True):
        token_ids, states_tlh = _read(reader, samples, member, shape)
        part = slice(start, start + length)
        states[part] = states_tlh[:-1, :-1].reshape(length, auxiliary)
        last[part] = states_tlh[1:, -1]
        ids.append(token_ids)
        start += length
    _fill(fields, samples, row, ids)
    tensors = {name: torch.from_numpy(array) for name, array in fields.items()}
    tensors["hidden_states"] = torch.from_numpy(states).view(torch.bfloat16)
    tensors["verifier_last_hidden_states"] = torch.from_numpy(last).view(torch.bfloat16)
    return Batch(
        row=row,
        sample_ids=tuple(int(samples.id[member]) for member in row.members),
        lengths=tuple(lengths),
        tensors={name: tensor.unsqueeze(0) for name, tensor in tensors.items()},
    )


Fields = dict[str, NDArray[Any]]
# What a row has besides hidden states, one number a place.
_FIELDS = {
    "input_ids": np.int64,
    "position_ids": np.int64,
    "document_ids": np.int64,
    "loss_mask": np.bool_,
}


def _lengths(samples: Samples, row: Row) -> list[int]:
    return [int(samples.tokens[member]) - 1 for member in row.members]


def _fill(fields: Fields, samples: Samples, row: Row, token_ids: list[np.ndarray]) -> None:
    """Write every field of a row, empty places included."""
    for name, array in fields.items():
        array.fill(-1 if name == "document_ids" else 0)
    start = 0
    for document, (member, ids) in enumerate(zip(row.members, token_ids, strict=True)):
        part = slice(start, start + len(ids) - 1)
        fields["input_ids"][part] = ids[1:]
        # Everything before the first generated token belongs to the prompt, whatever it says.
        first = start + int(samples.prompt_tokens[member]) - 1
        fields["loss_mask"][first : part.stop] = True
        fields["position_ids"][part] = np.arange(1, len(ids))
        fields["document_ids"][part] = document
        start = part.stop


class _PlacedBlock(NamedTuple):
    """A block of a sample: its planes, its first token, the sample's tokens and first place."""

    planes: BlockPlanes
    first: int
    tokens: int
    place: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneRow:
    """One packed row with its hidden states still in planes. `arena` is flat uint8 on the CPU and
    holds everything, so that one copy brings the row to a device."""

    row: Row
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    places: int
    shape: StatesShape
    fields: dict[str, int]
    blocks: tuple[_PlacedBlock, ...]
    arena: Tensor

    def of(self, row: Row) -> PlaneRow:
        """The same under another name."""
        return replace(self, row=row)

    def pinned(self) -> PlaneRow:
        """In memory that a GPU copies from by itself."""
        return self if self.arena.is_pinned() else replace(self, arena=self.arena.pin_memory())


def read_row(
    reader: SampleReader,
    samples: Samples,
    row: Row,
    shape: StatesShape,
    pad_to: int = 0,
    *,
    pin: bool = False,
) -> PlaneRow:
    """As `load_row`, up to the planes; `pin` takes memory that a GPU copies from by itself.

    Holds the stored bytes of the row beside the arena while it decodes.
    """
    lengths = _lengths(samples, row)
    places = max(pad_to, sum(lengths))
    offsets, end = {}, 0
    for name, dtype in _FIELDS.items():
        offsets[name] = end
        end += -(-places * np.dtype(dtype).itemsize // ALIGN) * ALIGN
    placed: list[_PlacedBlock] = []
    payloads, ids = [], []
    start = 0
    for member, length in zip(row.members, lengths, strict=True):
        token_ids, found = _read_blocks(reader, samples, member, shape)
        ids.append(token_ids)
        first = 0
        for tokens in found.lengths:
            block = (tokens, shape.layers, shape.hidden_size)
            where, end = planes.block_planes(found.codec, block, end)
            placed.append(_PlacedBlock(where, first, length + 1, start))
            first += tokens
        payloads += found.payloads
        start += length
    arena = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    memory = arena.numpy()
    for block_at, payload in zip(placed, payloads, strict=True):
        planes.decode_into(payload, block_at.planes, memory)
    fields: Fields = {
        name: memory[offset:][: places * np.dtype(_FIELDS[name]).itemsize].view(_FIELDS[name])
        for name, offset in offsets.items()
    }
    _fill(fields, samples, row, ids)
    return PlaneRow(
        row=row,
        sample_ids=tuple(int(samples.id[member]) for member in row.members),
        lengths=tuple(lengths),
        places=places,
        shape=shape,
        fields=offsets,
        blocks=tuple(placed),
        arena=arena,
    )


def merge_row(found: PlaneRow, device: torch.device | str) -> Batch:
    """The row on `device`, its hidden states merged there: the same bits as `load_row` gives.

    From pinned memory to a GPU, everything is queued on the current stream and nothing waits.
    """
    arena = found.arena.to(device, non_blocking=True)
    layers, hidden = found.shape.layers, found.shape.hidden_size
    states = arena.new_zeros((found.places, layers - 1, hidden), dtype=torch.bfloat16)
    last = arena.new_zeros((found.places, hidden), dtype=torch.bfloat16)
    for block in found.blocks:
        merged = planes.merge(block.planes, arena)
        first, end = block.first, min(block.first + block.planes.shape[0], block.tokens)
        # Place i joins the auxiliary states of token i with the last layer's of token i + 1.
        until = min(end, block.tokens - 1)
        part = merged[:-1, : until - first].transpose(0, 1)
        states[block.place + first : block.place + until] = part
        since = max(first, 1)
        place = block.place - 1
        last[place + since : place + end] = merged[-1, since - first : end - first]
    tensors = {
        name: arena[offset : offset + found.places * np.dtype(_FIELDS[name]).itemsize].view(
            torch.bool if name == "loss_mask" else torch.int64
        )
        for name, offset in found.fields.items()
    }
    tensors["hidden_states"] = states.flatten(1)
    tensors["verifier_last_hidden_states"] = last
    return Batch(
        row=found.row,
        sample_ids=found.sample_ids,
        lengths=found.lengths,
        tensors={name: tensor.unsqueeze(0) for name, tensor in tensors.items()},
    )


def _read(
    reader: SampleReader, samples: Samples, member: int, shape: StatesShape
) -> tuple[np.ndarray, StatesTLH]:
    """Token ids [T] and states [T, L, H] of one sample, cut as planned."""
    tokens = int(samples.tokens[member])
    with _naming(int(samples.id[member])):
        completion = reader.completion(samples.completion_location(member), text=False)
        states = reader.states(samples.states_location(member), tokens=tokens)
    return _checked(samples, member, shape, completion, states.shape), states


def _read_blocks(
    reader: SampleReader, samples: Samples, member: int, shape: StatesShape
) -> tuple[np.ndarray, StatesBlocks]:
    """Token ids [T] and stored states of one sample, cut as planned."""
    tokens = int(samples.tokens[member])
    with _naming(int(samples.id[member])):
        completion = reader.completion(samples.completion_location(member), text=False)
        blocks = reader.blocks(samples.states_location(member), tokens=tokens)
    return _checked(samples, member, shape, completion, blocks.shape), blocks


@contextmanager
def _naming(sample: int) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise DamagedError(
            f"sample {sample} cannot be read ({error}); `draftmill verify --repair` takes it out"
        ) from error


def _checked(
    samples: Samples,
    member: int,
    shape: StatesShape,
    completion: Completion,
    found: tuple[int, ...],
) -> np.ndarray:
    """The token ids, once sizes are what they must be."""
    tokens = int(samples.tokens[member])
    token_ids = completion.token_ids[:tokens]
    wanted = (tokens, shape.layers, shape.hidden_size)
    if found != wanted or len(token_ids) != tokens:
        raise DamagedError(
            f"sample {samples.id[member]} has {len(token_ids)} tokens and hidden states of shape "
            f"{list(found)}; the plan and the target model ask for {list(wanted)}"
        )
    return token_ids
