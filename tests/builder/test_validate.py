"""Checks of hidden states: each fault is named with layer and position, real states pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.extraction.validate import (
    StatesCheck,
    check_shape,
    check_states,
    check_token_ids,
)
from draftmill.manifests.errors import RejectedError
from draftmill.manifests.types import StatesTLH, TokenIds

LAYERS = (2, 15, 27, 30)
some = settings(max_examples=12)


def sample(tokens: int, hidden: int = 96, seed: int = 0) -> tuple[TokenIds, StatesTLH]:
    rng = np.random.default_rng(seed)
    scale = np.array([1, 4, 9, 30], np.float32)[None, :, None]
    values = rng.standard_normal((tokens, 4, hidden), dtype=np.float32) * scale
    if tokens:
        values[0, 1:, 7] = 24_960  # a massive activation, as real models have at the first token
    ids = rng.integers(0, 50_000, tokens).astype(np.int32)
    return ids, (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("tokens", [0, 1, 2, 300, 1100])
def test_ordinary_states_pass_without_a_warning(tokens: int) -> None:
    ids, states = sample(tokens)
    assert check_states(ids, states, LAYERS) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [(0x7FC0, "NaN"), (0xFFC1, "NaN"), (0x7F81, "NaN"), (0x7F80, "infinite"), (0xFF80, "infinite")],
)
@some
@given(st.integers(0, 699), st.integers(0, 3), st.integers(0, 95))
def test_not_finite(pattern: int, reason: str, t: int, layer: int, h: int) -> None:
    ids, states = sample(700)
    states[t, layer, h] = pattern
    with pytest.raises(RejectedError, match=reason) as caught:
        check_states(ids, states, LAYERS)
    assert (caught.value.layer, caught.value.position) == (LAYERS[layer], t)


@some
@given(st.integers(0, 699), st.integers(0, 3), st.sampled_from([0, 0x8000, 0x3F80]))
def test_flat_at_one_position(t: int, layer: int, value: int) -> None:
    ids, states = sample(700)
    states[t, layer] = value
    with pytest.raises(RejectedError, match=r"zero|same in all channels") as caught:
        check_states(ids, states, LAYERS)
    assert (caught.value.layer, caught.value.position) == (LAYERS[layer], t)


def test_zeros_of_both_signs_are_zero() -> None:
    ids, states = sample(8)
    states[5, 2, ::2], states[5, 2, 1::2] = 0, 0x8000
    with pytest.raises(RejectedError, match="zero"):
        check_states(ids, states, LAYERS)


def test_padding_embeddings_may_be_zero_but_not_all() -> None:
    ids, states = sample(8)
    states[5, 0] = 0
    assert check_states(ids, states, (0, 15, 27, 30)) is None
    states[:, 0] = 0
    with pytest.raises(RejectedError, match="all states are zero") as caught:
        check_states(ids, states, (0, 15, 27, 30))
    assert caught.value.layer == 0


def test_a_layer_that_never_changes() -> None:
    ids, states = sample(700)
    states[:, 3] = states[0, 3]
    with pytest.raises(RejectedError, match="all positions are the same") as caught:
        check_states(ids, states, LAYERS)
    assert caught.value.layer == 30
    assert check_states(np.full_like(ids, 7), states, LAYERS) is None


def test_norm_outliers_are_a_warning() -> None:
    ids, states = sample(700)
    states[100:200, 2, 5] = 0x4800  # 131072 where 30 is ordinary
    warning = check_states(ids, states, LAYERS)
    assert warning is not None
    assert "101 outliers" in warning  # the massive activation stands out as well
    assert "layer 27 at position 0" in warning
    ids, states = sample(700)
    states[13, 0, 5] = 0x7E00
    assert "1 outliers" in (check_states(ids, states, LAYERS) or "")


@some
@given(st.lists(st.integers(0, 40), max_size=12))
def test_parts_are_checked_as_the_whole(cuts: list[int]) -> None:
    ids, states = sample(sum(cuts), hidden=300, seed=3)
    check = StatesCheck(ids, LAYERS, 300)
    position = 0
    for length in cuts:
        check.update(states[position : position + length])
        position += length
    assert check.finish() == check_states(ids, states, LAYERS)


def test_ids_and_shapes() -> None:
    sent = np.arange(5, dtype=np.int32)
    received = sent.astype(np.int64)
    check_token_ids(sent, received)
    received[3] = 99
    with pytest.raises(RejectedError, match="id 99 instead of 3 at position 3"):
        check_token_ids(sent, received)
    check_shape([5, 4, 96], "BF16", num_layers=4, hidden_size=96)
    for shape, dtype, reason in (
        ([5, 4, 96], "F16", "F16, not BF16"),
        ([5, 384], "BF16", "2 dimensions"),
        ([5, 3, 96], "BF16", "3 layers in the file, not 4"),
        ([5, 4, 95], "BF16", "hidden size 95"),
    ):
        with pytest.raises(RejectedError, match=reason):
            check_shape(shape, dtype, num_layers=4, hidden_size=96)
