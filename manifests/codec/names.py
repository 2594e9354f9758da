"""Names of the codecs, how a sample is cut into blocks, and how large a block can become.

Owns the list of codecs and the arithmetic of sizes; making and reading payloads is `codec`'s, which
passes these names on.
"""

from __future__ import annotations

from draftmill.manifests.codec.block import BlockCodec, PlaneSpec
from draftmill.manifests.codec.planes import MANTISSA_BITS, PlanesCodec
from draftmill.manifests.codec.rotation import RotationCodec
from draftmill.manifests.errors import ConfigError

BLOCK_TOKENS = 512
RAW = "raw"
_WITH_PLANES: tuple[BlockCodec, ...] = (
    PlanesCodec(name="em-zfast"),
    *(PlanesCodec(name=f"bitround-{keep}", keep=keep) for keep in range(MANTISSA_BITS)),
    RotationCodec(),
)
_BLOCK_CODECS = {codec.name: codec for codec in _WITH_PLANES}
CODECS = (*_BLOCK_CODECS, RAW)


def parse_codec(name: str) -> str:
    """The name itself where it is a codec's; ConfigError names the known ones."""
    if name in CODECS:
        return name
    raise ConfigError(f"codec: {name!r} is not known; use one of {', '.join(CODECS)}")


def is_lossless(codec: str) -> bool:
    """Whether decoding gives the stored bit patterns bit for bit."""
    return parse_codec(codec) == RAW or _BLOCK_CODECS[codec].lossless


def block_lengths(num_tokens: int, block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """Tokens in each block of a sample of `num_tokens`."""
    full, last = divmod(num_tokens, block_tokens)
    return [block_tokens] * full + ([last] if last else [])


def plane_specs(codec: str, shape: tuple[int, int, int]) -> tuple[PlaneSpec, ...]:
    """The planes of a block of that shape (T, L, H) for `decode_planes`, layers first.

    `raw` has none: ValueError. Its payload is the words.
    """
    num_tokens, num_layers, hidden_size = shape
    kind = block_codec(codec)
    return tuple(
        spec._replace(shape=(num_layers, *spec.shape))
        for spec in kind.planes(num_tokens, hidden_size)
    )


def worst_case_bytes(
    num_tokens: int,
    num_layers: int,
    hidden_size: int,
    codec: str,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """The most bytes that `encode_states` can return for that shape, whatever the values are."""
    if parse_codec(codec) == RAW:
        return 2 * num_tokens * num_layers * hidden_size
    total = 0
    for length in block_lengths(num_tokens, block_tokens):
        for spec in block_codec(codec).planes(length, hidden_size):
            total += num_layers * (4 + spec.num_bytes)
    return total


def block_codec(codec: str) -> BlockCodec:
    """The algorithm of that name; `raw` has none: ValueError. Its payload is the words."""
    if parse_codec(codec) == RAW:
        raise ValueError("raw has no planes")
    return _BLOCK_CODECS[codec]
