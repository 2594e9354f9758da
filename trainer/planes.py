"""Hidden states from their byte planes, in torch: the last step of decoding, on any device.

Gives the same bits as `codec.merge_planes` on the CPU: integer arithmetic, and for `rot4` sums of
small integers that float32 holds exactly. Entropy decoding is the codec's, rows are the loader's.

Legend: T tokens of a block, L layers, H hidden size, G = ceil(H / 64) groups of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftmill.manifests import codec, rotation
from draftmill.manifests.block_payload import Buffer
from draftmill.manifests.codec_names import RAW

# Planes start at multiples of this many bytes: enough for views as words, and for aligned copies.
ALIGN = 64
# Sign and mantissa bits of a bf16 word, as a signed 16-bit number (0x807F).
_REST_BITS = -32641


class BlockPlanes(NamedTuple):
    """Where the planes of one block lie in an arena of bytes."""

    codec: str
    shape: tuple[int, int, int]  # T, L, H
    offsets: tuple[int, ...]


def block_planes(name: str, shape: tuple[int, int, int], start: int) -> tuple[BlockPlanes, int]:
    """Places for the planes of a block from byte `start` on, and the byte after them."""
    sizes = [2 * shape[0] * shape[1] * shape[2]]
    if name != RAW:
        sizes = [spec.num_bytes for spec in codec.plane_specs(name, shape)]
    offsets = []
    for size in sizes:
        start = -(-start // ALIGN) * ALIGN
        offsets.append(start)
        start += size
    return BlockPlanes(name, shape, tuple(offsets)), start


def decode_into(payload: Buffer, block: BlockPlanes, arena: np.ndarray) -> None:
    """Decode a payload to planes in `arena`, flat uint8. Raises DamagedError."""
    if block.codec == RAW:
        size = 2 * block.shape[0] * block.shape[1] * block.shape[2]
        words = arena[block.offsets[0] :][:size].view(np.uint16).reshape(block.shape)
        codec.decode_block(RAW, payload, words)
        return
    specs = codec.plane_specs(block.codec, block.shape)
    out = [
        arena[offset : offset + spec.num_bytes].reshape(spec.shape)
        for offset, spec in zip(block.offsets, specs, strict=True)
    ]
    codec.decode_planes(block.codec, payload, out)


def merge(block: BlockPlanes, arena: Tensor) -> Tensor:
    """bf16 hidden states [L, T, H] of a block, on the device of `arena` (flat uint8)."""
    tokens, layers, hidden = block.shape
    if block.codec == RAW:
        size = 2 * tokens * layers * hidden
        words = arena[block.offsets[0] : block.offsets[0] + size].view(torch.bfloat16)
        return words.view(block.shape).transpose(0, 1)
    specs = codec.plane_specs(block.codec, block.shape)
    planes = [
        arena[offset : offset + spec.num_bytes].view(spec.shape)
        for offset, spec in zip(block.offsets, specs, strict=True)
    ]
    if block.codec == "rot4":
        return _merge_rot4(planes, hidden)
    return _merge_exponents(planes)


def _merge_exponents(planes: Sequence[Tensor]) -> Tensor:
    """`em-zfast` and `bitround-k`: planes exponent and rest [L, T, H], bias [L, H]."""
    exponent, rest, bias = planes
    # The exponent was stored less its channel's bias, modulo 256, as uint8 adds.
    words = (exponent + bias.unsqueeze(1)).to(torch.int16) << 7
    # Sign extension of a byte puts the sign where it belongs; the exponent's places are cut out.
    words |= rest.view(torch.int8).to(torch.int16) & _REST_BITS
    return words.view(torch.bfloat16)


def _merge_rot4(planes: Sequence[Tensor], hidden: int) -> Tensor:
    """`rot4`: planes symbols [L, 32, T, G], exponent and rest of the scales [L, T, G]."""
    symbols, exponent, rest = planes
    layers, _, tokens, groups = symbols.shape
    scales = (exponent.to(torch.int16) << 7) | (rest.view(torch.int8).to(torch.int16) & _REST_BITS)
    nibbles = torch.cat([symbols & 15, symbols >> 4], dim=1).to(torch.float32) - 8
    flat = nibbles.reshape(layers, rotation.GROUP, tokens * groups)
    # Entries of +-1 and sums of at most 64 * 8: exact in float32, and in TF32 too.
    members = _decoding_matrix(symbols.device) @ flat
    members = members * scales.view(torch.bfloat16).reshape(layers, 1, -1).to(torch.float32)
    channels = members.to(torch.bfloat16).reshape(layers, rotation.GROUP, tokens, groups)
    joined = channels.permute(0, 2, 1, 3).reshape(layers, tokens, rotation.GROUP * groups)
    return joined[:, :, :hidden]


@lru_cache(maxsize=16)
def _decoding_matrix(device: torch.device) -> Tensor:
    return torch.from_numpy(rotation.decoding_matrix()).to(device, torch.float32)
