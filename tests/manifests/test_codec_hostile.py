"""Damaged and hostile payloads raise DamagedError and take no memory beyond the caller's buffer."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests.codec import codec
from draftmill.manifests.errors import DamagedError
from tests.manifests.test_codec import make_states

SHAPE = (40, 2, 96)
RAW = 0x8000_0000
KINDS = ("em-zfast", "bitround-4", "rot4", "raw")


def decode(name: str, payload: bytes) -> None:
    codec.decode_block(name, payload, np.zeros(SHAPE, np.uint16))


def encoded(name: str) -> bytes:
    (payload,) = codec.encode_states(make_states(SHAPE, 5, "normal"), name)
    return bytes(payload)


@pytest.mark.parametrize("name", KINDS)
def test_every_cut_and_every_tail_is_found(name: str) -> None:
    payload = encoded(name)
    for length in [*range(64), *range(64, len(payload), 97), len(payload) - 1]:
        with pytest.raises(DamagedError):
            decode(name, payload[:length])
    for tail in (b"\0", b"\0" * 1000, payload):
        with pytest.raises(DamagedError):
            decode(name, payload + tail)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_never_do_more_than_raise(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = encoded(name)
    entries = 4 * SHAPE[1] * 3
    for _ in range(60):
        changed = bytearray(payload)
        # half of them in the entries and the first frame header, where the most can go wrong
        reach = len(changed) if rng.integers(2) else entries + 20
        for _ in range(rng.integers(1, 5)):
            changed[rng.integers(reach)] = rng.integers(256)
        try:
            decode(name, bytes(changed))
        except DamagedError:
            pass


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "raw"])
def test_noise_is_refused(name: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        with pytest.raises(DamagedError):
            decode(name, rng.bytes(int(rng.integers(300))))


def frame_claiming(size: int) -> bytes:
    """A frame whose header claims `size` bytes, followed by one small compressed block."""
    # magic, descriptor: 8-byte content size, single segment; one raw block that is the last
    block = (1 | 4 << 3).to_bytes(3, "little") + b"abcd"
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, size) + block


def frame_with_run(size: int) -> bytes:
    """A tiny frame without a content size that unfolds to 128 KiB runs of one byte."""
    runs = b""
    for index in range(size):
        last = index == size - 1
        runs += (int(last) | 1 << 1 | 131_072 << 3).to_bytes(3, "little") + b"x"
    # window descriptor for 1 MiB, no content size
    return struct.pack("<IBB", 0xFD2FB528, 0x00, 10 << 3) + runs


def em_payload(first: bytes, *, raw: bool = False) -> bytes:
    """An em-zfast payload of SHAPE whose first exponent stream is `first`."""
    size = SHAPE[0] * SHAPE[2]
    biases, planes = bytes(2 * SHAPE[2]), bytes(3 * size)
    entries = [len(first) | (RAW if raw else 0)] + [size | RAW] * 3 + [SHAPE[2] | RAW] * 2
    return struct.pack("<6I", *entries) + first + planes + biases


@pytest.mark.parametrize(
    "stream",
    [
        frame_claiming(1 << 43),
        frame_claiming((1 << 64) - 1),
        frame_claiming(SHAPE[0] * SHAPE[2]),
        frame_with_run(1000),
        zstandard.ZstdCompressor().compress(bytes(50_000_000)),
        zstandard.ZstdCompressor().compress(bytes(SHAPE[0] * SHAPE[2])) + b"\0",
        zstandard.ZstdCompressor().compress(bytes(SHAPE[0] * SHAPE[2])) * 2,
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        b"",
    ],
    ids=["8TiB", "max", "short", "runs", "bomb", "tail", "two", "skippable", "empty"],
)
def test_hostile_frames(stream: bytes) -> None:
    payload = em_payload(stream)
    out = np.zeros(SHAPE, np.uint16)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            codec.decode_block("em-zfast", payload, out)
        with pytest.raises(DamagedError):
            codec.decompress(stream, 1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("entry", [0, RAW, 0x7FFF_FFFF, 0xFFFF_FFFF, 5])
def test_hostile_entries(entry: int) -> None:
    payload = encoded("em-zfast")
    for place in range(6):
        changed = payload[: 4 * place] + struct.pack("<I", entry) + payload[4 * place + 4 :]
        with pytest.raises(DamagedError):
            decode("em-zfast", changed)


def test_plane_in_place_has_its_size() -> None:
    """Two layers' streams of the wrong lengths, but the right sum, are no plane."""
    size = SHAPE[0] * SHAPE[2]
    sizes = [SHAPE[2], SHAPE[2], size, size, size - 1, size + 1]
    payload = struct.pack("<6I", *(RAW | length for length in sizes)) + bytes(sum(sizes))
    planes = [np.zeros(spec.shape, np.uint8) for spec in codec.plane_specs("em-zfast", SHAPE)]
    for copy in (True, False):
        with pytest.raises(DamagedError):
            codec.decode_planes("em-zfast", payload, planes, copy=copy)


def test_block_count_must_fit() -> None:
    payloads = codec.encode_states(make_states((600, 1, 4), 6, "normal"), "em-zfast")
    with pytest.raises(DamagedError, match="1 blocks"):
        codec.decode_states("em-zfast", payloads[:1], np.zeros((600, 1, 4), np.uint16))


@settings(max_examples=50)
@given(noise=st.binary(max_size=200), limit=st.integers(0, 500))
def test_blob_noise(noise: bytes, limit: int) -> None:
    try:
        assert len(codec.decompress(noise, limit)) <= limit
    except DamagedError:
        pass


def test_blob_limit() -> None:
    frame = codec.compress(b"x" * 1001)
    with pytest.raises(DamagedError, match="1001"):
        codec.decompress(frame, 1000)
    for length in range(len(frame)):
        with pytest.raises(DamagedError):
            codec.decompress(frame[:length], 1001)
    with pytest.raises(DamagedError):
        codec.decompress(frame + b"\0", 1001)
