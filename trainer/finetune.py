"""Going on from somebody's draft: what has to agree before it is trained, and which of it stays.

How drafts lie on disk is `drafts.forms`, how rows of a vocabulary move is `drafts.vocab_tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.checkpoint import resolve_draft
from draftmill.trainer.drafts.forms import DraftFiles, read_draft
from draftmill.trainer.drafts.model import DraftModel, load_draft
from draftmill.trainer.drafts.vocab import VocabMapping, keep_vocab, make_vocab
from draftmill.trainer.drafts.vocab_tables import remap_vocab, target_ids_of
from draftmill.trainer.drafts.weight_files import digest
from draftmill.trainer.settings import Finetune, OnNote, TrainSettings


@dataclass(frozen=True, kw_only=True)
class Start:
    """A checkpoint that agrees with target and dataset; `settings` have its shape in them."""

    files: DraftFiles
    settings: TrainSettings
    new_vocab: bool
    digest: str

    def vocabulary(self, dataset: Path, target: TargetModel) -> VocabMapping:
        """The checkpoint's own vocabulary with the dataset's counts, or the dataset's."""
        if self.new_vocab:
            return make_vocab(dataset, self.settings.draft_vocab_size, target=target)
        ids = target_ids_of(self.files.weights, target.vocab_size)
        return keep_vocab(dataset, ids, target=target)

    def draft(
        self, vocab: VocabMapping, target: TargetModel, *, device: str, note: OnNote
    ) -> DraftModel:
        """The model to train, its head's rows moved to where `vocab` has their tokens."""
        files = self.files
        ids = target_ids_of(files.weights, target.vocab_size)
        if not np.array_equal(ids, vocab.target_ids):
            weights, counts = remap_vocab(files.weights, vocab.target_ids, target)
            config = {**files.config, "draft_vocab_size": vocab.size}
            files = replace(files, weights=weights, config=config)
            note(
                f"vocabulary: {counts.kept:,} rows of the head kept, {counts.dropped:,} dropped, "
                f"{counts.new:,} new ones made from the target's head"
            )
        return load_draft(files, target, self.settings, device=device)


def open_checkpoint(
    finetune: Finetune,
    settings: TrainSettings,
    *,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    note: OnNote,
) -> Start:
    """Read the checkpoint and check it against the target and the dataset's layers.

    Raises ConfigError where they do not agree, with both values.
    """
    folder = resolve_draft(finetune.checkpoint)
    files = read_draft(folder)
    if finetune.layer_ids is not None:
        said = f"{list(finetune.layer_ids)} by --finetune-layers"
        files = replace(files, layer_ids=finetune.layer_ids, layers_as_written=said)
    _check_target(files, target, other_allowed=finetune.other_target)
    _check_layers(files, target, target_layer_ids)
    note(
        f"finetuning {folder} ({files.form} form): layers {list(target_layer_ids)}, "
        f"config says {files.layers_as_written}"
    )
    if warning := short_context(files, target):
        note(warning)
    size = settings.draft_vocab_size
    if not finetune.new_vocab:
        size = len(target_ids_of(files.weights, target.vocab_size))
    try:
        shape = replace(
            settings,
            draft_vocab_size=size,
            num_layers=int(files.decoder.get("num_hidden_layers") or settings.num_layers),
            norm_before_residual=bool(files.config.get("norm_before_residual")),
            norm_before_fc=bool(files.config.get("norm_before_fc")),
            norm_output=bool(files.config.get("norm_output")),
        )
    except ValueError as error:
        raise ConfigError(f"{folder}: its config cannot be that of a draft: {error}") from error
    return Start(
        files=files,
        settings=shape,
        new_vocab=finetune.new_vocab,
        digest=digest(folder),
    )


def short_context(files: DraftFiles, target: TargetModel) -> str | None:
    """A warning when the draft was made for a shorter context than its target has."""
    context = int(files.decoder.get("max_position_embeddings") or 2048)
    if context >= target.max_position_embeddings:
        return None
    return (
        f"{files.folder}: max_position_embeddings is {context}, the target's is "
        f"{target.max_position_embeddings}: as it is, the draft would lose acceptance beyond "
        f"{context} tokens. What is written here has the target's."
    )


def _check_target(files: DraftFiles, target: TargetModel, *, other_allowed: bool) -> None:
    for key, mine in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if files.decoder.get(key) != mine:
            raise ConfigError(
                f"{files.folder}: {key} is {files.decoder.get(key)}, that of the target "
                f"{target.name} is {mine}. This draft is for another model."
            )
    wide = files.config.get("target_hidden_size")
    if wide not in (None, target.hidden_size):
        raise ConfigError(
            f"{files.folder}: target_hidden_size is {wide}, the target's hidden size is "
            f"{target.hidden_size}. This draft is for another model."
        )
    if files.target_name is None or other_allowed:
        return
    # Many checkpoints carry a path in place of the name.
    names = [
        name.rstrip("/").rpartition("/")[2].lower() for name in (files.target_name, target.name)
    ]
    if names[0] != names[1]:
        raise ConfigError(
            f"{files.folder} was made for {files.target_name}, the dataset is of {target.name}. "
            "If both have the same tokenizer and sizes, say so with --other-target."
        )


def _check_layers(files: DraftFiles, target: TargetModel, wanted: Sequence[int]) -> None:
    mine = files.layer_ids_of(target.num_layers)
    if tuple(mine) != tuple(wanted):
        raise ConfigError(
            f"{files.folder} reads layers {list(mine)} (its config says "
            f"{files.layers_as_written}), the dataset has {list(wanted)}; id k is the input of "
            "decoder layer k. Extract those layers, or give --finetune-layers if the draft was "
            "trained on others than its config says."
        )
