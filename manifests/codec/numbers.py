"""Small floating-point formats in numpy, which has neither: bf16 as uint16 bit patterns, and fp8
e4m3 (no infinities, largest 448) as uint8 codes. Who scales, and why, is left to the callers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

E4M3_MAX = 448.0


def to_floats(values: NDArray[Any]) -> Floats:
    """bf16 bit patterns (uint16) as float32; float arrays converted."""
    if values.dtype != np.uint16:
        return values.astype(np.float32)
    floats: Floats = (values.astype(np.uint32) << 16).view(np.float32)
    return floats


def to_words(floats: NDArray[Any]) -> NDArray[np.uint16]:
    """float32 as bf16 bit patterns, rounded to nearest, ties to even; finite values only."""
    bits = np.ascontiguousarray(floats, np.float32).view(np.uint32)
    words: NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return words


def _e4m3_values() -> Floats:
    """The value of every code from 0 to 126; 127 is NaN."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal).astype(np.float32)


_E4M3 = _e4m3_values()
_MIDDLES = (_E4M3[1:] + _E4M3[:-1]) / 2


def to_e4m3(floats: Floats) -> NDArray[np.uint8]:
    """Finite float32 as e4m3 codes: to nearest, ties to even, 448 for what is larger."""
    size = np.minimum(np.abs(floats), np.float32(E4M3_MAX))
    codes: NDArray[np.uint8] = np.searchsorted(_MIDDLES, size).astype(np.uint8)
    tie = _MIDDLES[np.minimum(codes, len(_MIDDLES) - 1)] == size
    codes += (tie & (codes & 1 == 1)).astype(np.uint8)
    codes |= np.signbit(floats).astype(np.uint8) << 7
    return codes


def from_e4m3(codes: NDArray[np.uint8]) -> Floats:
    """The values of e4m3 codes."""
    size = np.where(codes & 127 == 127, np.nan, _E4M3[np.minimum(codes & 127, 126)])
    found: Floats = np.where(codes & 128, -size, size).astype(np.float32)
    return found
