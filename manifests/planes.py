"""bf16 words to byte planes and back, in numpy, cache-blocked, into buffers of the caller.

Owns the bit arithmetic of `em-zfast` and `bitround-k`. Entropy coding, block layout and checks of
what was read are `codec`'s. Legend: T tokens of a block, H hidden size.

A bf16 word is sign (bit 15), exponent (bits 14-7), mantissa (bits 6-0). The exponent plane has one
byte of exponent a word, less a bias of its channel, which compresses; the rest plane has sign
(bit 7) and mantissa (bits 6-0), which hardly do. Rounding leaves zero bits in the rest plane and
needs no other layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftmill.manifests.layer_codec import Plane, PlaneSpec, Words

MANTISSA_BITS = 7
# Elements worked on at once: small enough for the caches, large enough that the calls into numpy,
# each of which gives the interpreter lock away and back, cost little.
TILE_ELEMENTS = 131_072
# Tokens that a bias is taken from: more cost time and gain less than a thousandth in size. Below
# the second number of tokens the biases would take more bytes than they save.
BIAS_TOKENS = 64
MIN_BIAS_TOKENS = 32


class Tile(NamedTuple):
    """Scratch memory for one tile of tokens."""

    first: Words
    second: Words
    bytes: Plane


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanesCodec:
    """`em-zfast` (keep = 7) and `bitround-k` (keep = k): biases, exponents, sign and mantissa."""

    name: str
    keep: int = MANTISSA_BITS

    @property
    def lossless(self) -> bool:
        """All mantissa bits are kept."""
        return self.keep == MANTISSA_BITS

    def planes(self, num_tokens: int, hidden_size: int) -> tuple[PlaneSpec, ...]:
        """In seven bits of mantissa and a sign nothing is left to code; in fewer there is."""
        shape = (num_tokens, hidden_size)
        return (
            PlaneSpec("bias", (hidden_size,), True),
            PlaneSpec("exponent", shape, True),
            PlaneSpec("rest", shape, not self.lossless),
        )

    def scratch(self, hidden_size: int) -> Tile:
        """See `scratch`."""
        return scratch(hidden_size)

    def split(self, words_TH: Words, planes: Sequence[Plane], scratch: Tile) -> None:
        """See `split`."""
        bias, exponent, rest = planes
        channel_bias(words_TH, bias)
        split(words_TH, exponent, rest, scratch, keep=self.keep, bias_H=bias)

    def merge(self, planes: Sequence[Plane], out_TH: Words, scratch: Tile) -> None:
        """See `merge`."""
        bias, exponent, rest = planes
        merge(exponent, rest, out_TH, scratch, bias_H=bias)


def channel_bias(words_TH: Words, bias_H: Plane) -> None:
    """Write the mean exponent of each channel, over tokens spread through the block.

    Channels differ more than tokens do: what is left of an exponent has less entropy.
    """
    num_tokens = len(words_TH)
    if num_tokens < MIN_BIAS_TOKENS:
        bias_H.fill(0)
        return
    exponents = words_TH[:: max(1, num_tokens // BIAS_TOKENS)] >> 7
    np.bitwise_and(exponents, 0xFF, out=exponents)
    # fewer than 2 * BIAS_TOKENS of them: the sum stays below 2 ** 16
    total = exponents.sum(axis=0, dtype=np.uint16)
    bias_H[:] = (total + len(exponents) // 2) // len(exponents)


def tile_rows(hidden_size: int) -> int:
    """How many tokens of one layer make a tile."""
    return max(1, TILE_ELEMENTS // max(1, hidden_size))


def scratch(hidden_size: int) -> Tile:
    """Scratch for `split` and `merge` of that hidden size."""
    shape = (tile_rows(hidden_size), hidden_size)
    return Tile(np.empty(shape, np.uint16), np.empty(shape, np.uint16), np.empty(shape, np.uint8))


def split(
    words_TH: Words,
    exponent_TH: Plane,
    rest_TH: Plane,
    work: Tile,
    *,
    keep: int = MANTISSA_BITS,
    bias_H: Plane | None = None,
) -> None:
    """Write the exponent plane, less `bias_H` (modulo 256), and the sign+mantissa plane of a layer.

    With `keep` below 7 the words are rounded to that many mantissa bits first (see `round_words`).
    """
    step = len(work.first)
    for start in range(0, len(words_TH), step):
        tile = words_TH[start : start + step]
        exponent = exponent_TH[start : start + step]
        a, b = work.first[: len(tile)], work.second[: len(tile)]
        if keep < MANTISSA_BITS:
            round_words(tile, keep, out=a, work=b)
            tile = a
        np.right_shift(tile, 7, out=b)
        # uint16 to uint8 keeps the low byte: the sign bit above the exponent falls away
        np.copyto(exponent, b, casting="unsafe")
        if bias_H is not None:
            np.subtract(exponent, bias_H, out=exponent)
        np.bitwise_and(tile, 0x807F, out=a)
        np.right_shift(a, 8, out=b)
        np.bitwise_or(a, b, out=a)
        np.copyto(rest_TH[start : start + step], a, casting="unsafe")


def merge(
    exponent_TH: Plane,
    rest_TH: Plane,
    out_TH: Words,
    work: Tile,
    *,
    bias_H: Plane | None = None,
) -> None:
    """Write the words of one layer from its planes; the inverse of `split`."""
    step = len(work.first)
    for start in range(0, len(out_TH), step):
        out = out_TH[start : start + step]
        exponent = exponent_TH[start : start + step]
        a, b = work.first[: len(out)], work.second[: len(out)]
        if bias_H is not None:
            exponent = np.add(exponent, bias_H, out=work.bytes[: len(out)])
        np.copyto(b, exponent)
        np.left_shift(b, 7, out=b)
        # sign extension puts the sign where it belongs, and where the exponent comes, too
        np.copyto(a.view(np.int16), rest_TH[start : start + step].view(np.int8))
        np.bitwise_and(a, 0x807F, out=a)
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
