"""The outer form of a block payload: a table of entries, then streams. docs/codecs.md specifies it.

Owns the checks of lengths; what a stream holds is `codec`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.errors import DamagedError

Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]

# The length of a stream is 31 bits of its entry; the top bit says that the bytes are not coded.
_RAW_FLAG = 0x8000_0000


def pack_table(coded: Sequence[bytes], plane_bytes: Sequence[int], num_layers: int) -> bytes:
    """The entries of planes of `plane_bytes` bytes, all layers together.

    `coded` are the streams of the first planes, by plane and layer; the other planes are stored as
    they are. A stream as long as its plane is the plane itself.
    """
    sizes = [size // max(1, num_layers) for size in plane_bytes for _ in range(num_layers)]
    lengths = [*map(len, coded), *sizes[len(coded) :]]
    entries = [
        length | (_RAW_FLAG if length == size else 0)
        for length, size in zip(lengths, sizes, strict=True)
    ]
    return np.array(entries, "<u4").tobytes()


class Streams:
    """The streams of one payload, with every length checked before anything is decoded."""

    def __init__(self, payload: Buffer, num_planes: int, num_layers: int) -> None:
        self._payload = memoryview(payload).cast("B")
        self._num_layers = num_layers
        table = 4 * num_planes * num_layers
        if len(self._payload) < table:
            raise DamagedError(f"a block of {len(self._payload)} bytes is shorter than its entries")
        entries = np.frombuffer(self._payload[:table], "<u4").tolist()
        self._raw = [entry >= _RAW_FLAG for entry in entries]
        self._bounds = [table]
        for entry in entries:
            self._bounds.append(self._bounds[-1] + entry % _RAW_FLAG)
        if self._bounds[-1] != len(self._payload):
            raise DamagedError(
                f"a block has {len(self._payload)} bytes where its entries need {self._bounds[-1]}"
            )

    def stream(self, plane: int, layer: int) -> tuple[memoryview, bool]:
        """The bytes of a stream, in place, and whether they are the plane itself."""
        index = plane * self._num_layers + layer
        start, end = self._bounds[index], self._bounds[index + 1]
        return self._payload[start:end], self._raw[index]

    def in_place(self, plane: int, num_bytes: int) -> memoryview | None:
        """The bytes of a plane of all layers, `num_bytes` of them, where no layer is coded."""
        first = plane * self._num_layers
        end = first + self._num_layers
        if not all(self._raw[first:end]):
            return None
        found = self._payload[self._bounds[first] : self._bounds[end]]
        lengths = {self._bounds[i + 1] - self._bounds[i] for i in range(first, end)}
        if lengths - {num_bytes // max(1, self._num_layers)}:
            raise DamagedError(f"a plane has {len(found)} bytes where {num_bytes} must be")
        return found
