"""Codecs keep their promises: bit for bit, within their bound, whatever the values and shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftmill.manifests.codec import codec
from draftmill.manifests.codec.planes import TILE_ELEMENTS
from draftmill.manifests.errors import ConfigError

LOSSLESS = [name for name in codec.CODECS if codec.is_lossless(name)]
WITH_PLANES = ("em-zfast", "bitround-0", "bitround-4", "rot4")
KINDS = (*WITH_PLANES, "raw")
# zeros, subnormals, ones, the largest finite, infinities, quiet and signalling NaN, both signs
SPECIAL = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x7FFF]
SPECIAL += [0x8000 | word for word in SPECIAL]

shapes = st.tuples(st.integers(0, 40), st.integers(0, 4), st.integers(0, 131))
seeds = st.integers(0, 2**32 - 1)


def make_states(shape: tuple[int, int, int], seed: int, kind: str) -> NDArray[np.uint16]:
    """bf16 bit patterns: any bits, special values only, or the normal distribution."""
    rng = np.random.default_rng(seed)
    if kind == "special":
        return rng.choice(np.array(SPECIAL, np.uint16), shape)
    if kind == "normal":
        floats = rng.standard_normal(shape).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=40)
@given(shape=shapes, seed=seeds, kind=st.sampled_from(["bits", "special", "normal"]))
def test_lossless_bit_for_bit(name: str, shape: tuple[int, int, int], seed: int, kind: str) -> None:
    states = make_states(shape, seed, kind)
    payloads = codec.encode_states(states, name)
    assert len(payloads) == len(codec.block_lengths(shape[0]))
    assert sum(map(len, payloads)) <= codec.worst_case_bytes(*shape, name)
    out = np.full(shape, 0xABCD, np.uint16)
    codec.decode_states(name, payloads, out)
    assert np.array_equal(out, states)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_block_edges_and_threads(name: str, extra: int) -> None:
    shape = (2 * codec.BLOCK_TOKENS + extra, 2, 5)
    states = make_states(shape, 1, "bits")
    payloads = codec.encode_states(states, name)
    for threads in (1, 2, 7):
        out = np.zeros(shape, np.uint16)
        codec.decode_states(name, payloads, out, threads=threads)
        assert np.array_equal(out, states)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_prefix_needs_only_its_blocks(name: str) -> None:
    states = make_states((3 * codec.BLOCK_TOKENS, 1, 3), 2, "normal")
    payloads = codec.encode_states(states, name)
    for tokens in (2 * codec.BLOCK_TOKENS, codec.BLOCK_TOKENS + 1, 1):
        out = np.zeros((tokens, 1, 3), np.uint16)
        needed = payloads[: len(codec.block_lengths(tokens))]
        codec.decode_states(name, needed, out, num_tokens=len(states))
        assert np.array_equal(out, states[:tokens])


@pytest.mark.parametrize("name", codec.CODECS)
def test_strides_do_not_matter(name: str) -> None:
    whole = make_states((70, 6, 200), 3, "normal")
    view = whole[::-2, 1::2, 10:190:2]
    assert codec.encode_states(view, name) == codec.encode_states(np.ascontiguousarray(view), name)
    whole.flags.writeable = False
    codec.encode_states(whole, name)
    out = np.zeros_like(whole)[::-2, 1::2, 10:190:2]
    straight = np.zeros(view.shape, np.uint16)
    payloads = codec.encode_states(view, name)
    codec.decode_states(name, payloads, out)
    codec.decode_states(name, payloads, straight)
    assert np.array_equal(out, straight)


@pytest.mark.parametrize("name", WITH_PLANES)
@settings(max_examples=20)
@given(shape=shapes, seed=seeds)
def test_planes_then_merge_is_decode(name: str, shape: tuple[int, int, int], seed: int) -> None:
    states = make_states(shape, seed, "normal")
    for payload in codec.encode_states(states, name):
        planes = [np.zeros(spec.shape, np.uint8) for spec in codec.plane_specs(name, shape)]
        codec.decode_planes(name, payload, planes)
        merged = np.zeros(shape, np.uint16)
        codec.merge_planes(name, planes, merged)
        straight = np.zeros(shape, np.uint16)
        codec.decode_block(name, payload, straight)
        assert np.array_equal(merged, straight)
        others = [np.zeros_like(plane) for plane in planes]
        in_place = codec.decode_planes(name, payload, others, copy=False)
        assert all(np.array_equal(a, b) for a, b in zip(in_place, planes, strict=True))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=20)
@given(shape=shapes, seed=seeds, kind=st.sampled_from(["spread", "normal"]))
def test_worst_case_is_a_bound(
    name: str, shape: tuple[int, int, int], seed: int, kind: str
) -> None:
    states = make_states(shape, seed, "normal" if kind == "normal" else "bits")
    # finite, and within the range that every codec takes
    states[(states & 0x7F80) >= 0x7B00] &= 0x80FF
    payloads = codec.encode_states(states, name)
    assert sum(map(len, payloads)) <= codec.worst_case_bytes(*shape, name)


def test_planes_as_they_lie_in_the_payload() -> None:
    states = make_states((100, 2, 64), 12, "normal")
    (payload,) = codec.encode_states(states, "em-zfast")
    planes = [
        np.zeros(spec.shape, np.uint8) for spec in codec.plane_specs("em-zfast", (100, 2, 64))
    ]
    exponent, *in_place = codec.decode_planes("em-zfast", payload, planes, copy=False)
    assert exponent is planes[0]
    assert not any(plane.any() for plane in planes[1:])
    for plane in in_place:
        assert np.shares_memory(plane, np.frombuffer(payload, np.uint8))
        assert not plane.flags.writeable


def test_compresses_what_compresses() -> None:
    states = make_states((600, 2, 256), 4, "normal")
    stored = sum(map(len, codec.encode_states(states, "em-zfast")))
    assert stored < 0.7 * states.nbytes


@given(data=st.binary(max_size=2000))
@settings(max_examples=50)
def test_blobs_round_trip(data: bytes) -> None:
    frame = codec.compress(data)
    assert codec.decompress(frame, len(data)) == data
    assert codec.checksum(data) == codec.checksum(bytearray(data))


def test_checksum_is_xxh3() -> None:
    # the published xxh3_64 value of no bytes with seed 0
    assert codec.checksum(b"") == 0x2D06800538D394C2


@pytest.mark.parametrize("name", ["", "zstd", "bitround-7", "bitround-", "bitround-10", "EM-ZFAST"])
def test_unknown_codec(name: str) -> None:
    with pytest.raises(ConfigError, match="em-zfast"):
        codec.parse_codec(name)


def test_wrong_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="uint16"):
        codec.encode_states(np.zeros((2, 2, 2), np.float32), "raw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="uint16"):
        codec.encode_states(np.zeros((2, 2), np.uint16), "em-zfast")


@pytest.mark.parametrize("name", WITH_PLANES)
@settings(max_examples=30)
@given(data=st.data(), seed=seeds)
def test_room_that_is_too_small_is_refused(name: str, data: st.DataObject, seed: int) -> None:
    shape = (70, 2, 65)
    states = make_states(shape, seed, "normal")
    size = codec.worst_case_bytes(*shape, name, block_tokens=32)
    given_bytes = data.draw(st.integers(0, size - 1))
    with pytest.raises(ValueError, match=f"{size} bytes or more"):
        codec.encode_states(states, name, block_tokens=32, room=np.empty(given_bytes, np.uint8))


@pytest.mark.parametrize("name", WITH_PLANES)
def test_room_is_used_and_nothing_beside_it(name: str) -> None:
    shape = (70, 2, 65)
    states = make_states(shape, 5, "normal")
    size = codec.worst_case_bytes(*shape, name, block_tokens=32)
    memory = np.full(size + 128, 0x5A, np.uint8)
    payloads = codec.encode_states(states, name, block_tokens=32, room=memory[64:-64])
    assert payloads == codec.encode_states(states, name, block_tokens=32)
    assert all(np.shares_memory(np.frombuffer(each, np.uint8), memory) for each in payloads)
    assert set(memory[:64]) == set(memory[-64:]) == {0x5A}
    for wrong in (np.empty((size, 1), np.uint8), np.empty(size, np.uint16)):
        with pytest.raises(ValueError, match="flat uint8"):
            codec.encode_states(states, name, block_tokens=32, room=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("block_tokens", [0, -1, -512])
def test_blocks_have_tokens(name: str, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="one token or more"):
        codec.encode_states(make_states((3, 1, 2), 0, "normal"), name, block_tokens=block_tokens)


@pytest.mark.parametrize("name", WITH_PLANES)
def test_planes_in_memory_of_other_order_are_refused(name: str) -> None:
    shape = (40, 2, 70)
    (payload,) = codec.encode_states(make_states(shape, 6, "normal"), name)
    planes = [np.zeros(spec.shape, np.uint8, order="F") for spec in codec.plane_specs(name, shape)]
    with pytest.raises(ValueError, match="contiguous"):
        codec.decode_planes(name, payload, planes)


@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_edges_of_tiles(name: str, off: int) -> None:
    hidden = 1024
    shape = (TILE_ELEMENTS // (2 * hidden) + off, 2, hidden)
    states = make_states(shape, 7, "normal")
    whole, rows = np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)
    codec.decode_states(name, codec.encode_states(states, name), whole)
    # biases and scales are of a channel or a token: whatever is decoded does not depend on blocks
    cut = codec.encode_states(states, name, block_tokens=1)
    codec.decode_states(name, cut, rows, block_tokens=1)
    assert np.array_equal(whole, rows)


def test_threads_with_different_shapes_do_not_mix() -> None:
    kinds = [(name, (t, 2, h)) for name in codec.CODECS for t, h in ((3, 700), (90, 64), (513, 31))]
    inputs = {kind: make_states(kind[1], 8, "normal") for kind in kinds}

    def round_trip(kind: tuple[str, tuple[int, int, int]]) -> bytes:
        name, shape = kind
        out = np.zeros(shape, np.uint16)
        codec.decode_states(name, codec.encode_states(inputs[kind], name), out)
        return out.tobytes()

    alone = list(map(round_trip, kinds))
    order = np.random.default_rng(9).permutation(np.repeat(np.arange(len(kinds)), 4))
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda index: round_trip(kinds[index]), order))
    assert together == [alone[index] for index in order]
