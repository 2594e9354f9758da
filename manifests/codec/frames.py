"""zstd frames and checksums: the one door to zstandard and xxhash.

Owns how bytes are coded, and every check of a frame that was read, before memory is taken for what
it claims. What is in a frame is left to `codec` and `record`.
"""

from __future__ import annotations

import threading

import numpy as np
import xxhash
import zstandard

from draftmill.manifests.codec.block import Plane
from draftmill.manifests.codec.payload import Buffer
from draftmill.manifests.errors import DamagedError

# Level 1, strategy fast, tables so small and matches so long that almost only Huffman coding is
# left: on exponent planes this is faster than level 1 and smaller than level 3.
_PLANE_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1,
    strategy=zstandard.STRATEGY_FAST,
    hash_log=6,
    chain_log=6,
    min_match=7,
    write_content_size=True,
    write_checksum=False,
)
# Kinds of blocks in a zstd frame, and the most content that a compressed one has (RFC 8878).
_REPEATED_BYTE, _COMPRESSED = 1, 2
_MOST_OF_A_BLOCK = 128 << 10
_local = threading.local()


def compress(data: Buffer, level: int = 3) -> bytes:
    """One plain zstd frame (token ids, text); it states the size of its content."""
    kept: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("blob_compressors", {})
    if level not in kept:
        kept[level] = zstandard.ZstdCompressor(level=level)
    frame: bytes = kept[level].compress(memoryview(data))
    return frame


def decompress(frame: Buffer, max_bytes: int) -> bytes:
    """The content of one zstd frame that states its size, of at most `max_bytes`.

    Raises DamagedError for anything else, before memory is taken for what the frame claims.
    """
    size = _frame_content_size(frame)
    if size > max_bytes:
        raise DamagedError(f"a zstd frame claims {size} bytes where at most {max_bytes} may be")
    out = np.empty(size, np.uint8)
    decompress_into(frame, out)
    return out.tobytes()


def decompress_into(frame: Buffer, out: Plane) -> None:
    """Decompress a frame of exactly `out.size` bytes into `out`, flat. Raises DamagedError."""
    size = _frame_content_size(frame)
    if size != out.size:
        raise DamagedError(f"a zstd frame claims {size} bytes where {out.size} must be")
    try:
        with _decompressor().stream_reader(memoryview(frame), closefd=False) as reader:
            # with the whole frame and its whole output at hand libzstd decodes in one pass,
            # straight into `out`, without a window of its own
            count = reader.readinto(memoryview(out)) if size else 0
    except zstandard.ZstdError as error:
        raise DamagedError(f"a zstd frame does not decode: {error}") from error
    if count != size:
        raise DamagedError(f"a zstd frame gave {count} bytes where {size} must be")


def code_plane(plane: Plane) -> bytes:
    """A zstd frame of a byte plane or, where that is no smaller, its bytes."""
    frame = _compressor().compress(memoryview(plane))
    return frame if len(frame) < plane.size else plane.tobytes()


def checksum(data: Buffer) -> int:
    """xxh3_64 of the bytes."""
    return xxhash.xxh3_64_intdigest(data)


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's compressor: building one costs more than a small plane, sharing one crashes."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PLANE_PARAMETERS)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor


def _frame_content_size(frame: Buffer) -> int:
    """The size a frame claims for its content, once it is exactly one frame without more bytes.

    The block headers are walked because the decoder stops at the end of the first frame and would
    leave trailing bytes unseen.
    """
    view = memoryview(frame).cast("B")
    try:
        parameters = zstandard.get_frame_parameters(view)
        position = zstandard.frame_header_size(view)
    except zstandard.ZstdError as error:
        raise DamagedError(f"not a zstd frame: {error}") from error
    size: int = parameters.content_size
    if size == zstandard.CONTENTSIZE_UNKNOWN or parameters.dict_id:
        raise DamagedError("a zstd frame without its content size, or with a dictionary")
    last, most = False, 0
    while not last:
        header = int.from_bytes(view[position : position + 3], "little")
        last, kind, length = bool(header & 1), (header >> 1) & 3, header >> 3
        position += 3 + (1 if kind == _REPEATED_BYTE else length)
        most += _MOST_OF_A_BLOCK if kind == _COMPRESSED else length
        if position > len(view):
            raise DamagedError("a zstd frame is cut short")
    if size > most:
        raise DamagedError(f"a zstd frame claims {size} bytes, its blocks give at most {most}")
    position += 4 if parameters.has_checksum else 0
    if position != len(view):
        raise DamagedError(f"{len(view)} bytes stored where a zstd frame has {position}")
    return size
