"""docs/codecs.md is enough to decode from: here is a decoder made of nothing but its sentences."""

from __future__ import annotations

import base64
import math
import struct

import numpy as np
import pytest
import zstandard

from draftmill.manifests.codec import codec
from tests.manifests.test_codec import make_states

Shape = tuple[int, int, int]

# Payloads as version 1 wrote them, with the xxh3 of what they decode to: these decode for ever.
WRITTEN: dict[str, tuple[Shape, int, str]] = {
    "em-zfast": (
        (33, 2, 3),
        0x62889A450546B2F0,
        "QAAAAE4AAABjAACAYwAAgAMAAIADAACAKLUv/SBjvQEAhAL8AwMDAgICAQEBAAAA/////v7+/f39/AT8AwMDAgIC"
        "AQIB//7+/v39BAA+C5AVwp1FkC/zCSi1L/0gYy0CAJQDAP/9//78/v0D/QQDBAMCAwMBAwIAAgH/AQD+AgQDAQMC"
        "AAIBAAEA/wD9/v38/f0D/QQCBAMBAwIAAwBWFQBQajfmGAANGwoYJhUjMSAtOyo4RjVDUUBNW0pYZlVjcWBue2p4"
        "BnUDEQAOGwoYJhUjMSAuPCs4RjVDUUBOXEtYZlVjcWBufGt5BnUDEQAOHAsZJhUjMSAuPCs5RzVDUUBOXEtZZ1Zj"
        "cUVTYVBda1podmVzAXB9C3oIFgUTIRAeKxooNiUzQTA+SzpIVkVTYVBebFpodmVzAXB+DHsIFgUTIRAeLBsoNiUz"
        "QTA+TDtJVkVTYVBebFtpdmVzAXB+DHsJFwUTIRAeLBspN3x8e3t7fA==",
    ),
    "bitround-2": (
        (33, 2, 3),
        0x54D2B93C25ECADF3,
        "RgAAAEYAAAA1AAAAKwAAAAMAAIADAACAKLUv/SBj7QEA5AL8AwMDAgICAQEBAAAA/////v7+/f39/AT8AwQDAgMC"
        "AQD/AP8AAP////7+/v3+BAA+C5DVUauKsCvTCSi1L/0gY+0BABQDAP/9//78/v0E/QUDBQQCBAMBAwIAAgH/AQD+"
        "AP/9//78/v0D/QQCBAMBAwIBAv7/AAMAWSHcWQT7MssotS/9IGNlAQBEAgAAIAAgICAgQCAgQCBAQEBAYEBAYEBg"
        "YGBgAGBgAGAAAAAAIAEA5JHUEyi1L/0gYxUBAMBAYGBAYGBgYABgACAAICAAICAgIEAgQGADADxKCjDSALx8fHt7"
        "e3w=",
    ),
    "rot4": (
        (2, 2, 5),
        0x90F1B09C4E314F4B,
        "IAAAACIAAAACAACAAgAAgAIAAIACAACAKLUv/SBAvQAAgN3/iMy77iKIzP93u6ruEYgBAJpoLgEotS/9"
        "IEDNAAB4/2b/ZiIREaoiqhER/2b/AwBmAgCWLDAEd3d3dyAFFVw=",
    ),
}


def read_planes(payload: memoryview, num_layers: int, sizes: list[int]) -> list[list[bytes]]:
    """[plane][layer] of a payload."""
    count = len(sizes) * num_layers
    entries = struct.unpack(f"<{count}I", payload[: 4 * count])
    at, streams = 4 * count, []
    for index, entry in enumerate(entries):
        stream = payload[at : at + (entry & 0x7FFF_FFFF)]
        at += len(stream)
        if not entry >> 31:
            stream = zstandard.ZstdDecompressor().decompress(stream)
        assert len(stream) == sizes[index // num_layers]
        streams.append(stream)
    assert at == len(payload)
    return [streams[i : i + num_layers] for i in range(0, count, num_layers)]


def by_planes(payload: bytes, shape: Shape) -> list[int]:
    """`em-zfast` and `bitround-k`: words in the order [t, L, H]."""
    t, num_layers, h = shape
    exponent, rest, bias = read_planes(payload, num_layers, [t * h, t * h, h])
    return [
        (rest[layer][i * h + c] & 128) << 8
        | (exponent[layer][i * h + c] + bias[layer][c] & 255) << 7
        | rest[layer][i * h + c] & 127
        for i in range(t)
        for layer in range(num_layers)
        for c in range(h)
    ]


def bf16(number: float) -> int:
    """The word of an exact product, rounded once; ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def by_rotation(payload: bytes, shape: Shape) -> list[int]:
    """`rot4`: words in the order [t, L, H]."""
    t, num_layers, h = shape
    groups = math.ceil(h / 64)
    sizes = [32 * t * groups, t * groups, t * groups]
    symbols, exponent, rest = read_planes(payload, num_layers, sizes)
    words = []
    for i in range(t):
        for layer in range(num_layers):
            for channel in range(h):
                j, g = divmod(channel, groups)
                packed = [symbols[layer][(m * t + i) * groups + g] for m in range(32)]
                n = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
                b = [j >> k & 1 for k in range(6)]
                sign = (-1) ** (b[0] * b[1] + b[2] * b[3] + b[4] * b[5])
                y = sum(sign * (-1) ** (j & m).bit_count() * (n[m] - 8) for m in range(64))
                place = i * groups + g
                word = exponent[layer][place] << 7 | rest[layer][place]
                (scale,) = struct.unpack("<f", struct.pack("<I", word << 16))
                words.append(bf16(y * scale))
    return words


DECODERS = {"em-zfast": by_planes, "bitround-2": by_planes, "rot4": by_rotation}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("shape", [(33, 2, 3), (5, 1, 70), (1, 3, 1), (40, 1, 65)])
def test_the_documented_decoder_agrees(name: str, shape: Shape) -> None:
    (payload,) = codec.encode_states(make_states(shape, 13, "normal"), name)
    out = np.zeros(shape, np.uint16)
    codec.decode_block(name, payload, out)
    assert DECODERS[name](payload, shape) == out.ravel().tolist()


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_written_decodes(name: str) -> None:
    shape, wanted, text = WRITTEN[name]
    payload = base64.b64decode(text)
    out = np.zeros(shape, np.uint16)
    codec.decode_block(name, payload, out)
    assert codec.checksum(out.tobytes()) == wanted
    assert DECODERS[name](payload, shape) == out.ravel().tolist()
