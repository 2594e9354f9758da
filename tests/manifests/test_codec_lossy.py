"""The lossy codecs do exactly the arithmetic that docs/codecs.md gives, on numpy and on torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftmill.manifests.codec import codec
from tests.manifests.test_codec import SPECIAL, make_states

KEEPS = range(7)


def floats(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bit patterns as numbers."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def round_trip(states: NDArray[np.uint16], name: str) -> NDArray[np.uint16]:
    out = np.full(states.shape, 0xABCD, np.uint16)
    codec.decode_states(name, codec.encode_states(states, name), out)
    return out


def all_words() -> NDArray[np.uint16]:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(256, 1, 256)


# ---- bitround-k -------------------------------------------------------------------------------


def rounded(word: int, keep: int) -> int:
    """What docs/codecs.md says of one word, in Python's unbounded integers."""
    sign, magnitude = word & 0x8000, word & 0x7FFF
    if magnitude > 0x7F80:
        return sign | 0x7FC0
    if magnitude == 0x7F80:
        return word
    step = 1 << (7 - keep)
    # magnitudes are ordered as integers, so rounding them is rounding the number
    low = magnitude // step * step
    twice = 2 * (magnitude - low)
    if twice > step or (twice == step and (low // step) % 2):
        low += step
    return sign | min(low, 0x7F80 - step)


@pytest.mark.parametrize("keep", KEEPS)
def test_bitround_of_every_word(keep: int) -> None:
    words = all_words()
    wanted = np.array([rounded(int(word), keep) for word in words.ravel()], np.uint16)
    assert np.array_equal(round_trip(words, f"bitround-{keep}").ravel(), wanted)


@pytest.mark.parametrize("keep", KEEPS)
def test_bitround_is_nearest(keep: int) -> None:
    words = all_words()
    finite = words[(words & 0x7FFF) < 0x7F00].reshape(-1, 1, 1)
    got, exact = floats(round_trip(finite, f"bitround-{keep}")), floats(finite)
    normal = np.abs(exact) >= 2.0**-126
    relative = np.abs(got - exact)[normal] / np.abs(exact)[normal]
    assert relative.max() <= 2.0 ** -(keep + 1)


@pytest.mark.parametrize("keep", KEEPS)
def test_bitround_twice_is_once(keep: int) -> None:
    states = make_states((30, 2, 70), 7, "special")
    once = round_trip(states, f"bitround-{keep}")
    assert np.array_equal(round_trip(once, f"bitround-{keep}"), once)


# ---- rot4 -------------------------------------------------------------------------------------


def hadamard_signs() -> list[list[int]]:
    """The decoding matrix of docs/codecs.md, from its formula."""
    matrix = []
    for j in range(64):
        b = [j >> i & 1 for i in range(6)]
        sign = (-1) ** (b[0] * b[1] + b[2] * b[3] + b[4] * b[5])
        matrix.append([sign * (-1) ** (j & m).bit_count() for m in range(64)])
    return matrix


def finite_states(shape: tuple[int, int, int], seed: int) -> NDArray[np.uint16]:
    """Numbers over the whole range that rot4 takes, magnitudes mixed within a token."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    spread = rng.integers(1, 127, (shape[0], 1, 1))
    exponents = 127 + np.clip(rng.integers(-spread, spread + 1, shape), -127, 119)
    return ((words & 0x807F) | (exponents << 7)).astype(np.uint16)


lossy_shapes = st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 200))


@settings(max_examples=25)
@given(shape=lossy_shapes, seed=st.integers(0, 2**32 - 1))
def test_rot4_decodes_as_documented(shape: tuple[int, int, int], seed: int) -> None:
    num_tokens, num_layers, hidden_size = shape
    groups = math.ceil(hidden_size / 64)
    (payload,) = codec.encode_states(finite_states(shape, seed), "rot4")
    specs = codec.plane_specs("rot4", shape)
    symbols, exponent, rest = planes = [np.zeros(spec.shape, np.uint8) for spec in specs]
    codec.decode_planes("rot4", payload, planes)
    values = np.concatenate([symbols & 15, symbols >> 4], axis=1).astype(np.float64) - 8
    assert values.min() >= -7
    scales = floats((exponent.astype(np.uint16) << 7) | rest)
    members = np.einsum("jm,lmtg->ljtg", np.array(hadamard_signs(), np.float64), values)
    members = (members * scales[:, None]).astype(np.float32)
    channels = members.transpose(2, 0, 1, 3).reshape(num_tokens, num_layers, 64 * groups)
    bits = np.ascontiguousarray(channels[:, :, :hidden_size]).view(np.uint32)
    wanted = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    out = np.zeros(shape, np.uint16)
    codec.decode_block("rot4", payload, out)
    assert np.array_equal(out, wanted)


@settings(max_examples=25)
@given(shape=lossy_shapes, seed=st.integers(0, 2**32 - 1))
def test_rot4_on_torch_is_rot4_on_numpy(shape: tuple[int, int, int], seed: int) -> None:
    torch = pytest.importorskip("torch")
    num_tokens, num_layers, hidden_size = shape
    groups = math.ceil(hidden_size / 64)
    (payload,) = codec.encode_states(finite_states(shape, seed), "rot4")
    planes = [np.zeros(spec.shape, np.uint8) for spec in codec.plane_specs("rot4", shape)]
    codec.decode_planes("rot4", payload, planes)
    symbols, exponent, rest = (torch.from_numpy(plane) for plane in planes)
    matrix = torch.tensor(hadamard_signs(), dtype=torch.float32)
    nibbles = torch.cat([symbols & 15, symbols >> 4], dim=1).to(torch.float32) - 8
    scales = (exponent.to(torch.int16) << 7 | rest.to(torch.int16)).view(torch.bfloat16)
    members = matrix @ nibbles.reshape(num_layers, 64, num_tokens * groups)
    members = members * scales.reshape(num_layers, 1, -1).to(torch.float32)
    channels = members.to(torch.bfloat16).reshape(num_layers, 64, num_tokens, groups)
    got = channels.permute(2, 0, 1, 3).reshape(num_tokens, num_layers, 64 * groups)
    out = np.zeros(shape, np.uint16)
    codec.decode_block("rot4", payload, out)
    assert np.array_equal(got[:, :, :hidden_size].contiguous().view(torch.uint16).numpy(), out)


@settings(max_examples=25)
@given(shape=lossy_shapes, seed=st.integers(0, 2**32 - 1))
def test_rot4_error_is_bounded(shape: tuple[int, int, int], seed: int) -> None:
    """Per token and group: half a step, spread over 64 members, and the fixed point's rounding."""
    states = finite_states(shape, seed)
    groups = math.ceil(shape[2] / 64)
    padded = np.zeros((*shape[:2], 64 * groups))
    padded[:, :, : shape[2]] = floats(states)
    decoded = np.zeros_like(padded)
    decoded[:, :, : shape[2]] = floats(round_trip(states, "rot4"))
    exact = padded.reshape(*shape[:2], 64, groups)
    error = np.abs(decoded.reshape(exact.shape) - exact).max(axis=2)
    size = np.sqrt((exact**2).sum(axis=2))
    # a rotated value is at most the length of its group, a step a seventh of the largest
    bound = size * (8 * (1 / 14) * 1.02 + 0.02) + 2.0**-99
    assert (error <= bound).all()


def test_rot4_spreads_an_outlier() -> None:
    states = make_states((64, 1, 640), 8, "normal")
    states[:, :, 100] = 0x46C3  # 24,960 beside values of about 1
    exact, got = floats(states), floats(round_trip(states, "rot4"))
    others = np.ones(640, bool)
    others[100 % 10 :: 10] = False  # the outlier's own group: channels equal modulo G = 10
    error = got - exact
    assert np.sqrt((error[..., others] ** 2).mean()) < 0.15
    assert np.abs(error[..., 100]).max() < 0.01 * 24_960


def test_rot4_of_zeros_and_tiny_values_is_zero() -> None:
    for word in (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x0D7F):
        states = np.full((3, 2, 65), word, np.uint16)
        assert not round_trip(states, "rot4").any()


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7B80])
def test_rot4_refuses_what_it_cannot_hold(word: int) -> None:
    states = make_states((40, 2, 100), 9, "normal")
    states[33, 1, 99] = word
    with pytest.raises(ValueError, match="finite"):
        codec.encode_states(states, "rot4")


@pytest.mark.parametrize("name", ["rot4", "bitround-4"])
def test_the_same_states_give_the_same_bytes(name: str) -> None:
    states = make_states((600, 2, 130), 10, "normal")
    first = codec.encode_states(states, name)
    codec.encode_states(make_states((50, 1, 700), 11, "normal"), name)
    assert codec.encode_states(states.copy(), name) == first


def test_special_words_cover_both_signs() -> None:
    assert {word ^ 0x8000 for word in SPECIAL} == set(SPECIAL)
