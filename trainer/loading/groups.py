"""Stored blocks of hidden states side by side, as byte planes in one piece of memory.

Owns where the planes of a packed row lie. Decoding a block is the codec's, making words of planes
`planes`'s, what else a row holds `reading`'s.

Legend: S stored tokens, B blocks, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.codec import codec
from draftmill.manifests.codec.names import RAW
from draftmill.manifests.codec.payload import Buffer

# Planes start at multiples of this many bytes: enough for views as words, and for aligned copies.
ALIGN = 64

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesShape:
    """Layers (auxiliary and last) and hidden size that every sample must have."""

    layers: int
    hidden_size: int

    @property
    def token_bytes(self) -> int:
        """What one token takes, decoded or in planes."""
        return 2 * self.layers * self.hidden_size


class Group(NamedTuple):
    """Blocks of one codec: where their planes begin in an arena of bytes.

    Each plane is that of a single block of S tokens, except that biases, one for each block, are
    [B, L, H]. `raw` has one plane, its words as bytes [S, L, 2 H].
    """

    codec: str
    tokens: int
    blocks: int
    offsets: tuple[int, ...]

    def plane_shapes(self, shape: StatesShape) -> list[tuple[int, ...]]:
        """The shape of each plane, in bytes."""
        if self.codec == RAW:
            return [(self.tokens, shape.layers, 2 * shape.hidden_size)]
        return [
            (self.blocks, *spec.shape) if spec.name == "bias" else spec.shape
            for spec in codec.plane_specs(
                self.codec, (self.tokens, shape.layers, shape.hidden_size)
            )
        ]


def aligned(offset: int) -> int:
    """The next place where a plane may begin."""
    return -(-offset // ALIGN) * ALIGN


def placed_group(
    name: str, lengths: Sequence[int], shape: StatesShape, start: int
) -> tuple[Group, int]:
    """Blocks of `lengths` tokens from byte `start` on, and the byte after them."""
    group = Group(name, sum(lengths), len(lengths), ())
    offsets = []
    for plane in group.plane_shapes(shape):
        start = aligned(start)
        offsets.append(start)
        start += prod(plane)
    return group._replace(offsets=tuple(offsets)), start


class GroupPlanes:
    """Decodes the blocks of a group to its planes in `arena`, one after the other."""

    def __init__(self, group: Group, shape: StatesShape, arena: Bytes) -> None:
        self._codec, self._shape = group.codec, shape
        self._planes = [
            arena[offset : offset + prod(plane)].reshape(plane)
            for offset, plane in zip(group.offsets, group.plane_shapes(shape), strict=True)
        ]
        self._block = self._token = 0

    def decode(self, payload: Buffer, tokens: int) -> None:
        """The next block, of so many tokens. Raises DamagedError."""
        first, self._token = self._token, self._token + tokens
        block, self._block = self._block, self._block + 1
        if self._codec == RAW:
            words = self._planes[0][first : self._token].view(np.uint16)
            codec.decode_block(RAW, payload, words)
            return
        size = (tokens, self._shape.layers, self._shape.hidden_size)
        out: list[Bytes] = []
        aside: list[tuple[Bytes, Bytes]] = []
        for plane, spec in zip(self._planes, codec.plane_specs(self._codec, size), strict=True):
            part = plane[block] if spec.name == "bias" else plane[..., first : self._token, :]
            if not part[0].flags.c_contiguous:
                # Its tokens are not together in each layer: decoded elsewhere, and copied.
                aside.append((part, np.empty(spec.shape, np.uint8)))
                part = aside[-1][1]
            out.append(part)
        codec.decode_planes(self._codec, payload, out)
        for part, found in aside:
            np.copyto(part, found)
