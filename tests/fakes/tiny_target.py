"""A tiny random model behind the fake extraction server: real states, real log-probabilities, and
each way in which a server's states can be the wrong ones.

T tokens, L layers, H hidden size; states are bf16 bit patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WRONG_STATES = (
    "off_by_one_up",  # every auxiliary layer is the one after
    "off_by_one_down",
    "last_is_one_before",  # the input of the last decoder layer in place of its output
    "swapped",  # the first two auxiliary layers
    "last_first",  # the last layer in front
    "other_model",  # states of the same shape from other weights
    "normalised",  # the last layer after the final norm
    "stale",  # the states of the request before, cut or repeated to the same length
    "late",  # each position has the states of the one before
)


class TinyTarget:
    """A transformers model and a wrong one of the same shape; `fault` is one of WRONG_STATES."""

    def __init__(self, folder: Path, layer_ids: Sequence[int], other: Path | None = None) -> None:
        self.folder = folder
        self.layer_ids = tuple(layer_ids)
        self.fault: str | None = None
        self.right_for = 0  # answers before the fault begins
        self._model = _load(folder)
        self._other = None if other is None else _load(other)
        self._before: NDArray[np.uint16] | None = None

    def streams(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """All residual streams, [n + 1, T, H]."""
        return _run(self._model, token_ids)[0]

    def answer(self, token_ids: Sequence[int]) -> tuple[NDArray[np.uint16], list[Any]]:
        """(states [T, L, H] as a server would send them, `prompt_logprobs` in vLLM's form)."""
        streams, logits = _run(self._model, token_ids)
        last = len(streams) - 1
        self.right_for -= 1
        fault = None if self.right_for >= 0 else self.fault
        if fault == "other_model":
            streams = _run(self._other, token_ids)[0]
        ids = list(self.layer_ids)
        if fault in ("off_by_one_up", "off_by_one_down"):
            ids[:-1] = [each + (1 if fault.endswith("up") else -1) for each in ids[:-1]]
        elif fault == "last_is_one_before":
            ids[-1] = last - 1
        elif fault == "swapped":
            ids[0], ids[1] = ids[1], ids[0]
        elif fault == "last_first":
            ids = [ids[-1], *ids[:-1]]
        chosen = streams[ids].transpose(1, 0, 2).copy()
        if fault == "normalised":
            import torch

            with torch.no_grad():
                chosen[:, -1] = self._model.model.norm(torch.from_numpy(chosen[:, -1])).numpy()
        elif fault == "late":
            chosen = np.concatenate([chosen[:1], chosen[:-1]])
        states = _words(chosen)
        before, self._before = self._before, states
        if fault == "stale":
            # The first request has no other one before it: take its own states backwards.
            other = states[::-1] if before is None else before
            rows = np.resize(np.arange(len(other)), len(states))
            states = np.ascontiguousarray(other[rows])
        return states, _prompt_logprobs(token_ids, logits)


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _run(model: Any, token_ids: Sequence[int]) -> tuple[NDArray[np.float32], Any]:
    import torch

    seen: list[Any] = []
    hooks = [
        each.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        for each in (*model.model.layers, model.model.norm)
    ]
    with torch.no_grad():
        logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)[:, 0].numpy(), logits


def _words(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    import torch

    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _prompt_logprobs(token_ids: Sequence[int], logits: Any) -> list[Any]:
    scores = logits.log_softmax(-1)
    found: list[Any] = [None]
    for position, token in enumerate(token_ids[1:]):
        row = scores[position]
        rank = int((row > row[token]).sum()) + 1
        at = {str(token): {"logprob": float(row[token]), "rank": rank, "decoded_token": "x"}}
        best = int(row.argmax())
        at.setdefault(str(best), {"logprob": float(row[best]), "rank": 1, "decoded_token": "x"})
        found.append(at)
    return found
