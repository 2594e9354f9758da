"""Whether hidden states can be what a server should have sent: pure checks on numbers.

Owns what is wrong with one sample and how that is said. Reading files is left to `staging`, what
follows from a rejection to `extract`. Whether the layers are the right ones cannot be seen here.

T tokens, L layers, H hidden size; states are bf16 bit patterns, uint16 [T, L, H]. Magnitudes are
compared as integers: with the sign bit cleared, bit patterns order as the values do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.errors import RejectedError
from draftmill.manifests.types import StatesTLH, TokenIds

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = 0x7F80
# Blocks that stay in the second-level cache while they are read twice.
_BLOCK_WORDS = 1 << 18
_SAMPLED_CHANNELS = 8
# A row whose largest value is this many times the layer's median is an outlier. Massive
# activations are normal at a few positions (the first token, delimiters), so only many are odd.
_OUTLIER_EXPONENTS = 6
_OUTLIERS_ALLOWED = 8
_HUGE = 0x4D80  # bf16 of 2 ** 28; massive activations of real models stay far below


def check_token_ids(sent: TokenIds, received: NDArray[np.int64]) -> None:
    """Raises RejectedError unless both have the same ids; lengths are equal already."""
    if np.array_equal(sent, received):
        return
    position = int(np.flatnonzero(sent != received)[0])
    raise RejectedError(
        f"the states belong to other tokens: id {received[position]} instead of {sent[position]} "
        f"at position {position}"
    )


def check_shape(shape: Sequence[int], dtype: str, *, num_layers: int, hidden_size: int) -> None:
    """Raises RejectedError unless `shape` is [T, num_layers, hidden_size] and `dtype` BF16."""
    if dtype != "BF16":
        raise RejectedError(f"the states are {dtype}, not BF16: serve the target with bfloat16")
    if len(shape) != 3:
        raise RejectedError(f"the states have {len(shape)} dimensions, not 3")
    if shape[1] != num_layers:
        raise RejectedError(f"{shape[1]} layers in the file, not {num_layers}")
    if shape[2] != hidden_size:
        raise RejectedError(f"hidden size {shape[2]} in the file, not {hidden_size}")


class StatesCheck:
    """Checks one sample as its tokens arrive: `update` with consecutive parts, then `finish`.

    Errors name the layer by its target layer id and the position within the sample. Uses memory for
    one number per token and layer, and a block.
    """

    def __init__(self, token_ids: TokenIds, layer_ids: Sequence[int], hidden_size: int) -> None:
        self._layer_ids = tuple(layer_ids)
        self._tokens = len(token_ids)
        self._not_embeddings_L = np.array([each != 0 for each in layer_ids])
        self._same_tokens = bool(np.all(token_ids == token_ids[:1]))
        self._done = 0
        self._peaks_TL = np.empty((self._tokens, len(self._layer_ids)), np.uint16)
        self._first_LH: StatesTLH | None = None
        self._differ_L = np.zeros(len(self._layer_ids), bool)
        words = len(self._layer_ids) * hidden_size
        self._step = max(1, _BLOCK_WORDS // words)
        self._work = np.empty((self._step, len(self._layer_ids), hidden_size), np.uint16)

    def update(self, states_TLH: StatesTLH) -> None:
        """Check the next tokens; raises RejectedError at the first that is not finite or flat."""
        start, count = self._done, len(states_TLH)
        if not count:
            return
        if self._first_LH is None:
            self._first_LH = states_TLH[0].copy()
        peaks_TL = self._peaks_TL[start : start + count]
        for begin in range(0, count, self._step):
            block_TLH = states_TLH[begin : begin + self._step]
            work = self._work[: len(block_TLH)]
            np.bitwise_and(block_TLH, _MAGNITUDE, out=work)
            np.max(work, axis=2, out=peaks_TL[begin : begin + self._step])
            if int(peaks_TL[begin : begin + self._step].max()) >= _INFINITY:
                self._raise_not_finite(block_TLH, start + begin)
            self._check_flat(block_TLH, peaks_TL[begin : begin + self._step], start + begin)
        self._check_changing(states_TLH)
        self._done += count

    def finish(self) -> str | None:
        """The last checks, over all positions; returns a warning about outliers, or None."""
        assert self._done == self._tokens, "every token is checked before the end"
        if not self._tokens:
            return None
        for index in np.flatnonzero(self._peaks_TL.max(axis=0) == 0):
            raise RejectedError("all states are zero", layer=self._layer_ids[index], position=0)
        # The same token everywhere does give the same states everywhere.
        if self._tokens > 1 and not self._same_tokens:
            for index in np.flatnonzero(~self._differ_L):
                layer = self._layer_ids[index]
                raise RejectedError("all positions are the same", layer=layer, position=1)
        return self._outliers()

    def _raise_not_finite(self, block_TLH: StatesTLH, start: int) -> None:
        bad = (block_TLH & _MAGNITUDE) >= _INFINITY
        t, layer, h = (int(each) for each in np.argwhere(bad)[0])
        kind = "infinite" if block_TLH[t, layer, h] & _MAGNITUDE == _INFINITY else "NaN"
        count = int(bad.sum())
        raise RejectedError(
            f"{kind} state" + (f" ({count} values there are not finite)" if count > 1 else ""),
            layer=self._layer_ids[layer],
            position=start + t,
        )

    def _check_flat(self, block_TLH: StatesTLH, peaks_TL: StatesTLH, start: int) -> None:
        """Nothing, or one value in all channels, at a position; the outer two say where to look."""
        # An embedding of zeros is what padding tokens have in many models.
        flat_TL = (peaks_TL == 0) & self._not_embeddings_L
        if block_TLH.shape[2] > 1:
            alike_TL = (peaks_TL != 0) & (block_TLH[:, :, -1] == block_TLH[:, :, 0])
            if alike_TL.any():
                rows = block_TLH[alike_TL]
                flat_TL[alike_TL] |= (rows == rows[:, :1]).all(axis=1)
        if flat_TL.any():
            t, layer = (int(each) for each in np.argwhere(flat_TL)[0])
            what = "the same in all channels" if peaks_TL[t, layer] else "zero"
            layer_id = self._layer_ids[layer]
            raise RejectedError(f"the states are {what}", layer=layer_id, position=start + t)

    def _check_changing(self, states_TLH: StatesTLH) -> None:
        """Notes which layers differ anywhere from their first position."""
        if self._differ_L.all():
            return
        assert self._first_LH is not None
        sampled = states_TLH[:, :, :_SAMPLED_CHANNELS]
        self._differ_L |= (sampled != self._first_LH[:, :_SAMPLED_CHANNELS]).any(axis=(0, 2))
        for layer in np.flatnonzero(~self._differ_L):
            self._differ_L[layer] = (states_TLH[:, layer] != self._first_LH[layer]).any()

    def _outliers(self) -> str | None:
        """Positions whose largest magnitude is far from the layer's ordinary one."""
        exponents_TL = (self._peaks_TL >> 7).astype(np.int16)
        median_L = np.median(exponents_TL, axis=0)
        far_TL = np.abs(exponents_TL - median_L) >= _OUTLIER_EXPONENTS
        allowed = max(_OUTLIERS_ALLOWED, self._tokens // 50)
        far_TL &= far_TL.sum(axis=0) > allowed
        far_TL |= self._peaks_TL >= _HUGE
        if not far_TL.any():
            return None
        t, layer = (int(each) for each in np.argwhere(far_TL)[0])
        peak = _value(int(self._peaks_TL[t, layer]))
        ordinary = _value(int(np.median(self._peaks_TL[:, layer])))
        return (
            f"{int(far_TL.sum())} outliers in norm, the first in layer {self._layer_ids[layer]} "
            f"at position {t}: largest value {peak:.3g}, in the median {ordinary:.3g}"
        )


def check_states(
    token_ids: TokenIds, states_TLH: StatesTLH, layer_ids: Sequence[int]
) -> str | None:
    """All checks on the values of a whole sample; raises RejectedError, may return a warning."""
    check = StatesCheck(token_ids, layer_ids, states_TLH.shape[2])
    check.update(states_TLH)
    return check.finish()


def _value(pattern: int) -> float:
    return float(np.uint32(pattern << 16).view(np.float32))
