"""What a block codec is, layer by layer: the planes it makes and how words become planes and back.

The algorithms are in `planes` and `rotation`, their coding and checking in `codec`.
Legend: T tokens of a block, L layers, H hidden size; words are bf16 bit patterns, uint16 [T, H].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]
Plane = NDArray[np.uint8]


class PlaneSpec(NamedTuple):
    """One byte plane of one layer of a block. `coded`: the encoder tries to compress it."""

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


class LayerCodec(Protocol):
    """One algorithm with its settings; stateless, so threads share it."""

    @property
    def name(self) -> str:
        """The name that records carry."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives the words bit for bit."""

    def planes(self, num_tokens: int, hidden_size: int) -> tuple[PlaneSpec, ...]:
        """The planes of one layer, in stored order."""

    def scratch(self, hidden_size: int) -> Any:
        """Memory for one tile, which a caller hands to `split` or `merge` again and again."""

    def split(self, words_TH: Words, planes: Sequence[Plane], scratch: Any) -> None:
        """Write the planes of one layer; ValueError where a word has no place in this codec."""

    def merge(self, planes: Sequence[Plane], out_TH: Words, scratch: Any) -> None:
        """Write the words of one layer from its planes; every plane of the right shape decodes."""
