"""Trains a draft model from a dataset's shards: what the command line calls.

Owns what a run is from its first to its last moment and, once training is done, the model card and
plot beside the draft. What it begins with is `begin`'s, the loop is `loop`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from draftmill.manifests import files
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.target.target import TargetModel, check_target_layer_ids
from draftmill.trainer.begin import Beginning, begin
from draftmill.trainer.devices import joined
from draftmill.trainer.drafts.model import create_draft, save_draft
from draftmill.trainer.drafts.vocab import VocabMapping, make_vocab
from draftmill.trainer.finetune import open_checkpoint
from draftmill.trainer.interrupt import interruptible
from draftmill.trainer.loading.groups import StatesShape
from draftmill.trainer.loop import Loop, OnTrainProgress
from draftmill.trainer.model_card import CARD_FILE, TRAINING_PLOT, describe_data, model_card
from draftmill.trainer.plots import plot_training
from draftmill.trainer.run_folder import LOG_FILE, locked_run
from draftmill.trainer.runlog import RunLog, read_log
from draftmill.trainer.settings import Finetune, OnNote, TrainSettings

_FULL = (
    "What was learnt up to the last checkpoint is safe: once there is room, the same command goes "
    "on from there."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """How a run stands when `train` returns. `tokens` and `seconds` are of the whole run.

    `best_step` and `validation` are of the draft at the top of the run's folder (of the newest
    validation while the run is unfinished); `cut` and `nothing_supervised` count samples; `waste`
    (places left empty) and `coverage` (supervised tokens in the draft vocabulary) are parts of 1.
    """

    output: Path
    step: int
    steps: int
    interrupted: bool
    loss: float | None
    tokens: int
    seconds: float
    samples: int
    validation_samples: int
    cut: int
    nothing_supervised: int
    waste: float
    draft_vocab_size: int
    coverage: float
    best_step: int | None
    validation: dict[str, float]


def train(
    dataset: Path,
    settings: TrainSettings,
    *,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    output: Path,
    finetune: Finetune | None = None,
    grow: bool = False,
    on_progress: OnTrainProgress | None = None,
    note: OnNote = lambda _: None,
) -> TrainReport:
    """Train a draft for `target` on what the dataset holds, or go on with the run in `output`.

    With `finetune` it starts from that checkpoint. A run that goes on keeps to the samples that it
    began with; with `grow` it takes in those added since, from its next epoch on. `note` is told
    what a person should know. Under `torchrun` all processes call this and share the work.

    The first SIGINT or SIGTERM saves a checkpoint and returns with `interrupted` set. After a
    SIGKILL the run goes on from its last checkpoint: the same batches, and on a CPU the same
    losses, as without the interruption. A finished run returns at once.

    Raises SettingsMismatch when `output` holds a run with other settings, DatasetError when there
    is nothing to train on or planned samples are gone, DamagedError when one of them or a file of
    the run cannot be read, ConfigError when target, dataset and checkpoint do not belong together,
    BudgetError when the disk of `output` is full. A run that is refused leaves nothing in `output`.
    """
    check_target_layer_ids(target_layer_ids, target.num_layers)
    start = None
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        note(text)

    if finetune is not None:
        start = open_checkpoint(
            finetune, settings, target=target, target_layer_ids=target_layer_ids, note=tell
        )
        settings = start.settings
    with joined(settings) as group, ExitStack() as stack:
        stack.enter_context(files.disk_full_is_budget(output, _FULL))
        begun: list[Callable[[], None]] = []

        def prepare() -> Beginning:
            if group.leads:
                begun.append(stack.enter_context(locked_run(output)))
            return begin(
                dataset,
                settings,
                target,
                target_layer_ids,
                output,
                start,
                tell=tell if group.leads else None,
                grow=grow,
            )

        beginning = group.in_turn(prepare)
        plan, vocab = beginning.plan, beginning.vocab
        shards = stack.enter_context(closing(ShardReader(Path(dataset))))
        loop = Loop(
            create_draft(target, target_layer_ids, vocab, settings, device=group.device)
            if start is None
            else start.draft(vocab, target, device=group.device, note=tell),
            plan,
            settings,
            reader=shards,
            shape=StatesShape(layers=len(target_layer_ids) + 1, hidden_size=target.hidden_size),
            output=output,
            ties=beginning.ties,
            group=group,
            note=tell,
        )
        for keep in begun:
            keep()
        if loop.log is not None:
            stack.callback(loop.log.close)
            _log_start(loop.log, loop, vocab, notes)
        stop = stack.enter_context(interruptible())
        finished = loop.finished
        if finished and not grow:
            note("this run is finished; with other settings or samples, name another --output")
        interrupted = loop.run(stop, on_progress)
        position = loop.position
        # Not again for a finished run: its card may have measurements in it by now.
        stale = not finished or not (output / CARD_FILE).exists()
        if group.leads and stale and not interrupted:
            card = model_card(
                target=target,
                target_layer_ids=target_layer_ids,
                settings=settings,
                plan=plan,
                vocab=vocab,
                data=describe_data(dataset, plan),
                steps=position.step,
                tokens=position.tokens,
                best_step=position.best_step,
                validation=position.best_validation,
                finetuned_from=None if finetune is None else finetune.name,
            )
            _describe(output, card, note)
    return TrainReport(
        output=output,
        step=position.step,
        steps=plan.steps,
        interrupted=interrupted,
        loss=loop.loss,
        tokens=position.tokens,
        seconds=position.seconds,
        samples=len(plan.train),
        validation_samples=len(plan.validation),
        cut=plan.cut,
        nothing_supervised=plan.nothing_supervised,
        waste=plan.packing.waste,
        draft_vocab_size=vocab.size,
        coverage=vocab.coverage,
        best_step=position.best_step,
        validation=position.validation if interrupted else position.best_validation,
    )


def initial_draft(
    dataset: Path,
    settings: TrainSettings,
    *,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    output: Path,
) -> Path:
    """Write the draft as it is before the first step into `output`: a baseline to serve."""
    vocab = make_vocab(dataset, settings.draft_vocab_size, target=target)
    draft = create_draft(target, target_layer_ids, vocab, settings)
    output.mkdir(parents=True, exist_ok=True)
    save_draft(draft, output)
    return output


def _describe(output: Path, card: str, note: OnNote) -> None:
    """Write what people read of a draft; for want of room the draft is there without."""
    try:
        plot_training(read_log(output / LOG_FILE), output / TRAINING_PLOT)
        files.write_atomic(output / CARD_FILE, card, "card")
    except OSError as error:
        if (words := files.full_disk(error)) is None:
            raise
        for name in (CARD_FILE, TRAINING_PLOT):
            (output / f".{name}.tmp").unlink(missing_ok=True)
        note(
            f"{output}: {words}. The draft is complete but for its model card and plot; once there "
            "is room, the same command writes them"
        )


def _log_start(log: RunLog, loop: Loop, vocab: VocabMapping, notes: Sequence[str]) -> None:
    plan = loop.plan
    log.write(
        "start",
        loop.position.step,
        steps=plan.steps,
        samples=len(plan.train),
        validation_samples=len(plan.validation),
        tokens=plan.packing.tokens,
        rows_per_epoch=plan.packing.rows,
        waste=plan.packing.waste,
        cut=plan.cut,
        nothing_supervised=plan.nothing_supervised,
        draft_vocab_size=vocab.size,
        coverage=vocab.coverage,
        device=loop.group.device,
        processes=loop.group.size,
        notes=notes,
        torch=torch.__version__,
    )
