"""Hidden states from their byte planes, in torch: the last step of decoding, on any device.

Gives the same bits as `codec.merge_planes` on the CPU: integer arithmetic, and for `rot4` sums of
small integers that float32 holds exactly. Entropy decoding is the codec's, rows are the loader's.

Legend: S tokens of all blocks, B blocks, L layers, H hidden size, G = ceil(H / 64) groups of
channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from draftmill.manifests.codec import rotation
from draftmill.manifests.codec.names import RAW
from draftmill.trainer.loading.groups import Group, StatesShape

# Sign and mantissa bits of a bf16 word, as a signed 16-bit number (0x807F).
_REST_BITS = -32641


def merge(group: Group, shape: StatesShape, arena: Tensor, block_S: Tensor) -> Tensor:
    """bf16 hidden states [L, S, H] of a group, on the device of `arena` (flat uint8).

    `block_S` [S] says which block each token is in. The number of steps is the same for any number
    of blocks: a GPU does a step sooner than it is asked for.
    """
    planes = []
    for offset, plane in zip(group.offsets, group.plane_shapes(shape), strict=True):
        if group.codec == RAW:
            words = arena[offset : offset + prod(plane)].view(plane).view(torch.bfloat16)
            return words.transpose(0, 1)
        planes.append(arena[offset : offset + prod(plane)].view(plane))
    if group.codec == "rot4":
        return _merge_rot4(planes, shape.hidden_size)
    return _merge_exponents(planes, block_S)


def _merge_exponents(planes: Sequence[Tensor], block_S: Tensor) -> Tensor:
    """`em-zfast` and `bitround-k`: planes exponent and rest [L, S, H], bias [B, L, H]."""
    exponent, rest, bias = planes
    # The exponent was stored less its channel's bias, modulo 256, as uint8 adds.
    words = (exponent + bias.index_select(0, block_S).transpose(0, 1)).to(torch.int16)
    words <<= 7
    # Sign extension of a byte puts the sign where it belongs; the exponent's places are cut out.
    signs = rest.view(torch.int8).to(torch.int16)
    signs &= _REST_BITS
    words |= signs
    return words.view(torch.bfloat16)


def _merge_rot4(planes: Sequence[Tensor], hidden: int) -> Tensor:
    """`rot4`: planes symbols [L, 32, S, G], exponent and rest of the scales [L, S, G]."""
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
