"""What lossy storage of hidden states costs: error by layer and channel, KL through the lm_head.

Pure arithmetic in numpy; who prints or stores the figures is up to the caller. Also holds the fp8
baseline that they are compared with.

Legend: T tokens, L layers, H hidden size, V vocabulary; words are bf16 bit patterns, uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.target import TargetModel

Words = NDArray[np.uint16]
Floats = NDArray[np.float32]

FP8_MAX = 448.0  # e4m3 without infinities
FP8_MANTISSA_BITS = 3
FP8_MIN_EXPONENT = -6
_KL_TOKENS = 64  # logits of that many tokens at a time: 2 x 64 x V float32


def to_floats(words: NDArray[Any]) -> Floats:
    """bf16 bit patterns as float32; float arrays as they are."""
    if words.dtype != np.uint16:
        return words.astype(np.float32)
    floats: Floats = (words.astype(np.uint32) << 16).view(np.float32)
    return floats


def to_words(floats: Floats) -> Words:
    """float32 as bf16 bit patterns, rounded to nearest, ties to even; finite values only."""
    bits = np.ascontiguousarray(floats, np.float32).view(np.uint32)
    words: Words = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return words


def relative_error_by_layer(exact_TLH: Words, decoded_TLH: Words) -> list[float]:
    """Length of the error over length of the states, one figure for each layer."""
    return [
        float(np.linalg.norm(_difference(exact, decoded)) / np.linalg.norm(to_floats(exact)))
        for exact, decoded in _layers(exact_TLH, decoded_TLH)
    ]


def channel_error_by_layer(exact_TLH: Words, decoded_TLH: Words) -> list[float]:
    """Median over the channels of each channel's relative error, one figure for each layer.

    A channel that is always zero has no relative error and is left out.
    """
    medians = []
    for exact, decoded in _layers(exact_TLH, decoded_TLH):
        size = np.linalg.norm(to_floats(exact), axis=0)
        error = np.linalg.norm(_difference(exact, decoded), axis=0)
        medians.append(float(np.median(error[size > 0] / size[size > 0])))
    return medians


def fp8_round_trip(states_TLH: Words) -> tuple[NDArray[np.uint8], Words]:
    """Store as fp8 e4m3 with a scale per token and layer: the fp8 bytes and what they decode to.

    The scale is absmax / 448 in float32, rounding is to nearest, ties to even. This is how fp8
    hidden states are stored elsewhere; here it is the baseline of the lossy codecs.
    """
    stored = np.empty(states_TLH.shape, np.uint8)
    decoded = np.empty(states_TLH.shape, np.uint16)
    for layer in range(states_TLH.shape[1]):
        floats = to_floats(states_TLH[:, layer])
        scale = np.abs(floats).max(axis=1, keepdims=True) / np.float32(FP8_MAX)
        scale[scale == 0] = 1
        scaled = floats / scale
        exponent = np.where(scaled == 0, FP8_MIN_EXPONENT, np.frexp(scaled)[1] - 1)
        exponent = np.maximum(exponent, FP8_MIN_EXPONENT)
        step = np.ldexp(np.float32(1), exponent - FP8_MANTISSA_BITS)
        units = np.minimum(np.rint(np.abs(scaled) / step), FP8_MAX / step)
        # rounding up to the next power of two moves to the next exponent
        code = (exponent - FP8_MIN_EXPONENT).astype(np.int64) * 8 + units.astype(np.int64)
        stored[:, layer] = np.signbit(floats) * 128 + np.minimum(code, 126)
        decoded[:, layer] = to_words(np.copysign(units * step, floats) * scale)
    return stored, decoded


def kl_through_lm_head(target: TargetModel, exact_TH: Words, decoded_TH: Words) -> float:
    """Mean over tokens of KL(exact || decoded) in nats, of the target's next-token distributions.

    The states are those of the last layer, before the final norm. Both are taken through norm and
    lm_head in float32. Raises ConfigError where the target's weights are not at hand.
    """
    head = to_floats(target.lm_head())
    weight = to_floats(target.final_norm())
    if target.norm_adds_one:
        weight = weight + 1
    epsilon = float(target.text_config.get("rms_norm_eps", 1e-6))
    total = 0.0
    for start in range(0, len(exact_TH), _KL_TOKENS):
        rows = slice(start, start + _KL_TOKENS)
        exact = _log_probabilities(to_floats(exact_TH[rows]), weight, head, epsilon)
        other = _log_probabilities(to_floats(decoded_TH[rows]), weight, head, epsilon)
        total += float((np.exp(exact) * (exact - other)).sum(dtype=np.float64))
    return total / max(1, len(exact_TH))


def _log_probabilities(states_TH: Floats, weight: Floats, head: Floats, epsilon: float) -> Floats:
    mean_square = np.mean(states_TH * states_TH, axis=1, keepdims=True)
    logits: Floats = (states_TH / np.sqrt(mean_square + epsilon) * weight) @ head.T
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def _layers(exact_TLH: Words, decoded_TLH: Words) -> list[tuple[Words, Words]]:
    return [(exact_TLH[:, i], decoded_TLH[:, i]) for i in range(exact_TLH.shape[1])]


def _difference(exact: Words, decoded: Words) -> Floats:
    return to_floats(decoded) - to_floats(exact)
