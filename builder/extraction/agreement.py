"""Whether hidden states are what they should be: pure comparisons with what they must lead to.

The last layer against the log-probabilities that the server itself computes from it; any layer
against residual streams of a reference. Where either comes from is left to `probe` and `reference`.

T tokens, L layers, H hidden size; log-probabilities in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftmill.builder.extraction.probe import Probe, Said
from draftmill.manifests.codec.numbers import to_floats
from draftmill.manifests.target.output_head import OutputHead

Floats = NDArray[np.float32]

# Mean difference that rounding explains: the states are bf16, and a server in bf16 rounds its
# logits. On SmolLM2 (steps of 0.15 in the mean) servers in float32 differ by 0.005 and in bf16 by
# 0.024; the layer before the last one by 3.6, and noise of 3 % of the states by 0.08, although 95 %
# of the most likely tokens then still agree.
BASE_NATS = 0.02
STEPS = 0.25
# One position may be off by so many times what is allowed in the mean.
MAX_OVER_MEAN = 10.0
# Positions whose logits are rebuilt: enough for a mean, little for a vocabulary of 160,000.
_POSITIONS = 64
# A layer is told from its neighbours when its error is below this part of the next best one's.
CLEAR = 0.7
# Beyond this relative error no layer of the reference is meant.
_STRANGE = 0.6


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Rebuilt against served log-probabilities, over `positions`; `first` is the part of them
    where the most likely token is the same."""

    mean: float
    most: float
    first: float
    positions: int
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether rounding explains the difference."""
        return self.mean <= self.allowed and self.most <= MAX_OVER_MEAN * self.allowed

    def __str__(self) -> str:
        return (
            f"log-probabilities rebuilt from the last layer differ from the server's own by "
            f"{self.mean:.3g} nats in the mean and {self.most:.3g} at most (rounding explains "
            f"{self.allowed:.2g} and {MAX_OVER_MEAN * self.allowed:.2g}), the most likely token "
            f"agrees at {100 * self.first:.1f} % of {self.positions} positions"
        )


def last_layer(head: OutputHead, probe: Probe, allowed: float | None = None) -> Difference:
    """How well the last layer explains what the server says. `allowed`: nats in the mean; None:
    what rounding explains."""
    return _difference(head, probe.states_TLH[:-1, -1], _Chosen.of(probe), allowed)


def explanation(head: OutputHead, probe: Probe, layer_ids: Sequence[int]) -> str | None:
    """For a last layer that does not fit: what would make it fit, if that is one of the known
    faults."""
    chosen = _Chosen.of(probe)
    last = probe.states_TLH[:, -1]
    for place, layer_id in enumerate(layer_ids[:-1]):
        if _difference(head, probe.states_TLH[:-1, place], chosen, None).ok:
            return (
                f"the last layer lies where layer {layer_id} is expected: the server was started "
                f"with its layers in another order than {list(layer_ids)}"
            )
    if _difference(head, last[:-1], chosen, None, norm=False).ok:
        return "the states are already normalised: the server sends them after its final norm"
    if _difference(head, last[1:], chosen, None).ok:
        return "the states are one position late: they belong to the token before"
    if _difference(head, np.concatenate([last[:1], last[:-2]]), chosen, None).ok:
        return "the states are one position early: they belong to the token after"
    return None


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The positions that are compared, and what the server says there."""

    rows: NDArray[np.int64]
    said: Said
    tokens_TK: NDArray[np.int64]  # the token that is there, and the server's most likely one

    @classmethod
    def of(cls, probe: Probe) -> _Chosen:
        count = len(probe.token_ids) - 1
        rows = np.unique(np.linspace(0, count - 1, min(count, _POSITIONS)).astype(np.int64))
        own_T = probe.token_ids[1:].astype(np.int64)
        first_T = np.where(probe.said.first_T < 0, own_T, probe.said.first_T)
        return cls(rows=rows, said=probe.said, tokens_TK=np.stack([own_T, first_T], 1)[rows])


def _difference(
    head: OutputHead,
    states_TH: NDArray[np.uint16],
    chosen: _Chosen,
    allowed: float | None,
    *,
    norm: bool = True,
) -> Difference:
    said, rows = chosen.said, chosen.rows
    scores = head.scores(to_floats(states_TH[rows]), chosen.tokens_TK, norm=norm)
    known = said.first_T[rows] >= 0
    first_T = np.where(known, said.first_log_probs_T[rows], said.log_probs_T[rows])
    off_TK = np.abs(scores.wanted_TK - np.stack([said.log_probs_T[rows], first_T], 1))
    off_TK = np.where(np.isfinite(off_TK), off_TK, np.inf)
    same = scores.first_T[known] == said.first_T[rows][known]
    return Difference(
        mean=float(off_TK[:, 0].mean()),
        most=float(off_TK.max()),
        first=float(same.mean()) if len(same) else 1.0,
        positions=len(rows),
        allowed=allowed or BASE_NATS + STEPS * float(scores.step_T.mean()),
    )


@dataclass(frozen=True, kw_only=True)
class LayerMatch:
    """One layer against a reference: relative errors (median over tokens of |a - b| / |b|) to the
    reference's layer of that id and to the nearest of all that were computed."""

    layer_id: int
    error: float
    nearest_id: int
    nearest_error: float
    next_error: float  # of the best one besides the nearest

    @property
    def ok(self) -> bool | None:
        """Whether it is that layer; None when this cannot be told."""
        if self.nearest_error >= _STRANGE:
            return False
        if self.nearest_id == self.layer_id:
            return True if self.error <= CLEAR * self.next_error else None
        return False if self.nearest_error <= CLEAR * self.error else None

    def __str__(self) -> str:
        if self.nearest_error >= _STRANGE:
            return (
                f"layer {self.layer_id} is like no layer of the reference (relative error "
                f"{self.error:.3g}; the nearest is layer {self.nearest_id} with "
                f"{self.nearest_error:.3g})"
            )
        return (
            f"the server sends layer {self.nearest_id} where {self.layer_id} is expected (relative "
            f"error {self.nearest_error:.3g} to layer {self.nearest_id}, {self.error:.3g} to "
            f"{self.layer_id})"
        )


def match_layers(
    states_TLH: NDArray[np.uint16], layer_ids: Sequence[int], reference: Mapping[int, Floats]
) -> list[LayerMatch]:
    """Each layer that the reference has (id → residual stream [T, H]) against all that it has."""
    found = []
    for place, layer_id in enumerate(layer_ids):
        if layer_id not in reference:
            continue
        states_TH = to_floats(states_TLH[:, place])
        errors = {other: _relative(states_TH, wanted) for other, wanted in reference.items()}
        order = sorted(errors, key=errors.__getitem__)
        found.append(
            LayerMatch(
                layer_id=layer_id,
                error=errors[layer_id],
                nearest_id=order[0],
                nearest_error=errors[order[0]],
                next_error=errors[order[1]] if len(order) > 1 else np.inf,
            )
        )
    return found


def _relative(states_TH: Floats, wanted_TH: Floats) -> float:
    # The median: massive activations of the first token are the same in most layers.
    size_T = np.maximum(np.linalg.norm(wanted_TH, axis=1), 1e-30)
    return float(np.median(np.linalg.norm(states_TH - wanted_TH, axis=1) / size_T))
