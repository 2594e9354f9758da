"""The draft vocabulary inside a checkpoint: how `d2t` and `t2d` are meant, and moving its rows.

Which tokens a vocabulary holds is chosen in `vocab`. Here, draft ids always follow the order of
target ids, as speculators and vLLM have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target.target import TargetModel

HEAD = "lm_head.weight"
# Keeps the fit of new rows defined where kept rows say nothing.
_RIDGE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Remap:
    """What became of a checkpoint's head under another vocabulary; all are counts of rows."""

    kept: int
    dropped: int
    new: int


def canonical_vocab(weights: dict[str, Tensor], vocab_size: int, where: Path) -> dict[str, Tensor]:
    """The weights with `d2t` as offsets, `t2d` as a mask, and rows of the head in target order.

    Trainers store `d2t` as offsets (target id = draft id + offset); where only absolute target
    ids make sense, they are taken as such. A mapping of all tokens to themselves is left out.
    Raises ConfigError for a mapping that means nothing.
    """
    d2t, t2d, head = (weights.get(name) for name in ("d2t", "t2d", HEAD))
    if head is not None and (head.ndim != 2 or not len(head)):
        raise ConfigError(f"{where}: {HEAD} has shape {list(head.shape)}, which is no head")
    if head is None or (d2t is None and t2d is None):
        return weights
    ids = _target_ids(d2t, t2d, len(head), vocab_size, where)
    order = torch.argsort(ids)
    rest = {name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d")}
    if not torch.equal(order, torch.arange(len(ids))):
        rest[HEAD] = head[order]
    return {**rest, **mapping_tensors(ids[order].numpy(), vocab_size)}


def mapping_tensors(target_ids: NDArray[np.int64], vocab_size: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` of rising target ids; nothing for the whole vocabulary."""
    if len(target_ids) == vocab_size:
        return {}
    ids = torch.from_numpy(target_ids)
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def target_ids_of(weights: dict[str, Tensor], vocab_size: int) -> NDArray[np.int64]:
    """The target's id of each row of the head of canonical weights, rising."""
    if "t2d" not in weights:
        return np.arange(vocab_size, dtype=np.int64)
    ids: NDArray[np.int64] = weights["t2d"].nonzero().flatten().numpy()
    return ids


def _target_ids(
    d2t: Tensor | None, t2d: Tensor | None, size: int, vocab_size: int, where: Path
) -> Tensor:
    mask = None if t2d is None else t2d.flatten() != 0
    if mask is not None and len(mask) != vocab_size:
        raise ConfigError(
            f"{where}: t2d has shape {list(mask.shape)}, expected {[vocab_size]} (vocab_size)"
        )
    listed = None if mask is None else mask.nonzero().flatten()
    if d2t is None:
        assert listed is not None
        candidates = [listed]
    else:
        numbers = d2t.flatten().long()
        candidates = [numbers + torch.arange(len(numbers)), numbers]
    for ids in candidates:
        if len(ids) != size:
            raise ConfigError(
                f"{where}: the draft vocabulary has {len(ids)} tokens, {HEAD} has {size} rows"
            )
        rising = ids.sort().values
        inside = bool(rising[0] >= 0) and bool(rising[-1] < vocab_size)
        if (
            inside
            and bool((rising.diff() > 0).all())
            and (listed is None or torch.equal(rising, listed))
        ):
            return ids
    raise ConfigError(
        f"{where}: d2t is neither offsets nor ids of {size} different tokens of {vocab_size}"
        + ("" if listed is None else f" that are those of t2d ({len(listed)} tokens)")
    )


def remap_vocab(
    weights: dict[str, Tensor], new_ids: NDArray[np.int64], target: TargetModel
) -> tuple[dict[str, Tensor], Remap]:
    """Canonical weights with the vocabulary `new_ids` (rising target ids): rows follow their token.

    A token that the head has no row for gets the target's own row, moved by the linear map that
    takes the target's rows of all known tokens to the head's (ridge regression): what the draft
    would call a token that the target describes so. Without training that is the target's row.
    """
    head = weights[HEAD]
    old_ids = target_ids_of(weights, target.vocab_size)
    row_of = np.full(target.vocab_size, -1, np.int64)
    row_of[old_ids] = np.arange(len(old_ids))
    rows = row_of[new_ids]
    known = torch.from_numpy(rows >= 0)
    moved = head.new_empty(len(new_ids), head.shape[1])
    moved[known] = head[torch.from_numpy(rows[rows >= 0])]
    missing = new_ids[rows < 0]
    if len(missing):
        like_old = as_tensor(target.lm_head(old_ids)).float()
        change = _fit(like_old, head.float() - like_old)
        like_new = as_tensor(target.lm_head(missing)).float()
        moved[~known] = (like_new + like_new @ change).to(head.dtype)
    rest = {n: t for n, t in weights.items() if n not in ("d2t", "t2d", HEAD)}
    kept = int(known.sum())
    return (
        {**rest, HEAD: moved, **mapping_tensors(new_ids, target.vocab_size)},
        Remap(kept=kept, dropped=len(old_ids) - kept, new=len(missing)),
    )


def _fit(given: Tensor, wanted: Tensor) -> Tensor:
    """The map [H, H] for which `given` @ map is nearest to `wanted`, both [V, H]."""
    gram = given.T @ given
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny)
    found: Tensor = torch.linalg.solve(gram, given.T @ wanted)
    return found


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """numpy to torch; uint16 are bf16 bit patterns."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
