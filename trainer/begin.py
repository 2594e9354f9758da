"""What a run begins with, new or gone on with: its settings, its plan and its vocabulary.

Each is a file of the run's folder that checkpoints are worth nothing without. How they look inside
is left to `run_folder`, `plan` and `vocab`; what ties a checkpoint to them is put together here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import checkpoint
from draftmill.trainer.checkpoint import Position, Ties, folder_of
from draftmill.trainer.drafts.vocab import VocabMapping, load_mapping, make_vocab, save_mapping
from draftmill.trainer.finetune import Start
from draftmill.trainer.loading.plan import Plan, load_plan, make_plan, next_epoch, save_plan
from draftmill.trainer.loading.plan import grow as grow_plan
from draftmill.trainer.match import check_dataset
from draftmill.trainer.run_folder import MAPPING_FILE, PLAN_FILE, RESTORE, RUN_FILE, bind_run
from draftmill.trainer.settings import OnNote, TrainSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """What every process of a run has before the model is made."""

    plan: Plan
    vocab: VocabMapping
    ties: Ties


def begin(
    dataset: Path,
    settings: TrainSettings,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    output: Path,
    start: Start | None,
    *,
    tell: OnNote | None,
    grow: bool,
) -> Beginning:
    """Read what a run in `output` began with, or write it for a new one.

    With `grow`, and a `tell` that gets what came of it, the plan takes in what the dataset has more
    by now. Raises what `train` says.
    """
    origin = None if start is None else start.digest
    plan, table, bound = _bound_plan(dataset, settings, target, target_layer_ids, output, origin)
    vocab = _vocab(dataset, settings, target, output, start)
    ties = _ties(bound, plan, vocab)
    if grow and tell is not None:
        plan = _grown(plan, table, settings, output, ties, tell)
        ties = _ties(bound, plan, vocab)
    return Beginning(plan=plan, vocab=vocab, ties=ties)


def _ties(bound: str, plan: Plan, vocab: VocabMapping) -> Ties:
    return {RUN_FILE: (bound,), PLAN_FILE: plan.digests, MAPPING_FILE: (vocab.digest,)}


def _bound_plan(
    dataset: Path,
    settings: TrainSettings,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    output: Path,
    finetuned_from: str | None,
) -> tuple[Plan, pa.Table, str]:
    """The run's plan, the samples that the dataset has now, and the digest of the settings.

    A new plan is made before the folder is bound to it: a refusal leaves none.
    """
    # The database is closed again at once: while it is open, nobody can write the dataset.
    with Dataset.open(dataset).reader() as reader:
        table = reader.trainable()
        check_dataset(reader, table, target, target_layer_ids)
    path = output / PLAN_FILE
    new = not path.exists()
    if not new:
        bound = bind_run(output, settings, target, target_layer_ids, finetuned_from, new=False)
        return load_plan(path, table, settings.max_seq_len), table, bound
    if checkpoint.checkpoints(output):
        raise DamagedError(
            f"{path} is gone, without which the checkpoints beside it cannot go on with the same "
            f"samples. {RESTORE}"
        )
    plan = make_plan(table, settings)
    bound = bind_run(output, settings, target, target_layer_ids, finetuned_from, new=True)
    return save_plan(plan, path), table, bound


def _grown(
    plan: Plan,
    table: pa.Table,
    settings: TrainSettings,
    output: Path,
    ties: Ties,
    tell: OnNote,
) -> Plan:
    """The plan with the samples that were added since, frozen again before any of them is used."""
    found = checkpoint.latest(output, note=tell, ties=ties)
    position = Position() if found is None else found[0]
    too_late = (
        "takes no more samples in. To train on new ones, name another --output; with "
        f"--finetune-from {output} it starts from this draft"
    )
    if position.step >= plan.steps:
        tell(f"--grow: this run is finished ({plan.steps:,} steps) and {too_late}")
        return plan
    epoch, row = next_epoch(plan, settings, position.cursor)
    grown = grow_plan(plan, table, settings, epoch=epoch, row=row)
    if grown is not plan:
        grown = save_plan(grown, output / PLAN_FILE)
        more = len(grown.train) - len(plan.train)
        tell(f"--grow: {more:,} new samples from epoch {epoch + 1} on, {grown.steps:,} steps")
    elif not settings.steps and epoch >= settings.epochs:
        tell(f"--grow: this run is in its last epoch and {too_late}")
    else:
        tell("--grow: the dataset has no new sample to train on")
    return grown


def _vocab(
    dataset: Path,
    settings: TrainSettings,
    target: TargetModel,
    output: Path,
    start: Start | None,
) -> VocabMapping:
    """The run's own copy of its mapping: the dataset may grow and get another one."""
    # Not beside the draft: vLLM loads every safetensors file that lies there.
    path = output / MAPPING_FILE
    found = load_mapping(path, target.vocab_size)
    if found is None or found.size != settings.draft_vocab_size:
        if steps := checkpoint.checkpoints(output):
            raise DamagedError(
                f"{path} is gone or damaged, which says what the rows of the checkpoints' heads "
                f"mean. {RESTORE} With --finetune-from {folder_of(output, steps[-1])} it starts "
                "from that draft."
            )
        path.parent.mkdir(exist_ok=True)
        if start is None:
            found = make_vocab(dataset, settings.draft_vocab_size, target=target)
        else:
            found = start.vocabulary(dataset, target)
        save_mapping(found, path)
    return found
