"""The last step of a target model in numpy: final norm, lm_head, log-probabilities.

Reads two weights only, the large one in slices, so that it works for models of any size without
torch. Which config fields say what is known here; where the weights lie is `target`'s.

Legend: T tokens, H hidden size, V vocabulary, K wanted tokens at each position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.codec.numbers import Floats, to_floats
from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target.target import TargetModel

# Bytes of lm_head in float32 at a time.
_SLICE_BYTES = 64 << 20
# Fields that change logits in ways that are not computed here. 1 or null leave them as they are.
_UNKNOWN_FIELDS = ("lm_head_multiplier", "mup_width_multiplier", "output_multiplier_scale")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Next-token log-probabilities (natural) of T positions.

    `wanted_TK` are those of the tokens that were asked for, `first_T` the most likely token.
    `step_T` is the spacing of bf16 numbers at the largest logit: what a server that computes
    logits in bf16 cannot resolve.
    """

    wanted_TK: Floats
    first_T: NDArray[np.int64]
    step_T: Floats


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """Final norm and lm_head of a target model, and what its config does to logits."""

    target: TargetModel = field(repr=False)
    epsilon: float
    scale: float  # logits are multiplied by it
    cap: float | None  # logits become cap * tanh(logits / cap)

    @classmethod
    def of(cls, target: TargetModel) -> OutputHead:
        """What the config says; ConfigError for norms and fields that are not known here, and
        where the weights are not in the folder."""
        config = target.text_config
        if config.get("rms_norm_eps") is None:
            raise ConfigError(
                f"{target.name} ({target.model_type}): its config has no rms_norm_eps, and only "
                "RMSNorm is known as a final norm"
            )
        for name in _UNKNOWN_FIELDS:
            if config.get(name) not in (None, 1, 1.0):
                raise ConfigError(
                    f"{target.name} ({target.model_type}): {name} = {config[name]} in its config "
                    "changes logits in a way that is not known here"
                )
        target.final_norm()
        target.lm_head(slice(0, 1))
        return cls(
            target=target,
            epsilon=float(config["rms_norm_eps"]),
            scale=_logit_scale(target),
            cap=config.get("final_logit_softcapping"),
        )

    def normalised(self, states_TH: Floats) -> Floats:
        """The states after the final norm."""
        weight = to_floats(self.target.final_norm())
        if self.target.norm_adds_one:
            weight = weight + 1
        mean_square = np.mean(states_TH * states_TH, axis=1, keepdims=True)
        found: Floats = states_TH / np.sqrt(mean_square + np.float32(self.epsilon)) * weight
        return found

    def scores(
        self, states_TH: Floats, wanted_TK: NDArray[np.int64], *, norm: bool = True
    ) -> Scores:
        """What states of the last layer, before the final norm, say about the next token.

        `norm` False leaves the final norm out, for states that are suspected to have it already.
        """
        ready_TH = self.normalised(states_TH) if norm else states_TH
        num_tokens = len(ready_TH)
        most_T = np.full(num_tokens, -np.inf, np.float32)
        sum_T = np.zeros(num_tokens, np.float64)
        largest_T = np.zeros(num_tokens, np.float32)
        first_T = np.zeros(num_tokens, np.int64)
        wanted = np.zeros(wanted_TK.shape, np.float32)
        for rows in self._slices():
            start, stop = rows.start, rows.stop
            logits = self._logits(ready_TH, rows)
            best_T = logits.argmax(axis=1)
            peak_T = logits[np.arange(num_tokens), best_T]
            first_T = np.where(peak_T > most_T, best_T + start, first_T)
            more_T = np.maximum(most_T, peak_T)
            sum_T *= np.exp((most_T - more_T).astype(np.float64))
            sum_T += np.exp(logits - more_T[:, None]).sum(axis=1, dtype=np.float64)
            most_T = more_T
            largest_T = np.maximum(largest_T, np.abs(logits).max(axis=1))
            inside = (wanted_TK >= start) & (wanted_TK < stop)
            t, k = np.nonzero(inside)
            wanted[t, k] = logits[t, wanted_TK[t, k] - start]
        total_T = (most_T + np.log(sum_T)).astype(np.float32)
        exponent_T = np.frexp(np.maximum(largest_T, 1e-30))[1]
        step_T = np.ldexp(np.float32(1), exponent_T - 8).astype(np.float32)
        return Scores(wanted_TK=wanted - total_T[:, None], first_T=first_T, step_T=step_T)

    def log_probabilities(self, states_TH: Floats) -> Floats:
        """[T, V] of all next tokens, from states of the last layer before the final norm."""
        ready_TH = self.normalised(states_TH)
        logits: Floats = np.empty((len(ready_TH), self.target.vocab_size), np.float32)
        for rows in self._slices():
            logits[:, rows] = self._logits(ready_TH, rows)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits

    def _slices(self) -> list[slice]:
        """The vocabulary in pieces whose rows of the lm_head fit the memory for them."""
        vocab_size = self.target.vocab_size
        rows = max(1, _SLICE_BYTES // (4 * self.target.hidden_size))
        return [slice(at, min(at + rows, vocab_size)) for at in range(0, vocab_size, rows)]

    def _logits(self, ready_TH: Floats, rows: slice) -> Floats:
        weight = to_floats(self.target.lm_head(rows))
        logits: Floats = ready_TH @ weight.T
        if self.scale != 1:
            logits *= np.float32(self.scale)
        if self.cap:
            logits = np.float32(self.cap) * np.tanh(logits / np.float32(self.cap))
        return logits


def _logit_scale(target: TargetModel) -> float:
    """The factor on logits: Cohere multiplies, Granite divides, MiniCPM divides the states."""
    config = target.text_config
    scale = float(config.get("logit_scale") or 1)
    scale /= float(config.get("logits_scaling") or 1)
    if base := config.get("dim_model_base"):
        scale *= float(base) / target.hidden_size
    return scale
