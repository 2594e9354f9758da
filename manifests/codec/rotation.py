"""The arithmetic of `rot4`: rotate groups of 64 channels, keep 4-bit symbols and one scale a group.

Owns the transform and the quantisation, in numpy, tile by tile. Entropy coding and payloads are
`codec`'s. docs/codecs.md has the same arithmetic as normative text.

Legend: T tokens of a block, H hidden size, G = ceil(H / 64) groups; channel c is member j = c // G
of group g = c % G, so that a tile [64, T, G] is filled and emptied in runs of G channels.

Sums are exact integers up to the one multiplication by the scale, so the order of summation, and
with it the library or the device, cannot change a decoded bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.codec import planes as byte_planes
from draftmill.manifests.codec.block import OutOfRangeError, Plane, PlaneSpec, Words
from draftmill.manifests.codec.scratch import scratch

GROUP = 64
# Elements worked on at once; see `planes`. More calls a tile than there, so larger tiles.
TILE_ELEMENTS = 196_608
# Magnitudes with these exponent fields would leave float32's range on the way: 2 ** 120 and up are
# refused; a group whose largest magnitude is below 2 ** -100 is stored as zeros.
MAX_EXPONENT = 127 + 120
MIN_EXPONENT = 127 - 100
# Words become integers of at most 9 bits, so that the sum of 64 fits in 16 bits.
FIXED_POINT_BITS = 8
# The largest rotated value of a group is that many steps, and becomes 7: a step a little smaller
# than a seventh is better for all the others, and the scale is fitted afterwards.
SYMBOL_RANGE = 7.375


def group_count(hidden_size: int) -> int:
    """Groups of 64 channels; the last members are padded with zeros where H is no multiple."""
    return -(-hidden_size // GROUP)


def member_signs() -> NDArray[np.int8]:
    """The sign of member j: -1 where b0 b1 + b2 b3 + b4 b5 is odd, b being the bits of j.

    This function is bent: a group of equal values, like one with a single outlier, becomes 64
    values of equal magnitude, the best that any choice of signs can do for both.
    """
    j = np.arange(GROUP)
    odd = ((j & j >> 1) + (j >> 2 & j >> 3) + (j >> 4 & j >> 5)) & 1
    signs: NDArray[np.int8] = (1 - 2 * odd).astype(np.int8)
    return signs


def decoding_matrix() -> NDArray[np.int8]:
    """[64, 64] of +-1: member values = matrix @ symbols. Row j is the sign of j times Hadamard."""
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < GROUP:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signed: NDArray[np.int8] = member_signs()[:, None] * matrix
    return signed


class _Tile(NamedTuple):
    """Scratch memory for one tile of up to `rows` tokens."""

    rows: int
    words: Words
    first: NDArray[np.int16]
    second: NDArray[np.int16]
    wide: NDArray[np.uint32]
    spare: NDArray[np.uint32]


def _tile(hidden_size: int) -> _Tile:
    groups = group_count(hidden_size)
    rows = max(1, TILE_ELEMENTS // (GROUP * max(1, groups)))
    shape = (GROUP * rows * groups,)
    return _Tile(
        rows,
        scratch("rotation.words", shape, np.uint16),
        scratch("rotation.first", shape, np.int16),
        scratch("rotation.second", shape, np.int16),
        scratch("rotation.wide", shape, np.uint32),
        scratch("rotation.spare", shape, np.uint32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationCodec:
    """`rot4`: packed 4-bit symbols, and the bf16 scales as an exponent and a mantissa plane."""

    name: str = "rot4"
    lossless: bool = False

    def planes(self, num_tokens: int, hidden_size: int) -> tuple[PlaneSpec, ...]:
        """Symbols [32, T, G], two in a byte; scales [T, G]."""
        scales = (num_tokens, group_count(hidden_size))
        return (
            PlaneSpec("symbols", (GROUP // 2, *scales), True),
            PlaneSpec("scale_exponent", scales, True),
            PlaneSpec("scale_rest", scales, True),
        )

    def split(self, words_TLH: Words, planes: Sequence[Plane]) -> None:
        """See `encode`."""
        symbols, exponent, rest = planes
        scales = scratch("rotation.scales", exponent.shape, np.uint16)
        for layer, of_layer in enumerate(symbols):
            encode(words_TLH[:, layer], of_layer, scales[layer])
        byte_planes.split(scales.transpose(1, 0, 2), exponent, rest)

    def merge(self, planes: Sequence[Plane], out_TLH: Words) -> None:
        """See `decode`."""
        symbols, exponent, rest = planes
        scales = scratch("rotation.scales", exponent.shape, np.uint16)
        byte_planes.merge(exponent, rest, scales.transpose(1, 0, 2))
        for layer, of_layer in enumerate(symbols):
            decode(of_layer, scales[layer], out_TLH[:, layer])


# Adding it rounds to an integer, ties to even, and leaves that in the low bits: faster than a cast.
_ROUNDER = np.float32(3 << 22)
_SIGNS = member_signs().astype(np.int16)[:, None]
_SIGN_MASK = np.where(_SIGNS < 0, 0x8000, 0).astype(np.uint16)


def encode(words_TH: Words, symbols_STG: Plane, scales_TG: Words) -> None:
    """Write one layer's packed symbols, uint8 [32, T, G], and its bf16 scales, uint16 [T, G].

    Raises ValueError where a word is not finite or its magnitude is 2 ** 120 or more.
    """
    num_tokens, hidden_size = words_TH.shape
    groups = group_count(hidden_size)
    tile = _tile(hidden_size)
    for start in range(0, num_tokens, tile.rows):
        rows = min(tile.rows, num_tokens - start)
        run = rows * groups
        words = tile.words[: GROUP * run].reshape(GROUP, run)
        _gather(words_TH[start : start + rows], words.reshape(GROUP, rows, groups))
        scales = scales_TG[start : start + rows].reshape(run)
        packed = _quantise(words, scales, tile)
        symbols_STG[:, start : start + rows] = packed.reshape(GROUP // 2, rows, groups)


def decode(symbols_STG: Plane, scales_TG: Words, out_TH: Words) -> None:
    """Write one layer's bf16 words from what `encode` gave."""
    num_tokens, hidden_size = out_TH.shape
    groups = group_count(hidden_size)
    tile = _tile(hidden_size)
    for start in range(0, num_tokens, tile.rows):
        rows = min(tile.rows, num_tokens - start)
        run = rows * groups
        packed = tile.words[: GROUP * run // 2].view(np.uint8)[: GROUP // 2 * run]
        np.copyto(packed.reshape(GROUP // 2, rows, groups), symbols_STG[:, start : start + rows])
        scales = scales_TG[start : start + rows].reshape(run)
        words = _restore(packed.reshape(GROUP // 2, run), scales, tile)
        _scatter(words.reshape(GROUP, rows, groups), out_TH[start : start + rows])


def _members(hidden_size: int) -> tuple[int, int]:
    """Members that every group has, and in how many groups one more is there."""
    return divmod(hidden_size, max(1, group_count(hidden_size)))


def _gather(words_TH: Words, tile_JTG: Words) -> None:
    groups = tile_JTG.shape[2]
    full, over = _members(words_TH.shape[1])
    source = words_TH[:, : full * groups].reshape(len(words_TH), full, groups)
    np.copyto(tile_JTG[:full], source.transpose(1, 0, 2))
    if full < GROUP:
        tile_JTG[full:] = 0
        tile_JTG[full, :, :over] = words_TH[:, full * groups :]


def _scatter(tile_JTG: Words, out_TH: Words) -> None:
    groups = tile_JTG.shape[2]
    full, over = _members(out_TH.shape[1])
    target = out_TH[:, : full * groups]
    # splitting an axis gives a view for any strides, so this writes into the caller's memory
    np.copyto(target.reshape(len(out_TH), full, groups), tile_JTG[:full].transpose(1, 0, 2))
    if over:
        out_TH[:, full * groups :] = tile_JTG[full, :, :over]


def _hadamard(first: NDArray[np.int16], second: NDArray[np.int16]) -> NDArray[np.int16]:
    """The Hadamard transform of [64, N] along its first axis; both buffers are overwritten."""
    span = GROUP // 2
    while span:
        source = first.reshape(GROUP // (2 * span), 2, span, -1)
        target = second.reshape(source.shape)
        np.add(source[:, 0], source[:, 1], out=target[:, 0])
        np.subtract(source[:, 0], source[:, 1], out=target[:, 1])
        first, second = second, first
        span //= 2
    return first


def _quantise(words: Words, scales: Words, tile: _Tile) -> Plane:
    """[64, N] words to packed symbols [32, N] and N scales. `words` is overwritten."""
    run = words.shape[1]
    size = GROUP * run
    wide = tile.wide[:size].reshape(GROUP, run)
    floats = wide.view(np.float32)
    first = tile.first[:size].reshape(GROUP, run)
    second = tile.second[:size].reshape(GROUP, run)

    magnitudes = second.view(np.uint16)
    np.bitwise_and(words, 0x7FFF, out=magnitudes)
    exponents = (magnitudes.max(axis=0) >> 7).astype(np.int64)
    if run and int(exponents.max()) >= MAX_EXPONENT:
        raise OutOfRangeError("rot4 takes finite values below 2 ** 120 only")
    zero = exponents < MIN_EXPONENT
    exponents[zero] = MIN_EXPONENT

    # fixed point: the largest magnitude of a group becomes at most 510
    to_fixed = ((254 + FIXED_POINT_BITS - exponents) << 23).astype(np.uint32).view(np.float32)
    to_fixed[zero] = 0
    np.bitwise_xor(words, _SIGN_MASK, out=words)
    np.copyto(wide, words)
    np.left_shift(wide, 16, out=wide)
    np.multiply(floats, to_fixed, out=floats)
    np.add(floats, _ROUNDER, out=floats)
    np.copyto(first, wide, casting="unsafe")
    rotated = _hadamard(first, second)

    other = second if rotated is first else first
    np.abs(rotated, out=other)
    largest = other.max(axis=0).astype(np.float32)
    largest[zero] = 1
    weights = tile.spare[:size].reshape(GROUP, run).view(np.float32)
    np.copyto(weights, rotated)
    np.multiply(weights, np.float32(1) / (largest / np.float32(SYMBOL_RANGE)), out=floats)
    np.rint(floats, out=floats)

    # the scale that fits these symbols best; both sums are integers below 2 ** 24, so exact
    np.multiply(weights, floats, out=weights)
    best = weights.sum(axis=0)
    np.multiply(floats, floats, out=weights)
    squares = weights.sum(axis=0)
    squares[zero] = 1
    from_fixed = ((exponents - FIXED_POINT_BITS - 6) << 23).astype(np.uint32).view(np.float32)
    bits = (best / squares * from_fixed).view(np.uint32)
    scales[...] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    np.add(floats, _ROUNDER + np.float32(8), out=floats)
    nibbles = words.view(np.uint8).reshape(-1)[:size].reshape(GROUP, run)
    np.copyto(nibbles, wide, casting="unsafe")
    low, high = nibbles[: GROUP // 2], nibbles[GROUP // 2 :]
    np.left_shift(high, 4, out=high)
    np.bitwise_or(low, high, out=low)
    return low


def _restore(packed: Plane, scales: Words, tile: _Tile) -> Words:
    """Packed symbols [32, N] and N scales to words [64, N]."""
    run = packed.shape[1]
    size = GROUP * run
    first = tile.first[:size].reshape(GROUP, run)
    second = tile.second[:size].reshape(GROUP, run)
    wide = tile.wide[:size].reshape(GROUP, run)
    floats = wide.view(np.float32)

    np.copyto(first[: GROUP // 2], packed)
    np.right_shift(first[: GROUP // 2], 4, out=first[GROUP // 2 :])
    np.bitwise_and(first[: GROUP // 2], 15, out=first[: GROUP // 2])
    np.subtract(first, 8, out=first)
    rotated = _hadamard(first, second)
    # signs while these are integers: a zero must not become a negative zero
    np.multiply(rotated, _SIGNS, out=rotated)
    np.copyto(floats, rotated)
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale may be anything
        np.multiply(floats, (scales.astype(np.uint32) << 16).view(np.float32), out=floats)
    # to bf16, nearest even
    odd = tile.spare[:size].reshape(GROUP, run)
    np.right_shift(wide, 16, out=odd)
    np.bitwise_and(odd, 1, out=odd)
    np.add(wide, odd, out=wide)
    np.add(wide, 0x7FFF, out=wide)
    np.right_shift(wide, 16, out=wide)
    words = tile.words[:size].reshape(GROUP, run)
    np.copyto(words, wide, casting="unsafe")
    return words
