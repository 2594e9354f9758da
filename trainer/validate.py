"""Validation of a draft model: loss, accuracies, and the acceptance that a server would see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.trainer.acceptance import Acceptance, walk
from draftmill.trainer.devices import Group
from draftmill.trainer.drafts.model import Forward
from draftmill.trainer.loading.data import Row
from draftmill.trainer.loading.rows import Batch


class Averages:
    """Adds up `NAME_sum` / `NAME_total` pairs over packed rows. Waits for no device until asked."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Tensor]] = []

    def add(self, forward: Forward, *, counts: bool = True) -> None:
        """Take in what one row gave; one that does not count only says which pairs there are."""
        sums = {name: value.detach() for name, value in forward.sums.items()}
        self._rows.append(
            sums if counts else {name: torch.zeros_like(value) for name, value in sums.items()}
        )

    def means(self, group: Group) -> dict[str, float]:
        """The mean of every pair over the rows of all processes, by name."""
        sums: dict[str, float] = {}
        for row in self._rows:
            for name, value in row.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        sums = group.sum(sums)
        names = [name.removesuffix("_sum") for name in sums if name.endswith("_sum")]
        return {
            name: sums[f"{name}_sum"] / total if (total := sums[f"{name}_total"]) else 0.0
            for name in names
        }


def shares(rows: Sequence[Row], group: Group) -> tuple[list[Row], int]:
    """This process's rows of a validation, and how many of them count.

    Every process runs equally many, as shards of a model need it: the last may be a row again.
    """
    each = -(-len(rows) // group.size)
    mine = list(rows[group.rank :: group.size])
    return mine + list(rows[: each - len(mine)]), len(mine)


def validate(
    run: Callable[[Batch], Forward],
    batches: Iterable[Batch],
    group: Group,
    count: int,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Loss, full_acc_i and cond_acc_i over the first `count` batches, and `accepted_per_step`.

    The accuracies follow speculators: against the target's own choice within the draft vocabulary,
    averaged over all places. `accepted_per_step` is stricter: what greedy speculative decoding
    would have accepted along the completions as they are. All processes of the group take part,
    each with its own batches, and all get the result over all; none where `stop` of one of them
    came in between.
    """
    averages = Averages()
    acceptance = Acceptance()
    with torch.no_grad():
        for number, batch in enumerate(batches):
            # Everybody asks, so that nobody stops alone.
            if group.any(stop()):
                return None
            forward = run(batch)
            averages.add(forward, counts=number < count)
            found = row_acceptance(batch, forward.drafted.cpu().numpy())
            acceptance = acceptance + (found if number < count else found - found)
    result = averages.means(group)
    acceptance = _over_all(acceptance, group)
    if acceptance.drafts:
        result["accepted_per_step"] = acceptance.accepted_per_step
        for position, part in enumerate(acceptance.accepted_by_position):
            result[f"accepted_{position}"] = part
    return result


def _over_all(mine: Acceptance, group: Group) -> Acceptance:
    counts = {"drafts": mine.drafts, "draft_tokens": mine.draft_tokens, "accepted": mine.accepted}
    places = {f"at_{position}": count for position, count in enumerate(mine.by_position)}
    total = {name: int(value) for name, value in group.sum({**counts, **places}).items()}
    by_position = tuple(total.pop(name) for name in places)
    return Acceptance(by_position=by_position, **total)


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
