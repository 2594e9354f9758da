"""One packed row of samples as the tensors that a draft model takes.

Two ways to the same bits: `load_row` decodes wholly on the CPU; `merge_row` finishes, on any
device, what `reading` brought as far as byte planes. Which samples make a row is `data`'s, reading
ahead is `loader`'s.

Shapes: P places of a packed row, S stored tokens behind it, L layers (auxiliary, then the last), H
hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from draftmill.trainer.loading import planes, reading
from draftmill.trainer.loading.data import Row, Samples
from draftmill.trainer.loading.groups import StatesShape
from draftmill.trainer.loading.reading import FIELDS, PlaneRow, SampleReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One packed row as speculators' models take it, aligned as its `shift_batch` does.

    `tensors`, each [1, P, ...]: place i of a sample joins token i + 1 (`input_ids`, `loss_mask`,
    `position_ids`, and `verifier_last_hidden_states` [1, P, H] bf16, from which the target's
    choice for token i + 2 follows) with the auxiliary states of token i (`hidden_states`
    [1, P, (L-1)·H] bf16). `document_ids` numbers the samples of the row, -1 for padding.
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

    def checksum(self) -> str:
        """16 hex digits of everything in the batch; equal batches have equal ones."""
        hasher = xxhash.xxh3_64()
        for name in sorted(self.tensors):
            tensor = self.tensors[name].cpu().contiguous()
            hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(tensor.view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()


def load_row(
    reader: SampleReader, samples: Samples, row: Row, shape: StatesShape, pad_to: int = 0
) -> Batch:
    """Read the samples of one packed row; `pad_to` fixes P, 0 lets it follow from the samples.

    Raises DamagedError, naming the sample, when its bytes or sizes are not what they must be.
    """
    lengths = reading.row_lengths(samples, row)
    filled = sum(lengths)
    places = max(pad_to, filled)
    # One token more than places, each whole: place i takes the auxiliary layers of token i and the
    # last layer of token i + 1. So samples are decoded to where they stay.
    words = np.empty((places + 1, shape.layers, shape.hidden_size), np.uint16)
    ids = []
    start = 0
    for member, length in zip(row.members, lengths, strict=True):
        # A sample begins where the one before it ends. Of that token, the last layer is the end's.
        end_of_the_one_before = words[start, -1].copy()
        part = words[start : start + length + 1]
        ids.append(reading.read_states(reader, samples, member, shape, part))
        words[start, -1] = end_of_the_one_before
        start += length
    words[filled:, :-1] = 0
    words[filled + 1 :, -1] = 0
    fields: reading.Fields = {name: np.empty(places, dtype) for name, dtype in FIELDS.items()}
    reading.fill_fields(fields, samples, row, ids)
    tensors = {name: torch.from_numpy(array) for name, array in fields.items()}
    states = torch.from_numpy(words).view(torch.bfloat16)
    tensors["hidden_states"] = states[:-1, :-1].flatten(1)
    tensors["verifier_last_hidden_states"] = states[1:, -1]
    return Batch(
        row=row,
        sample_ids=tuple(int(samples.id[member]) for member in row.members),
        lengths=tuple(lengths),
        tensors={name: tensor.unsqueeze(0) for name, tensor in tensors.items()},
    )


def merge_row(found: PlaneRow, arena: Tensor) -> Batch:
    """The row on the device of `arena`, which holds the bytes of `found.arena`; the batch keeps it.

    The same bits as `load_row` gives. On a GPU everything is queued on the current stream, in a
    number of steps that does not depend on the number of samples, and nothing waits.
    """

    def array(name: str, dtype: torch.dtype, count: int = found.places) -> Tensor:
        return arena[found.arrays[name] :][: count * dtype.itemsize].view(dtype)

    counts = [group.tokens for group in found.groups]
    block = array("block", torch.int32, sum(counts))
    merged = [
        planes.merge(group, found.shape, arena, numbers)
        for group, numbers in zip(found.groups, block.split(counts), strict=True)
    ]
    states = merged[0] if len(merged) == 1 else torch.cat(merged, dim=1)  # [L, S, H]
    token = array("token", torch.int32)
    auxiliary = states[:-1].transpose(0, 1).index_select(0, token)
    last = states[-1].index_select(0, token + 1)
    for tensor in (auxiliary, last):
        tensor[found.filled :] = 0
    tensors = {
        name: array(name, torch.bool if dtype is np.bool_ else torch.int64)
        for name, dtype in FIELDS.items()
    }
    tensors["hidden_states"] = auxiliary.flatten(1)
    tensors["verifier_last_hidden_states"] = last
    return Batch(
        row=found.row,
        sample_ids=found.sample_ids,
        lengths=found.lengths,
        tensors={name: tensor.unsqueeze(0) for name, tensor in tensors.items()},
    )
