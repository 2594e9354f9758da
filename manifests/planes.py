"""bf16 words to byte planes and back, in numpy, cache-blocked, into buffers of the caller.

Owns the bit arithmetic of `em-zfast` and `bitround-k`. Entropy coding, block layout and checks of
what was read are `codec`'s. Legend: T tokens of a block, H hidden size.

A bf16 word is sign (bit 15), exponent (bits 14-7), mantissa (bits 6-0). The exponent plane has one
byte of exponent a word, which compresses; the rest plane has sign (bit 7) and mantissa (bits 6-0),
which hardly do. Rounding leaves zero bits in the rest plane and needs no other layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftmill.manifests.layer_codec import Plane, PlaneSpec, Words

MANTISSA_BITS = 7
# Elements worked on at once: the tile, its two scratch copies and the planes stay in the L2 cache.
TILE_ELEMENTS = 65_536

Work = tuple[Words, Words]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanesCodec:
    """`em-zfast` (keep = 7) and `bitround-k` (keep = k): an exponent and a mantissa+sign plane."""

    name: str
    keep: int = MANTISSA_BITS

    @property
    def lossless(self) -> bool:
        """All mantissa bits are kept."""
        return self.keep == MANTISSA_BITS

    def planes(self, num_tokens: int, hidden_size: int) -> tuple[PlaneSpec, ...]:
        """Exponents, then mantissa and sign: in seven bits and a sign nothing is left to code."""
        shape = (num_tokens, hidden_size)
        return PlaneSpec("exponent", shape, True), PlaneSpec("rest", shape, not self.lossless)

    def scratch(self, hidden_size: int) -> Work:
        """Two tiles of words."""
        return scratch(hidden_size)

    def split(self, words_TH: Words, planes: Sequence[Plane], scratch: Work) -> None:
        """See `split`."""
        split(words_TH, planes[0], planes[1], scratch, keep=self.keep)

    def merge(self, planes: Sequence[Plane], out_TH: Words, scratch: Work) -> None:
        """See `merge`."""
        merge(planes[0], planes[1], out_TH, scratch)


def tile_rows(hidden_size: int) -> int:
    """How many tokens of one layer make a tile."""
    return max(1, TILE_ELEMENTS // max(1, hidden_size))


def scratch(hidden_size: int) -> Work:
    """Two tiles of 16-bit words, for `split` and `merge`."""
    shape = (tile_rows(hidden_size), hidden_size)
    return np.empty(shape, np.uint16), np.empty(shape, np.uint16)


def split(words_TH: Words, exponent_TH: Plane, rest_TH: Plane, work: Work, *, keep: int) -> None:
    """Write the exponent plane and the sign+mantissa plane of one layer.

    With `keep` below 7 the words are rounded to that many mantissa bits first (see `round_words`).
    """
    step = len(work[0])
    for start in range(0, len(words_TH), step):
        tile = words_TH[start : start + step]
        a, b = work[0][: len(tile)], work[1][: len(tile)]
        if keep < MANTISSA_BITS:
            round_words(tile, keep, out=a, work=b)
            tile = a
        np.right_shift(tile, 7, out=b)
        # uint16 to uint8 keeps the low byte: the sign bit above the exponent falls away
        np.copyto(exponent_TH[start : start + step], b, casting="unsafe")
        np.bitwise_and(tile, 0x807F, out=a)
        np.right_shift(a, 8, out=b)
        np.bitwise_or(a, b, out=a)
        np.copyto(rest_TH[start : start + step], a, casting="unsafe")


def merge(exponent_TH: Plane, rest_TH: Plane, out_TH: Words, work: Work) -> None:
    """Write the words of one layer from its two planes; the inverse of `split`."""
    step = len(work[0])
    for start in range(0, len(out_TH), step):
        out = out_TH[start : start + step]
        a, b = work[0][: len(out)], work[1][: len(out)]
        # sign extension puts the sign where it belongs, and where the exponent comes, too
        np.copyto(a.view(np.int16), rest_TH[start : start + step].view(np.int8))
        np.bitwise_and(a, 0x807F, out=a)
        np.copyto(b, exponent_TH[start : start + step])
        np.left_shift(b, 7, out=b)
        np.bitwise_or(a, b, out=out)


def round_words(words: Words, keep: int, *, out: Words, work: Words) -> None:
    """Round bf16 words to `keep` mantissa bits: to nearest, ties to even; `out` is not `words`.

    A finite word stays finite: where rounding would reach infinity the result is the largest
    magnitude with `keep` mantissa bits. Infinities and zeros stay. NaN becomes the quiet NaN of its
    sign without payload, 0x7FC0 or 0xFFC0, for every `keep`.
    """
    drop = MANTISSA_BITS - keep
    half = 1 << (drop - 1)
    np.right_shift(words, drop, out=out)
    np.bitwise_and(out, 1, out=out)
    np.add(out, half - 1, out=out)
    np.add(out, words, out=out)
    np.bitwise_and(out, 0xFFFF ^ (2 * half - 1), out=out)
    np.bitwise_and(words, 0x7FFF, out=work)
    if work.size and int(work.max()) >= 0x7F80 - half:
        _fix_extremes(words, work, out, drop)


def _fix_extremes(words: Words, magnitudes: Words, out: Words, drop: int) -> None:
    """Correct words that rounding carried out of the finite range, or that were not in it."""
    sign = words & 0x8000
    finite = magnitudes < 0x7F80
    over = finite & ((out & 0x7FFF) >= 0x7F80)
    np.copyto(out, sign | np.uint16(0x7F80 - (1 << drop)), where=over)
    np.copyto(out, words, where=magnitudes == 0x7F80)
    np.copyto(out, sign | np.uint16(0x7FC0), where=magnitudes > 0x7F80)
