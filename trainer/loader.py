"""Reads packed rows of samples from shards, ahead of need, in the order that was planned.

Owns threads and the memory of what waits. Which samples make a row is `data`'s, bytes and their
checks are the shard reader's, moving to a device is the training loop's.

Shapes: T places of a packed row, L layers (auxiliary, then the last), H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from draftmill.manifests.errors import DamagedError
from draftmill.manifests.types import Completion, Location, StatesTLH
from draftmill.trainer.data import Row, Samples


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

    def checksum(self) -> str:
        """16 hex digits of everything in the batch; equal batches have equal ones."""
        hasher = xxhash.xxh3_64()
        for name in sorted(self.tensors):
            tensor = self.tensors[name].contiguous()
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
    lengths = [int(samples.tokens[member]) - 1 for member in row.members]
    places = max(pad_to, sum(lengths))
    auxiliary = (shape.layers - 1) * shape.hidden_size
    states = np.zeros((places, auxiliary), np.uint16)
    last = np.zeros((places, shape.hidden_size), np.uint16)
    input_ids = np.zeros(places, np.int64)
    loss_mask = np.zeros(places, np.bool_)
    position_ids = np.zeros(places, np.int64)
    document_ids = np.full(places, -1, np.int64)
    start = 0
    for document, (member, length) in enumerate(zip(row.members, lengths, strict=True)):
        token_ids, states_tlh = _read(reader, samples, member, shape)
        part = slice(start, start + length)
        states[part] = states_tlh[:-1, :-1].reshape(length, auxiliary)
        last[part] = states_tlh[1:, -1]
        input_ids[part] = token_ids[1:]
        # Everything before the first generated token belongs to the prompt, whatever it says.
        loss_mask[start + int(samples.prompt_tokens[member]) - 1 : part.stop] = True
        position_ids[part] = np.arange(1, length + 1)
        document_ids[part] = document
        start += length
    tensors = {
        "hidden_states": torch.from_numpy(states).view(torch.bfloat16),
        "verifier_last_hidden_states": torch.from_numpy(last).view(torch.bfloat16),
        "input_ids": torch.from_numpy(input_ids),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.from_numpy(position_ids),
        "document_ids": torch.from_numpy(document_ids),
    }
    return Batch(
        row=row,
        sample_ids=tuple(int(samples.id[member]) for member in row.members),
        lengths=tuple(lengths),
        tensors={name: tensor.unsqueeze(0) for name, tensor in tensors.items()},
    )


def _read(
    reader: SampleReader, samples: Samples, member: int, shape: StatesShape
) -> tuple[np.ndarray, StatesTLH]:
    """Token ids [T] and states [T, L, H] of one sample, cut as planned."""
    tokens = int(samples.tokens[member])
    try:
        completion = reader.completion(samples.completion_location(member), text=False)
        states = reader.states(samples.states_location(member), tokens=tokens)
    except DamagedError as error:
        raise DamagedError(
            f"sample {samples.id[member]} cannot be read ({error}); "
            "`draftmill verify --repair` takes it out"
        ) from error
    token_ids = completion.token_ids[:tokens]
    wanted = (tokens, shape.layers, shape.hidden_size)
    if states.shape != wanted or len(token_ids) != tokens:
        raise DamagedError(
            f"sample {samples.id[member]} has {len(token_ids)} tokens and hidden states of shape "
            f"{list(states.shape)}; the plan and the target model ask for {list(wanted)}"
        )
    return token_ids, states


class RowLoader:
    """Yields the batches of a sequence of rows, in order, read by threads ahead of need.

    What waits is bounded by `prefetch_bytes` (one batch at least); the rows and their order do
    not depend on `threads`. Closing the iterator stops the threads.
    """

    def __init__(
        self,
        reader: SampleReader,
        samples: Samples,
        shape: StatesShape,
        *,
        threads: int,
        prefetch_bytes: int,
        pad_to: int = 0,
    ) -> None:
        self._reader = reader
        self._samples = samples
        self._shape = shape
        self._threads = threads
        self._prefetch_bytes = prefetch_bytes
        self._pad_to = pad_to

    def batches(self, rows: Iterable[Row]) -> Generator[Batch, None, None]:
        """Batches of `rows`, which may be endless."""
        if self._threads == 0:
            for row in rows:
                yield self._load(row)
            return
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="draftmill-decode")
        waiting: deque[tuple[int, Future[Batch]]] = deque()
        waiting_bytes = 0
        source = iter(rows)
        following = next(source, None)
        try:
            while waiting or following is not None:
                while following is not None:
                    size = self._bytes(following)
                    full = waiting_bytes + size > self._prefetch_bytes
                    if waiting and (full or len(waiting) >= 4 * self._threads):
                        break
                    waiting.append((size, pool.submit(self._load, following)))
                    waiting_bytes += size
                    following = next(source, None)
                size, future = waiting.popleft()
                batch = future.result()
                waiting_bytes -= size
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _load(self, row: Row) -> Batch:
        return load_row(self._reader, self._samples, row, self._shape, self._pad_to)

    def _bytes(self, row: Row) -> int:
        """Memory of a row while it is read: the batch, and one sample decoded beside it."""
        places = max(self._pad_to, sum(int(self._samples.tokens[m]) for m in row.members))
        longest = max(int(self._samples.tokens[member]) for member in row.members)
        return (places + longest) * self._shape.layers * self._shape.hidden_size * 2
