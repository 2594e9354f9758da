"""Validation of a draft model: loss, accuracies, and the acceptance that a server would see."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from draftmill.trainer.acceptance import Acceptance, walk
from draftmill.trainer.draft_model import Forward
from draftmill.trainer.rows import Batch


class Averages:
    """Adds up `NAME_sum` / `NAME_total` pairs over packed rows."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, forward: Forward) -> None:
        """Take in what one row gave."""
        for name, value in forward.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def means(self) -> dict[str, float]:
        """The mean of every pair, by name."""
        return {
            name.removesuffix("_sum"): value / total if (total := self._total(name)) else 0.0
            for name, value in self._sums.items()
            if name.endswith("_sum")
        }

    def _total(self, name: str) -> float:
        return self._sums[name.removesuffix("_sum") + "_total"]


def validate(run: Callable[[Batch], Forward], batches: Iterable[Batch]) -> dict[str, float]:
    """Loss, full_acc_i and cond_acc_i over `batches`, and `accepted_per_step`.

    The accuracies follow speculators: against the target's own choice within the draft vocabulary,
    averaged over all places. `accepted_per_step` is stricter: what greedy speculative decoding
    would have accepted along the completions as they are.
    """
    averages = Averages()
    acceptance = Acceptance()
    with torch.no_grad():
        for batch in batches:
            forward = run(batch)
            averages.add(forward)
            acceptance = acceptance + row_acceptance(batch, forward.drafted.cpu().numpy())
    result = averages.means()
    if acceptance.drafts:
        result["accepted_per_step"] = acceptance.accepted_per_step
        for position, part in enumerate(acceptance.accepted_by_position):
            result[f"accepted_{position}"] = part
    return result


def row_acceptance(batch: Batch, drafted: NDArray[np.int64]) -> Acceptance:
    """Acceptance over the samples of one packed row; `drafted` are target token ids [K, T]."""
    input_ids = batch.tensors["input_ids"][0].cpu().numpy()
    loss_mask = batch.tensors["loss_mask"][0].cpu().numpy()
    result = Acceptance()
    start = 0
    for length in batch.lengths:
        part = slice(start, start + length)
        correct = np.zeros((len(drafted), length), np.bool_)
        for token, guesses in enumerate(drafted[:, part]):
            # Place i holds token i + 1, so its draft token k is meant to be place i + 1 + k.
            really = input_ids[part][token + 1 :]
            correct[token, : len(really)] = guesses[: len(really)] == really
        result = result + walk(correct, first=int(loss_mask[part].argmax()))
        start += length
    return result
