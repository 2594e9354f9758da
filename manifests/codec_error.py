"""What lossy storage of hidden states costs: error by layer and channel, KL through the lm_head.

Pure arithmetic in numpy; who measures when, and who prints it, is up to the caller. Also holds the
fp8 baseline of the benches, and the sums that a dataset keeps.

Legend: T tokens, L layers, H hidden size, V vocabulary; words are bf16 bit patterns, uint16.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.codec.numbers import (
    E4M3_MAX,
    Floats,
    from_e4m3,
    to_e4m3,
    to_floats,
    to_words,
)
from draftmill.manifests.target.output_head import OutputHead
from draftmill.manifests.target.target import TargetModel

Words = NDArray[np.uint16]

_KL_TOKENS = 64  # so many at a time: 2 x 64 x V float32


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
        scale = np.abs(floats).max(axis=1, keepdims=True) / np.float32(E4M3_MAX)
        scale[scale == 0] = 1
        stored[:, layer] = to_e4m3(floats / scale)
        decoded[:, layer] = to_words(from_e4m3(stored[:, layer]) * scale)
    return stored, decoded


def kl_through_lm_head(target: TargetModel, exact_TH: Words, decoded_TH: Words) -> float:
    """Mean over tokens of KL(exact || decoded) in nats, of the target's next-token distributions.

    The states are those of the last layer, before the final norm. Raises ConfigError where the
    target's weights are not at hand or its output head is not known.
    """
    head = OutputHead.of(target)
    total = 0.0
    for start in range(0, len(exact_TH), _KL_TOKENS):
        rows = slice(start, start + _KL_TOKENS)
        # together, so that the lm_head is read once
        both = np.concatenate([to_floats(exact_TH[rows]), to_floats(decoded_TH[rows])])
        exact, other = np.split(head.log_probabilities(both), 2)
        total += float((np.exp(exact) * (exact - other)).sum(dtype=np.float64))
    return total / max(1, len(exact_TH))


def _layers(exact_TLH: Words, decoded_TLH: Words) -> list[tuple[Words, Words]]:
    return [(exact_TLH[:, i], decoded_TLH[:, i]) for i in range(exact_TLH.shape[1])]


def _difference(exact: Words, decoded: Words) -> Floats:
    return to_floats(decoded) - to_floats(exact)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSums:
    """What was measured of one codec so far, by layer id; adds up over samples and runs.

    Squares are of the error and of the states, over tokens and channels; KL is in nats.
    """

    samples: int = 0
    tokens: int = 0
    error_squares: Mapping[str, float] = field(default_factory=dict)
    state_squares: Mapping[str, float] = field(default_factory=dict)
    kl_sum: float = 0.0
    kl_tokens: int = 0

    @classmethod
    def read(cls, text: str) -> ErrorSums:
        """Sums that `asdict` gave, from JSON. Raises one of NOT_UNDERSTOOD for anything else."""
        given = json.loads(text)
        sums = cls(
            samples=int(given["samples"]),
            tokens=int(given["tokens"]),
            error_squares={key: float(each) for key, each in given["error_squares"].items()},
            state_squares={key: float(each) for key, each in given["state_squares"].items()},
            kl_sum=float(given["kl_sum"]),
            kl_tokens=int(given["kl_tokens"]),
        )
        squares = [*sums.error_squares.values(), *sums.state_squares.values()]
        least = min([sums.samples, sums.tokens, sums.kl_tokens, *squares])
        if least < 0 or not all(map(math.isfinite, [sums.kl_sum, *squares])):
            raise ValueError("sums are finite, and none but that of KL is below 0")
        if sums.error_squares.keys() != sums.state_squares.keys():
            raise ValueError("errors and states are of the same layers")
        return sums

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(
            samples=self.samples + other.samples,
            tokens=self.tokens + other.tokens,
            error_squares=_added(self.error_squares, other.error_squares),
            state_squares=_added(self.state_squares, other.state_squares),
            kl_sum=self.kl_sum + other.kl_sum,
            kl_tokens=self.kl_tokens + other.kl_tokens,
        )

    def figures(self) -> dict[str, Any]:
        """What `status --json` has of it: relative error by layer id, mean KL or null."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "relative_error": {
                layer: (self.error_squares[layer] / squares) ** 0.5 if squares else 0.0
                for layer, squares in self.state_squares.items()
            },
            "kl_nats": self.kl_sum / self.kl_tokens if self.kl_tokens else None,
        }


def error_sums(
    exact_TLH: Words,
    decoded_TLH: Words,
    layer_ids: tuple[int, ...],
    *,
    target: TargetModel | None,
    kl_tokens: int,
) -> ErrorSums:
    """The sums of one sample. KL, through `target`, is of up to `kl_tokens` tokens spread over it.

    Raises ConfigError where the target's weights cannot be used.
    """
    errors, squares = {}, {}
    for layer, (exact, decoded) in zip(layer_ids, _layers(exact_TLH, decoded_TLH), strict=True):
        errors[str(layer)] = float(np.sum(_difference(exact, decoded) ** 2, dtype=np.float64))
        squares[str(layer)] = float(np.sum(to_floats(exact) ** 2, dtype=np.float64))
    kl, count = 0.0, 0
    if target is not None and len(exact_TLH):
        chosen = slice(None, None, max(1, -(-len(exact_TLH) // kl_tokens)))
        last = exact_TLH[chosen, -1]
        count = len(last)
        kl = count * kl_through_lm_head(target, last, decoded_TLH[chosen, -1])
    return ErrorSums(
        samples=1,
        tokens=len(exact_TLH),
        error_squares=errors,
        state_squares=squares,
        kl_sum=kl,
        kl_tokens=count,
    )


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}
