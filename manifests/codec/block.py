"""What a block codec is: the planes it makes, and how words become planes and back.

The algorithms are in `planes` and `rotation`, their coding and checking in `codec`.
Legend: T tokens of a block, L layers, H hidden size; words are bf16 bit patterns, uint16 [T, L, H].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]
Plane = NDArray[np.uint8]


class OutOfRangeError(ValueError):
    """A lossy codec cannot take a value: the states are odd, not the call."""


class PlaneSpec(NamedTuple):
    """One byte plane. `coded`: the encoder tries to compress it."""

    name: str
    shape: tuple[int, ...]
    coded: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the plane."""
        size = 1
        for length in self.shape:
            size *= length
        return size


class BlockCodec(Protocol):
    """One algorithm with its settings; stateless, so threads share it."""

    @property
    def name(self) -> str:
        """The name that records carry."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives the words bit for bit."""

    def planes(self, num_tokens: int, hidden_size: int) -> tuple[PlaneSpec, ...]:
        """The planes of one layer, in stored order; those that are not coded come last."""

    def split(self, words_TLH: Words, planes: Sequence[Plane]) -> None:
        """Write the planes of a block, layers first in each; OutOfRangeError where a word has no
        place in this codec."""

    def merge(self, planes: Sequence[Plane], out_TLH: Words) -> None:
        """Write the words of a block; every plane of the right shape decodes."""
