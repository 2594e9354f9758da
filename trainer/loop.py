"""The training loop: steps, validation, checkpoints, and going on where a run was killed.

What is trained on and for how long was planned before (`plan`); the run's folder is `train`'s. A
step consumes `rows_per_step` packed rows. Only consumed rows count: a checkpoint says which row
comes next, whatever the loader had read ahead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftmill.manifests import files
from draftmill.manifests.errors import ConfigError, DraftmillError
from draftmill.trainer import checkpoint, data
from draftmill.trainer.checkpoint import Position
from draftmill.trainer.draft_forms import CONFIG_FILE
from draftmill.trainer.draft_model import (
    DraftModel,
    Forward,
    forward,
    restore_trained_state,
    save_draft,
    trained_state,
)
from draftmill.trainer.loader import RowLoader
from draftmill.trainer.optim import apply_step, lr_at, make_optimizer
from draftmill.trainer.plan import Plan
from draftmill.trainer.rows import Batch, SampleReader, StatesShape
from draftmill.trainer.runlog import RunLog
from draftmill.trainer.settings import TrainSettings
from draftmill.trainer.validate import Averages, validate
from draftmill.trainer.weight_files import WEIGHTS_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress:
    """A run after one of its steps. `validation` is the latest one, empty before the first."""

    step: int
    steps: int
    epoch: int
    loss: float
    lr: float
    tokens: int
    tokens_per_s: float
    sample_ids: tuple[int, ...]
    validation: dict[str, float] = field(default_factory=dict)


OnTrainProgress = Callable[[TrainProgress], None]


class Loop:
    """A model on its way through a plan; starts where the newest checkpoint of `output` stands."""

    def __init__(
        self,
        model: DraftModel,
        plan: Plan,
        settings: TrainSettings,
        *,
        reader: SampleReader,
        shape: StatesShape,
        output: Path,
    ) -> None:
        self.plan, self.settings, self.output = plan, settings, output
        self.device = device_of(settings)
        self.model = model.to(self.device)
        self.optimizer = make_optimizer(self.model, settings)
        self.position = Position()
        self.loss: float | None = None
        self._reader, self._shape = reader, shape
        self._every = settings.checkpoint_every or max(1, math.ceil(plan.steps / 10))
        found = checkpoint.latest(output)
        if found is not None:
            self.position, tensors = found
            restore_trained_state(self.model, tensors["weights"])
            self.optimizer.load_state_dict(tensors["optimizer"])
            torch.set_rng_state(tensors["rng"])
        self.log = RunLog(
            output / "log.jsonl",
            after_step=self.position.step,
            tensorboard=output / "tensorboard" if settings.tensorboard else None,
        )

    def run(self, stop: Callable[[], bool], on_progress: OnTrainProgress | None = None) -> bool:
        """Train to the end of the plan and put the draft in place; True when `stop` came first.

        Either way a checkpoint holds all that was done.
        """
        clock = time.monotonic() - self.position.seconds
        already, since = self.position.tokens, time.monotonic()
        rows = data.training_rows(
            self.plan.train,
            seed=self.settings.seed,
            room=self.settings.max_seq_len,
            start=self.position.cursor,
        )
        interrupted = False
        with closing(self._loader(self.plan.train).batches(rows)) as batches:
            while self.position.step < self.plan.steps and not interrupted:
                lr = lr_at(self.position.step, self.plan.steps, self.settings)
                used = [next(batches) for _ in range(self.settings.rows_per_step)]
                self._step(used, lr)
                self.position = replace(self.position, seconds=time.monotonic() - clock)
                interrupted = self.position.step < self.plan.steps and stop()
                if self._due():
                    self._validate()
                if self._due() or interrupted:
                    self._save()
                if on_progress is not None:
                    speed = (self.position.tokens - already) / (time.monotonic() - since)
                    on_progress(self._progress(used, lr, speed))
        if not interrupted:
            best = self.position.best_step or self.position.step
            checkpoint.publish(self.output, best, (WEIGHTS_FILE, CONFIG_FILE))
        self.log.write("end", self.position.step, interrupted=interrupted)
        return interrupted

    def _due(self) -> bool:
        """Whether this step ends with a validation and a checkpoint."""
        return self.position.step % self._every == 0 or self.position.step == self.plan.steps

    def _step(self, batches: list[Batch], lr: float) -> None:
        averages = Averages()
        for batch in batches:
            result = self._forward(batch)
            loss = float(result.loss.detach())
            if not math.isfinite(loss):
                raise DraftmillError(
                    f"The loss is {loss} at step {self.position.step + 1}, samples "
                    f"{list(batch.sample_ids)}. Lower lr, or check these samples with "
                    "`draftmill verify`; the last checkpoint is whole."
                )
            (result.loss / len(batches)).backward()
            averages.add(result)
        norm = apply_step(self.model, self.optimizer, lr, self.settings.clip_norm)
        means = averages.means()
        self.loss = means["loss"]
        tokens = sum(sum(batch.lengths) for batch in batches)
        step = self.position.step + 1
        self.position = replace(
            self.position,
            step=step,
            cursor=batches[-1].row.after,
            tokens=self.position.tokens + tokens,
        )
        if step % self.settings.log_every == 0 or step in (1, self.plan.steps):
            self.log.write("train", step, lr=lr, grad_norm=norm, tokens=tokens, **means)

    def _forward(self, batch: Batch) -> Forward:
        tensors = {
            name: tensor.to(self.device, non_blocking=True)
            for name, tensor in batch.tensors.items()
        }
        for name in ("hidden_states", "verifier_last_hidden_states"):
            tensors[name] = tensors[name].float()
        with self._arithmetic():
            return forward(self.model, tensors, self.settings)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        """Weights stay float32; on a GPU the large products are made in bfloat16."""
        wanted = self.settings.precision
        if wanted == "bf16" or (wanted == "auto" and self.device == "cuda"):
            return torch.autocast(self.device, dtype=torch.bfloat16)
        return nullcontext()

    def _loader(self, samples: data.Samples) -> RowLoader:
        return RowLoader(
            self._reader,
            samples,
            self._shape,
            threads=self.settings.decode_threads,
            prefetch_bytes=self.settings.prefetch_mb << 20,
            # A compiled model wants one shape; a CPU wants no empty places.
            pad_to=self.settings.max_seq_len if self.device == "cuda" else 0,
        )

    def _validate(self) -> None:
        rows = data.validation_rows(
            self.plan.validation,
            room=self.settings.max_seq_len,
            limit=self.settings.validation_rows,
        )
        if not rows:
            return
        self.model.eval()
        with closing(self._loader(self.plan.validation).batches(rows)) as batches:
            result = validate(self._forward, batches)
        self.model.train()
        self.position = self.position.validated(result)
        self.log.write("validation", self.position.step, **result)

    def _save(self) -> None:
        tensors = {
            "weights": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        form = self.settings.checkpoint_format
        with files.disk_full_is_budget(self.output):
            checkpoint.save(
                self.output,
                self.position,
                tensors,
                lambda folder: save_draft(self.model, folder, form),
            )
        checkpoint.prune(self.output, self.settings.keep_checkpoints, self.position.best_step)

    def _progress(self, used: list[Batch], lr: float, speed: float) -> TrainProgress:
        return TrainProgress(
            step=self.position.step,
            steps=self.plan.steps,
            epoch=used[-1].row.cursor.epoch,
            loss=math.nan if self.loss is None else self.loss,
            lr=lr,
            tokens=self.position.tokens,
            tokens_per_s=speed,
            sample_ids=tuple(sample for batch in used for sample in batch.sample_ids),
            validation=self.position.validation,
        )


def device_of(settings: TrainSettings) -> str:
    """cpu or cuda. Raises ConfigError when a GPU is asked for and there is none."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU. Use auto or cpu.")
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return settings.device
