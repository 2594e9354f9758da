"""The training loop: steps, validation, checkpoints, and going on where a run was killed.

What is trained on and for how long was planned before (`plan`), how a step runs on one or several
devices is `engine`'s, the run's folder is `train`'s. A step consumes `rows_per_step` packed rows
over all devices. Only consumed rows count: a checkpoint says which row comes next, whatever the
loader had read ahead.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from draftmill.manifests.errors import DraftmillError
from draftmill.trainer import checkpoint
from draftmill.trainer.checkpoint import Position, Ties
from draftmill.trainer.devices import Group
from draftmill.trainer.drafts.model import DraftModel, Forward, save_draft
from draftmill.trainer.engine import Engine
from draftmill.trainer.interrupt import Interrupted
from draftmill.trainer.loading import data
from draftmill.trainer.loading.data import Cursor, Row
from draftmill.trainer.loading.groups import StatesShape
from draftmill.trainer.loading.loader import RowLoader
from draftmill.trainer.loading.plan import Plan
from draftmill.trainer.loading.reading import SampleReader
from draftmill.trainer.loading.rows import Batch
from draftmill.trainer.optim import lr_at
from draftmill.trainer.run_folder import LOG_FILE, TENSORBOARD
from draftmill.trainer.runlog import RunLog
from draftmill.trainer.settings import OnNote, TrainSettings
from draftmill.trainer.validate import Averages, shares, validate


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


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """What a step consumes over all devices: packed places, samples, and where the next begins."""

    tokens: int
    sample_ids: tuple[int, ...]
    after: Cursor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A step that was queued on the device and that nobody has looked at yet."""

    step: int
    lr: float
    planned: _Planned
    results: list[Forward]
    norm: Tensor


