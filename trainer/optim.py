"""Optimizer and learning rate of a run. The rate is a pure function of the step, so that resuming
needs no schedule state."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from draftmill.trainer.settings import TrainSettings

# As in PyTorch's OneCycleLR (Smith and Topin, "Super-Convergence", arXiv 1708.07120).
_ONE_CYCLE_START = 1 / 25
_ONE_CYCLE_END = 1 / 250_000


def lr_at(step: int, steps: int, settings: TrainSettings) -> float:
    """The learning rate of step `step` (from 0) of a run of `steps`."""
    rising = settings.warmup * steps
    if step < rising:
        part = (step + 1) / math.ceil(rising)
        if settings.schedule == "one-cycle":
            return settings.lr * _cosine(_ONE_CYCLE_START, 1.0, part)
        return settings.lr * part
    left = steps - math.ceil(rising)
    part = (step - math.ceil(rising) + 1) / left if left > 0 else 1.0
    shape = {
        "one-cycle": lambda: _cosine(1.0, _ONE_CYCLE_END, part),
        "cosine": lambda: _cosine(1.0, 0.0, part),
        "linear": lambda: 1.0 - part,
        "constant": lambda: 1.0,
    }
    return settings.lr * shape[settings.schedule]()


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def make_optimizer(model: torch.nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW over what is trained; norms are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, settings.beta2))


def apply_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr: float, clip_norm: float
) -> Tensor:
    """One optimizer step with the gradients that are there; returns their norm before clipping."""
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, clip_norm or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
