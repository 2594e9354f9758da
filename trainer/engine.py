"""Runs and changes one model on one or several devices: forward, optimizer step, whole state.

The plain model, DDP and FSDP2 behind one face, so that the loop, its checkpoints and its figures
are the same for all. Which rows and when is the loop's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from draftmill.manifests.errors import DamagedError
from draftmill.trainer.devices import Group
from draftmill.trainer.drafts.model import DraftModel, Forward, forward, trained_state
from draftmill.trainer.loading.rows import Batch
from draftmill.trainer.optim import apply_step, make_optimizer
from draftmill.trainer.settings import TrainSettings


class Engine:
    """A draft model on its device, with its optimizer.

    With several processes the weights are copies that DDP keeps alike or, with `fsdp`, shards of
    FSDP2. The state that goes in and out is whole and float32 either way, so a run may go on with
    other processes than it began with.
    """

    def __init__(self, model: DraftModel, settings: TrainSettings, group: Group) -> None:
        self.settings, self.group = settings, group
        self.model = model.to(group.device)
        self._ddp: DistributedDataParallel | None = None
        if settings.fsdp:
            _shard(self.model, group)
        elif group.size > 1:
            # Buffers are the vocabulary and the rotary table, which nobody changes.
            self._ddp = DistributedDataParallel(self.model, broadcast_buffers=False)
        self.optimizer = make_optimizer(self.model, settings)

    def forward(self, batch: Batch) -> Forward:
        """Run one packed row, which may still be on the CPU."""
        tensors = {
            name: tensor.to(self.group.device, non_blocking=True)
            for name, tensor in batch.tensors.items()
        }
        for name in ("hidden_states", "verifier_last_hidden_states"):
            tensors[name] = tensors[name].float()
        run = self._ddp if self._ddp is not None and torch.is_grad_enabled() else self.model
        with self._arithmetic():
            return forward(self.model, tensors, self.settings, run=run)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        """Weights stay float32; on a GPU the large products are made in bfloat16."""
        wanted = self.settings.precision
        if wanted == "bf16" or (wanted == "auto" and self.group.on_gpu):
            return torch.autocast("cuda" if self.group.on_gpu else "cpu", dtype=torch.bfloat16)
        return nullcontext()

    def step(self, batches: Sequence[Batch], lr: float) -> tuple[list[Forward], Tensor]:
        """One optimizer step on this process's rows of a global batch.

        The gradient is the mean over all rows of all processes. Returns what each row gave, and the
        gradient's norm before clipping; nothing waits for the device.
        """
        results = []
        for number, batch in enumerate(batches, 1):
            with self._gathering(number == len(batches)):
                result = self.forward(batch)
                (result.loss / len(batches)).backward()
            results.append(result)
        norm = apply_step(self.model, self.optimizer, lr, self.settings.clip_norm)
        return results, norm

    def _gathering(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged once a step, after its last row."""
        if self.settings.fsdp:
            self.model.set_requires_gradient_sync(last)
        elif self._ddp is not None and not last:
            return self._ddp.no_sync()
        return nullcontext()

    # -- state; every process calls these, at the same time --------------------------------------

    def state(self) -> dict[str, Any]:
        """Weights, optimizer and random state, whole and on the CPU."""
        self._reshard()
        return {
            "weights": _whole(trained_state(self.model)),
            # What its settings are, the run's settings say.
            "optimizer": _whole(self.optimizer.state_dict()["state"]),
            # Of the leading process. Training draws nothing at random yet (a draft has no dropout).
            "rng": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state() if self.group.on_gpu else None,
        }

    def check(self, state: Any) -> None:
        """Raise DamagedError, saying what, unless `state` gave this for such a model."""
        parts = ("weights", "optimizer", "rng", "rng_cuda")
        if not isinstance(state, dict) or (lacking := [n for n in parts if n not in state]):
            what = ", ".join(lacking) if isinstance(state, dict) else "everything"
            raise DamagedError(f"it lacks {what}")
        weights = {name: tensor.shape for name, tensor in trained_state(self.model).items()}
        _compare("weights", weights, state["weights"])
        moments = {
            f"{number}.{name}": parameter.shape
            for number, parameter in enumerate(self._parameters())
            for name in ("exp_avg", "exp_avg_sq")
        }
        try:
            found = {
                f"{number}.{name}": value
                for number, entries in state["optimizer"].items()
                for name, value in entries.items()
                if name != "step"
            }
            steps = [float(entries["step"]) for entries in state["optimizer"].values()]
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedError(f"its optimizer is none of AdamW ({error!r})") from error
        # A parameter that no loss has reached yet has no moments.
        _compare("optimizer", {n: s for n, s in moments.items() if n in found}, found)
        if len(found) != 2 * len(steps):
            raise DamagedError("its optimizer lacks moments")
        for name in ("rng", "rng_cuda"):
            if not _is_random_state(state[name], absent=name == "rng_cuda"):
                raise DamagedError(f"its {name} is no random state")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave and `check` has looked at."""
        with torch.no_grad():
            for name, tensor in trained_state(self.model).items():
                tensor.copy_(_like(tensor, state["weights"][name]))
        mine = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**mine, "state": self._sharded(state["optimizer"])})
        torch.set_rng_state(state["rng"])
        if self.group.on_gpu and state["rng_cuda"] is not None:
            torch.cuda.set_rng_state(state["rng_cuda"])

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _sharded(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        parameters = self._parameters()
        return {
            number: {
                name: _like(parameters[number], value)
                if value.shape == parameters[number].shape
                else value
                for name, value in entries.items()
            }
            for number, entries in states.items()
        }

    def draft_weights(self) -> dict[str, Tensor]:
        """All tensors of the draft, whole and on the CPU, as `save_draft` writes them."""
        self._reshard()
        whole: dict[str, Tensor] = _whole(self.model.state_dict())
        return whole

    def _reshard(self) -> None:
        """Make parameters shards again: after a forward pass alone, they are borrowed memory."""
        for module in self.model.modules() if self.settings.fsdp else ():
            if isinstance(module, FSDPModule):
                module.reshard()


def _shard(model: DraftModel, group: Group) -> None:
    mesh = init_device_mesh("cuda" if group.on_gpu else "cpu", (group.size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _compare(what: str, wanted: Mapping[str, torch.Size], found: Any) -> None:
    """Raise DamagedError, naming them, for tensors that lack, are too many or of other shapes."""
    if not isinstance(found, dict):
        raise DamagedError(f"its {what} is no table of tensors")
    faults = [f"lacks {name}" for name in wanted.keys() - found.keys()]
    faults += [f"has {name}, which the model has not" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        value = found[name]
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            faults.append(f"has {name} not in float32")
        elif value.shape != wanted[name]:
            faults.append(f"has {name} of shape {list(value.shape)}, not {list(wanted[name])}")
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise DamagedError(f"its {what} {', '.join(sorted(faults)[:3])}{more}")


def _is_random_state(value: Any, *, absent: bool) -> bool:
    if value is None:
        return absent
    size = None if absent else torch.get_rng_state().numel()
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.uint8
        and value.ndim == 1
        and size in (None, value.numel())
    )


def _whole(value: Any) -> Any:
    """The value with every shard gathered and every tensor on the CPU."""
    if isinstance(value, Tensor):
        if not isinstance(value, DTensor):
            return value.detach().cpu()
        # Into memory of its own: what was gathered is a view of something that files cannot hold.
        full = value.full_tensor().detach()
        return torch.empty(full.shape, dtype=full.dtype).copy_(full)
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """The value on the parameter's device, cut as the parameter is."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value
