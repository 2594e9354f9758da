"""bf16 words to byte planes and back, in numpy, cache-blocked, into buffers of the caller.

Owns the bit arithmetic of `em-zfast` and `bitround-k`. Entropy coding, block layout and checks of
what was read are `codec`'s. Legend: T tokens of a block, L layers, H hidden size.

A bf16 word is sign (bit 15), exponent (bits 14-7), mantissa (bits 6-0). The exponent plane has one
byte of exponent a word, less a bias of its channel, which compresses; the rest plane has sign
(bit 7) and mantissa (bits 6-0), which hardly do. Rounding leaves zero bits in the rest plane and
needs no other layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftmill.manifests.codec.block import Plane, PlaneSpec, Words
from draftmill.manifests.codec.scratch import scratch

MANTISSA_BITS = 7
# Elements worked on at once: few enough for the caches, so many that the calls into numpy, each of
# which gives the interpreter lock away and back, cost little also where threads take turns.
TILE_ELEMENTS = 196_608
# Tokens that a bias is taken from: more cost time and gain less than a thousandth in size. Below
# the second number of tokens the biases would take more bytes than they save.
BIAS_TOKENS = 64
MIN_BIAS_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanesCodec:
    """`em-zfast` (keep = 7) and `bitround-k` (keep = k): exponents, sign and mantissa, biases."""

    name: str
    keep: int = MANTISSA_BITS

    @property
    def lossless(self) -> bool:
        """All mantissa bits are kept."""
        return self.keep == MANTISSA_BITS

    def planes(self, num_tokens: int, hidden_size: int) -> tuple[PlaneSpec, ...]:
        """In seven bits of mantissa and a sign nothing is left to code; in fewer there is.

        Biases are few: a frame of their own would cost more time than it saves room.
        """
        shape = (num_tokens, hidden_size)
        return (
            PlaneSpec("exponent", shape, True),
            PlaneSpec("rest", shape, not self.lossless),
            PlaneSpec("bias", (hidden_size,), False),
        )

    def split(self, words_TLH: Words, planes: Sequence[Plane]) -> None:
        """See `split`."""
        exponent, rest, bias = planes
        channel_bias(words_TLH, bias)
        split(words_TLH, exponent, rest, keep=self.keep, bias_LH=bias)

    def merge(self, planes: Sequence[Plane], out_TLH: Words) -> None:
        """See `merge`."""
        exponent, rest, bias = planes
        merge(exponent, rest, out_TLH, bias_LH=bias)


def channel_bias(words_TLH: Words, bias_LH: Plane) -> None:
    """Write the mean exponent of each channel, over tokens spread through the block.

    Channels differ more than tokens do: what is left of an exponent has less entropy.
    """
    num_tokens = len(words_TLH)
    if num_tokens < MIN_BIAS_TOKENS:
        bias_LH.fill(0)
        return
    chosen = words_TLH[:: max(1, num_tokens // BIAS_TOKENS)]
    exponents = scratch("planes.bias", chosen.shape, np.uint16)
    np.right_shift(chosen, 7, out=exponents)
    np.bitwise_and(exponents, 0xFF, out=exponents)
    # fewer than 2 * BIAS_TOKENS of them: the sum stays below 2 ** 16
    total = exponents.sum(axis=0, dtype=np.uint16)
    bias_LH[:] = (total + len(exponents) // 2) // len(exponents)


class _Tile(NamedTuple):
    """Some tokens of a block in all their layers, and scratch of that shape [t, L, H]."""

    tokens: slice
    first: Words
    second: Words
    bytes: Plane


def _tiles(words_TLH: Words) -> Iterator[_Tile]:
    """All layers together: rows of one layer alone lie apart in memory, which is slow to read."""
    num_tokens, num_layers, hidden_size = words_TLH.shape
    step = max(1, TILE_ELEMENTS // max(1, num_layers * hidden_size))
    shape = (min(step, num_tokens), num_layers, hidden_size)
    first = scratch("planes.first", shape, np.uint16)
    second = scratch("planes.second", shape, np.uint16)
    small = scratch("planes.bytes", shape)
    for start in range(0, num_tokens, step):
        count = min(step, num_tokens - start)
        yield _Tile(slice(start, start + count), first[:count], second[:count], small[:count])


def split(
    words_TLH: Words,
    exponent_LTH: Plane,
    rest_LTH: Plane,
    *,
    keep: int = MANTISSA_BITS,
    bias_LH: Plane | None = None,
) -> None:
    """Write the exponent planes, less `bias_LH` (modulo 256), and the sign+mantissa planes.

    With `keep` below 7 the words are rounded to that many mantissa bits first (see `round_words`).
    """
    for tile in _tiles(words_TLH):
        words, a, b = words_TLH[tile.tokens], tile.first, tile.second
        exponent, rest = exponent_LTH[:, tile.tokens], rest_LTH[:, tile.tokens]
        if keep < MANTISSA_BITS:
            round_words(words, keep, out=a, work=b)
            words = a
        # uint16 to uint8 keeps the low byte: the sign bit above the exponent falls away
        np.right_shift(words, 7, out=exponent.transpose(1, 0, 2), casting="unsafe")
        if bias_LH is not None:
            np.subtract(exponent, bias_LH[:, None], out=exponent)
        np.bitwise_and(words, 0x807F, out=a)
        np.right_shift(a, 8, out=b)
        np.bitwise_or(a, b, out=rest.transpose(1, 0, 2), casting="unsafe")


def merge(
    exponent_LTH: Plane, rest_LTH: Plane, out_TLH: Words, *, bias_LH: Plane | None = None
) -> None:
    """Write the words of a block from its planes; the inverse of `split`."""
    for tile in _tiles(out_TLH):
        a, b = tile.first, tile.second
        exponent = exponent_LTH[:, tile.tokens].transpose(1, 0, 2)
        rest = rest_LTH[:, tile.tokens].transpose(1, 0, 2)
        if bias_LH is not None:
            exponent = np.add(exponent, bias_LH, out=tile.bytes)
        np.copyto(b, exponent)
        np.left_shift(b, 7, out=b)
        # sign extension puts the sign where it belongs, and where the exponent comes, too
        np.copyto(a.view(np.int16), rest.view(np.int8))
        np.bitwise_and(a, 0x807F, out=a)
        np.bitwise_or(a, b, out=out_TLH[tile.tokens])


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
