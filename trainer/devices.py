"""The processes of one run, one a device: who leads, and how they agree.

Started by `torchrun`, each process has a GPU (or shares the CPU's cores); started plainly, a run is
one process and everything here does nothing. Only small facts pass through here, over gloo: sums,
flags and errors. Gradients are the engine's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from draftmill.manifests.errors import ConfigError, DraftmillError
from draftmill.trainer.settings import TrainSettings

_T = TypeVar("_T")
# The leader may validate, or write a checkpoint to a slow disk, while the others wait.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """This process among those of its run. `device` is cpu or cuda:N."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        """Whether this process has a GPU."""
        return self.device != "cpu"

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.sum({"": float(flag)})[""])

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sum over all processes, by name; all have the same names."""
        if self.size == 1:
            return dict(values)
        found = torch.tensor([values[name] for name in values], dtype=torch.float64)
        dist.all_reduce(found)
        return dict(zip(values, found.tolist(), strict=True))

    def in_turn(self, action: Callable[[], _T]) -> _T:
        """Run `action` in the leading process, then in all others; its error is everybody's."""
        if self.size == 1:
            return action()
        fault: list[DraftmillError | None] = [None]
        result: list[_T] = []
        if self.leads:
            try:
                result.append(action())
            except DraftmillError as error:
                fault[0] = error
        told = [None if fault[0] is None else str(fault[0])]
        dist.broadcast_object_list(told, src=0)
        if fault[0] is not None:
            raise fault[0]
        if told[0] is not None:
            raise DraftmillError(told[0])
        return result[0] if self.leads else action()


@contextmanager
def joined(settings: TrainSettings) -> Iterator[Group]:
    """The group of this run: that of `torchrun`, or this process alone.

    Raises ConfigError when a GPU is wanted and missing, or when the processes cannot share the rows
    of a step.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(settings, local)
    if settings.rows_per_step % size:
        raise ConfigError(
            f"rows_per_step is {settings.rows_per_step}, which {size} processes cannot share. "
            f"Make it a multiple of {size}."
        )
    if device != "cpu":
        torch.cuda.set_device(device)
    if size == 1 and not settings.fsdp:
        yield Group(device=device)
        return
    if size == 1:
        raise ConfigError(
            "fsdp shares a model between processes, and this run has one. Start it with "
            "`torchrun --nproc-per-node N --no-python draftmill train …`, or leave it out."
        )
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        timeout=_PATIENCE,
        device_id=None if device == "cpu" else torch.device(device),
    )
    try:
        yield Group(rank=rank, size=size, device=device)
    finally:
        dist.destroy_process_group()


def _device(settings: TrainSettings, local: int) -> str:
    if settings.device == "cpu" or not (found := torch.cuda.is_available()):
        if settings.device == "cuda":
            raise ConfigError("device is cuda, but torch sees no GPU. Use auto or cpu.")
        return "cpu"
    if found and local >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local} of this machine has no GPU: torch sees {torch.cuda.device_count()}. "
            "Start at most one process a GPU."
        )
    return f"cuda:{local}"
