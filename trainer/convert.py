"""Writes a draft in the other form, whole or not at all.

What the forms are is `drafts.forms`; that every weight is accounted for is checked in
`drafts.model`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from draftmill.manifests import files
from draftmill.manifests.errors import DatasetError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.checkpoint import resolve_draft
from draftmill.trainer.drafts.forms import flat_limits, read_draft, write_draft
from draftmill.trainer.drafts.model import EMBEDDINGS, speculators_files
from draftmill.trainer.drafts.vocab_tables import as_tensor
from draftmill.trainer.finetune import short_context
from draftmill.trainer.settings import DraftForm


def convert_draft(
    source: str | Path,
    output: Path,
    form: DraftForm,
    *,
    target: TargetModel | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the draft in `source` into the new folder `output` in `form`.

    With `target`, the draft is made out to it and gets its context (`max_position_embeddings`),
    and embeddings that are the target's own are left out of the flat form and put into the
    other. Without, nothing but names and fields changes. Raises ConfigError unless every weight
    is accounted for, DatasetError when `output` is there.
    """
    if not output.name:
        raise DatasetError(f"{output} is no name for a new folder.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DatasetError(f"{output} is there already. Name a new folder.")
    read = read_draft(resolve_draft(source))
    config, weights = speculators_files(read, target=target)
    if target is not None:
        if warning := short_context(read, target):
            note(warning)
        own = as_tensor(target.embed_tokens())
        found = weights.get(EMBEDDINGS)
        if form == "speculators":
            weights.setdefault(EMBEDDINGS, own)
        elif found is not None and torch.equal(found, own.to(found.dtype)):
            del weights[EMBEDDINGS]
    if form == "flat":
        for limit in flat_limits(config):
            note(limit)
    temporary = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with files.disk_full_is_budget(output, "Free space on the disk; nothing was written."):
        try:
            temporary.mkdir(parents=True)
            write_draft(config, weights, temporary, form)
            for path in sorted(temporary.iterdir()):
                files.sync_file(path, "draft")
            files.sync_folder(temporary, "draft")
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    if output.exists():
        output.rmdir()
    files.rename(temporary, output, "draft")
    return output