class Loop:
    """A model on its way through a plan; starts where the newest checkpoint of `output` stands.

    With several processes each has one of these; the leading one writes.
    """

    def __init__(
        self,
        model: DraftModel,
        plan: Plan,
        settings: TrainSettings,
        *,
        reader: SampleReader,
        shape: StatesShape,
        output: Path,
        ties: Ties,
        group: Group | None = None,
        note: OnNote = lambda _: None,
    ) -> None:
        self.plan, self.settings, self.output = plan, settings, output
        self.group = group or Group()
        self.engine = Engine(model, settings, self.group)
        self.position = Position()
        self.loss: float | None = None
        self._reader, self._shape = reader, shape
        self._every = settings.checkpoint_every or max(1, math.ceil(plan.steps / 10))
        self._unsettled: list[_Step] = []
        self._note, self._ties = note, ties
        check = self.engine.check
        found = self.group.in_turn(lambda: checkpoint.latest(output, check, note, ties=ties))
        if found is not None:
            self.position, tensors = found
            self.engine.restore(tensors)
        self.log: RunLog | None = None
        if self.group.leads:
            self.log = RunLog(
                output / LOG_FILE,
                after_step=self.position.step,
                tensorboard=output / TENSORBOARD if settings.tensorboard else None,
            )

    @property
    def finished(self) -> bool:
        """Whether the plan is done, the last validation included."""
        return self.position.step >= self.plan.steps and not self.position.owes_validation

    def run(self, stop: Callable[[], bool], on_progress: OnTrainProgress | None = None) -> bool:
        """Train to the end of the plan and put the draft in place; True when `stop` came first.

        Either way a checkpoint holds all that was done. Progress is told after every step on a CPU,
        and on a GPU, which must not be waited for too often, after those that are logged.
        """
        clock = time.monotonic() - self.position.seconds
        already, since = self.position.tokens, time.monotonic()
        interrupted = self.position.owes_validation and not self._make_up(stop)
        saved = self.position.step
        planned: deque[_Planned] = deque()
        # A CPU trains in long calls that leave the interpreter to threads. A GPU is asked for so
        # much in a second that whoever decodes beside it must do so elsewhere.
        loader = self.loader(self.plan.train, stop, processes=self.group.on_gpu)
        with closing(loader.batches(self._my_rows(planned))) as batches:
            while self.position.step < self.plan.steps and not interrupted:
                interrupted = not self._step(batches, planned)
                self.position = replace(self.position, seconds=time.monotonic() - clock)
                # Everybody asks, so that nobody stops alone.
                asked = self.group.any(stop())
                interrupted = interrupted or (asked and self.position.step < self.plan.steps)
                if not (interrupted or self._looked_at()):
                    continue
                done = self._settle()
                due = self._due() and self.position.step > saved
                if due:
                    interrupted = not self._validate(stop) or interrupted
                if (due or interrupted) and self.position.step > saved:
                    self._save()
                    saved = self.position.step
                if done is not None and on_progress is not None and self.group.leads:
                    speed = (self.position.tokens - already) / (time.monotonic() - since)
                    on_progress(self._progress(done, speed))
        self._end(interrupted)
        return interrupted

    def _make_up(self, stop: Callable[[], bool]) -> bool:
        """Do the validation that is owed; False when `stop` came before its end, again."""
        done = self._validate(stop)
        if done:
            self._save()
        return done

    def _my_rows(self, planned: deque[_Planned]) -> Iterator[Row]:
        """This process's rows from the position on; notes in `planned` what all of them consume."""
        rows = data.training_rows(
            self.plan.train,
            seed=self.settings.seed,
            room=self.settings.max_seq_len,
            start=self.position.cursor,
            since=self.plan.since,
        )
        for batch in data.step_rows(rows, self.settings.rows_per_step):
            members = [member for row in batch for member in row.members]
            planned.append(
                _Planned(
                    tokens=int(self.plan.train.tokens[members].sum()) - len(members),
                    sample_ids=tuple(self.plan.train.id[members].tolist()),
                    after=batch[-1].after,
                )
            )
            yield from data.share(batch, self.group.rank, self.group.size)

    def _step(self, batches: Iterator[Batch], planned: deque[_Planned]) -> bool:
        """Queue the next step; False, and nothing is done, when asked to stop waiting for it."""
        each = self.settings.rows_per_step // self.group.size
        try:
            mine = [next(batches) for _ in range(each)]
        except Interrupted:
            return False
        lr = lr_at(self.position.step, self.plan.steps, self.settings)
        results, norm = self.engine.step(mine, lr)
        used = planned.popleft()
        step = self.position.step + 1
        self._unsettled.append(_Step(step=step, lr=lr, planned=used, results=results, norm=norm))
        self.position = replace(
            self.position, step=step, cursor=used.after, tokens=self.position.tokens + used.tokens
        )
        return True

    def _due(self) -> bool:
        """Whether this step ends with a validation and a checkpoint."""
        return self.position.step % self._every == 0 or self.position.step == self.plan.steps

    def _logged(self) -> bool:
        step = self.position.step
        return step % self.settings.log_every == 0 or step in (1, self.plan.steps)

    def _looked_at(self) -> bool:
        return not self.group.on_gpu or self._logged() or self._due()

    def _settle(self) -> _Step | None:
        """Wait for the steps that were queued and look at them; returns the last.

        Raises DraftmillError, in every process, where a loss was no number.
        """
        steps, self._unsettled = self._unsettled, []
        losses = [(float(result.loss.detach()), step) for step in steps for result in step.results]
        bad = [(loss, step) for loss, step in losses if not math.isfinite(loss)]
        if self.group.any(bool(bad)):
            if not bad:
                raise DraftmillError("The loss of another process is no number; it says where.")
            loss, step = bad[0]
            raise DraftmillError(
                f"The loss is {loss} at step {step.step}, samples "
                f"{list(step.planned.sample_ids)}. Lower lr, or check these samples with "
                "`draftmill verify`; the last checkpoint is whole."
            )
        if not steps:
            return None
        last = steps[-1]
        averages = Averages()
        for result in last.results:
            averages.add(result)
        means = averages.means(self.group)
        self.loss = means["loss"]
        if self._logged() and self.log is not None:
            self.log.write(
                "train",
                last.step,
                lr=last.lr,
                grad_norm=float(last.norm),
                tokens=last.planned.tokens,
                **means,
            )
        return last

    def loader(
        self, samples: data.Samples, stop: Callable[[], bool], *, processes: bool = False
    ) -> RowLoader:
        """What brings rows of these samples to this process's device."""
        return RowLoader(
            self._reader,
            samples,
            self._shape,
            workers=self.settings.decode_workers,
            processes=processes,
            prefetch_bytes=self.settings.prefetch_mb << 20,
            # A compiled model wants one shape; a CPU wants no empty places.
            pad_to=self.settings.max_seq_len if self.group.on_gpu else 0,
            device=self.group.device,
            # One of several processes cannot save alone; a second signal ends it.
            stop=stop if self.group.size == 1 else _never,
        )

    def _validate(self, stop: Callable[[], bool]) -> bool:
        """Validate, if there is anything to do it with; False when `stop` came before the end."""
        rows = data.validation_rows(
            self.plan.validation,
            room=self.settings.max_seq_len,
            limit=self.settings.validation_rows,
        )
        if not rows:
            return True
        mine, count = shares(rows, self.group)
        model = self.engine.model
        model.eval()
        with closing(self.loader(self.plan.validation, stop).batches(mine)) as batches:
            try:
                result = validate(self.engine.forward, batches, self.group, count, stop)
            except Interrupted:
                result = None
        model.train()
        if result is None:
            self.position = replace(self.position, owes_validation=True)
            return False
        self.position = self.position.validated(result)
        if self.log is not None:
            self.log.write("validation", self.position.step, **result)
        return True

    def _save(self) -> None:
        tensors = self.engine.state()
        weights = self.engine.draft_weights()
        self.group.in_turn(lambda: self._write(tensors, weights) if self.group.leads else None)

    def _write(self, tensors: dict[str, Any], weights: dict[str, Tensor]) -> None:
        form = self.settings.checkpoint_format
        checkpoint.save(
            self.output,
            self.position,
            tensors,
            lambda folder: save_draft(self.engine.model, folder, form, weights),
            self._ties,
        )
        checkpoint.prune(self.output, self.settings.keep_checkpoints, self.position.best_step)

    def _end(self, interrupted: bool) -> None:
        if not interrupted:
            # What was damaged since it was written is written again: the weights are at hand.
            whole = checkpoint.draft_is_whole(self.output, self.position.step)
            if self.group.any(self.group.leads and not whole):
                self._save()
            if self.group.leads:
                self._publish()
        if self.log is not None:
            self.log.write("end", self.position.step, interrupted=interrupted)

    def _publish(self) -> None:
        best = self.position.best_step or self.position.step
        if not checkpoint.draft_is_whole(self.output, best):
            if checkpoint.has_draft(self.output):
                return  # a finished run whose checkpoints were removed
            self._note(f"the draft of step {best:,}, the best, is gone; the newest stands for it")
            best = self.position.step
        checkpoint.publish(self.output, best)

    def _progress(self, done: _Step, speed: float) -> TrainProgress:
        return TrainProgress(
            step=self.position.step,
            steps=self.plan.steps,
            epoch=done.planned.after.epoch,
            loss=math.nan if self.loss is None else self.loss,
            lr=done.lr,
            tokens=self.position.tokens,
            tokens_per_s=speed,
            sample_ids=done.planned.sample_ids,
            validation=self.position.validation,
        )
