"""Hidden states to block payloads and back.

Owns block payloads (docs/codecs.md is the normative text) and every check of what was read. Names
and sizes are `names`'s, zstd is `frames`'s, bit arithmetic is in `planes` and `rotation`,
what surrounds a payload (records, shards) is `record`'s and `shard`'s.

Legend: T tokens, L layers, H hidden size; states are bf16 bit patterns, uint16 [T, L, H].
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.codec.block import Plane, PlaneSpec, Words
from draftmill.manifests.codec.frames import (
    checksum,
    code_plane,
    compress,
    decompress,
    decompress_into,
)
from draftmill.manifests.codec.names import (
    BLOCK_TOKENS,
    CODECS,
    RAW,
    block_codec,
    block_lengths,
    is_lossless,
    parse_codec,
    plane_specs,
    worst_case_bytes,
)
from draftmill.manifests.codec.payload import Buffer, Streams, pack_table
from draftmill.manifests.codec.scratch import scratch
from draftmill.manifests.errors import DamagedError

__all__ = [
    "BLOCK_TOKENS",
    "CODECS",
    "block_lengths",
    "checksum",
    "code_plane",
    "compress",
    "decode_block",
    "decode_planes",
    "decode_states",
    "decompress",
    "decompress_into",
    "encode_states",
    "is_lossless",
    "merge_planes",
    "parse_codec",
    "plane_specs",
    "worst_case_bytes",
]


def encode_states(
    states_TLH: Words,
    codec: str,
    *,
    block_tokens: int = BLOCK_TOKENS,
    room: Plane | None = None,
) -> list[memoryview]:
    """Encode bf16 bit patterns, uint16 [T, L, H] of any strides: one payload per block.

    The payload of block i holds the tokens from i * block_tokens; no tokens give no payload. All
    payloads of one call lie in one piece of memory: `room` (flat, `worst_case_bytes` or more), or
    a new one. Fresh pages cost a good part of the work, so callers use theirs again.
    Raises ValueError where the array or `room` is not of that kind, its kind OutOfRangeError where
    a lossy codec cannot take a value (`rot4`: what is not finite, or 2 ** 120 and more).
    """
    parse_codec(codec)
    _check_states(states_TLH)
    if block_tokens < 1:
        raise ValueError(f"a block has one token or more, not {block_tokens}")
    starts = range(0, len(states_TLH), block_tokens)
    if codec == RAW:
        flat = memoryview(states_TLH.astype("<u2", order="C").reshape(-1).view(np.uint8))
        row = 2 * states_TLH.shape[1] * states_TLH.shape[2]
        return [flat[at * row : (at + block_tokens) * row].toreadonly() for at in starts]
    tokens, layers, hidden = states_TLH.shape
    size = worst_case_bytes(tokens, layers, hidden, codec, block_tokens=block_tokens)
    if room is None:
        room = np.empty(size, np.uint8)
    elif room.dtype != np.uint8 or room.ndim != 1 or room.size < size:
        raise ValueError(
            f"room must be flat uint8 of {size} bytes or more, not {room.dtype} {list(room.shape)}"
        )
    payloads: list[memoryview] = []
    for at in starts:
        # from the end downwards, so that what is not needed is never touched
        payload = _encode_block(states_TLH[at : at + block_tokens], codec, room)
        room = room[: room.size - payload.nbytes]
        payloads.append(payload)
    return payloads


def decode_block(codec: str, payload: Buffer, out_TLH: Words) -> None:
    """Decode one payload into `out_TLH`, uint16 [T, L, H] with T the tokens of that block.

    Raises DamagedError when the payload is not exactly an encoding of that shape. Memory beyond
    `out_TLH` is at most the planes of the block and a tile, whatever the payload claims.
    """
    parse_codec(codec)
    _check_states(out_TLH)
    if codec == RAW:
        _decode_raw(payload, out_TLH)
        return
    memory = _plane_memory(plane_specs(codec, out_TLH.shape))
    merge_planes(codec, decode_planes(codec, payload, memory, copy=False), out_TLH)


def decode_planes(
    codec: str, payload: Buffer, out: Sequence[Plane], *, copy: bool = True
) -> list[Plane]:
    """Decode one payload into its planes and stop there; `merge_planes`, or a GPU, does the rest.

    `out` has one uint8 array for each of `plane_specs(codec, (T, L, H))`, in its shape and
    contiguous in each layer.
    Returns the planes. Without `copy`, a plane that no layer has coded is not copied to `out` but
    returned as it lies in the payload; with it, `out` is returned. Raises DamagedError as
    `decode_block` does; `raw` has no planes and raises ValueError, as does other memory.
    """
    block_codec(codec)
    if not all(of_layer.flags.c_contiguous for plane in out for of_layer in plane):
        raise ValueError("the planes of a layer must be contiguous")
    num_layers = len(out[0])
    streams = Streams(payload, len(out), num_layers)
    planes = []
    for index, plane in enumerate(out):
        in_place = None if copy else streams.in_place(index, plane.nbytes)
        if in_place is not None:
            planes.append(np.frombuffer(in_place, np.uint8).reshape(plane.shape))
            continue
        for layer, target in enumerate(plane):
            found = _read_plane(streams, index, layer, target)
            if found is not target:
                np.copyto(target, found)
        planes.append(plane)
    return planes


def merge_planes(codec: str, planes: Sequence[Plane], out_TLH: Words) -> None:
    """Write the words of a block from the planes that `decode_planes` gave."""
    block_codec(codec).merge(planes, out_TLH)


def decode_states(
    codec: str,
    payloads: Sequence[Buffer],
    out_TLH: Words,
    threads: int = 1,
    *,
    num_tokens: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> None:
    """Decode the first len(out_TLH) tokens of a sample, on up to `threads` threads.

    `payloads` are those of the blocks that `out_TLH` reaches into, in order. `num_tokens` is the
    length of the stored sample, where `out_TLH` is a prefix of it; `block_tokens` is what its
    record says. Raises DamagedError.
    """
    wanted = len(out_TLH)
    stored = block_lengths(wanted if num_tokens is None else num_tokens, block_tokens)
    starts = range(0, wanted, block_tokens)
    if len(payloads) != len(starts) or len(starts) > len(stored):
        raise DamagedError(f"{len(payloads)} blocks given where {wanted} tokens need {len(starts)}")

    def decode(index: int) -> None:
        view = out_TLH[starts[index] : starts[index] + block_tokens]
        if len(view) == stored[index]:
            decode_block(codec, payloads[index], view)
            return
        whole = np.empty((stored[index], *out_TLH.shape[1:]), np.uint16)
        decode_block(codec, payloads[index], whole)
        np.copyto(view, whole[: len(view)])

    if threads <= 1 or len(payloads) <= 1:
        for index in range(len(payloads)):
            decode(index)
        return
    with ThreadPoolExecutor(min(threads, len(payloads))) as pool:
        for _ in pool.map(decode, range(len(payloads))):
            pass


# ---- block payloads ---------------------------------------------------------------------------


def _check_states(states_TLH: Words) -> None:
    if states_TLH.dtype != np.uint16 or states_TLH.ndim != 3:
        raise ValueError(
            "states must be uint16 [tokens, layers, hidden size], "
            f"not {states_TLH.dtype} {list(states_TLH.shape)}"
        )


def _plane_memory(specs: Sequence[PlaneSpec]) -> list[Plane]:
    """Planes in memory that this thread keeps, valid until its next call."""
    memory = scratch("codec.planes", (sum(spec.num_bytes for spec in specs),))
    return _cut(memory, specs)


def _cut(memory: Plane, specs: Sequence[PlaneSpec]) -> list[Plane]:
    planes = []
    for spec in specs:
        planes.append(memory[: spec.num_bytes].reshape(spec.shape))
        memory = memory[spec.num_bytes :]
    return planes


def _encode_block(block_TLH: Words, codec: str, room: Plane) -> memoryview:
    """The payload of one block, at the end of `room`: planes stored as they are are made there."""
    specs = plane_specs(codec, block_TLH.shape)
    coded = [spec for spec in specs if spec.coded]
    stored = specs[len(coded) :]
    assert specs[: len(coded)] == tuple(coded), "planes stored as they are come last"
    end = room.size - sum(spec.num_bytes for spec in stored)
    planes = _plane_memory(coded)
    block_codec(codec).split(block_TLH, [*planes, *_cut(room[end:], stored)])
    streams = [code_plane(of_layer) for plane in planes for of_layer in plane]
    table = pack_table(streams, [spec.num_bytes for spec in specs], block_TLH.shape[1])
    at = start = end - len(table) - sum(map(len, streams))
    whole = memoryview(room)
    for part in (table, *streams):
        whole[at : at + len(part)] = part
        at += len(part)
    return whole[start:].toreadonly()


def _decode_raw(payload: Buffer, out: NDArray[Any]) -> None:
    stored = memoryview(payload).cast("B")
    if len(stored) != out.nbytes:
        raise DamagedError(f"a raw block has {len(stored)} bytes where {out.nbytes} must be")
    np.copyto(out, np.frombuffer(stored, "<u2").reshape(out.shape))


def _read_plane(streams: Streams, plane: int, layer: int, buffer: Plane) -> Plane:
    """One plane of one layer: where it lies when stored raw, else decompressed to `buffer`."""
    stream, raw = streams.stream(plane, layer)
    if not raw:
        decompress_into(stream, buffer.reshape(-1))
        return buffer
    if len(stream) != buffer.size:
        raise DamagedError(f"a plane has {len(stream)} bytes where {buffer.size} must be")
    return np.frombuffer(stream, np.uint8).reshape(buffer.shape)
