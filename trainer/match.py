"""Whether a dataset is of the target model that a draft is made for: its name, layers, tokenizer.

Sizes of single records are checked when they are read; a checkpoint to finetune is `finetune`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from draftmill.manifests.dataset import DatasetReader
from draftmill.manifests.errors import DatasetError
from draftmill.manifests.target.target import TargetModel, extraction_layer_ids
from draftmill.manifests.types import Location

_COMPLETIONS_DECODED = 8

log = logging.getLogger(__name__)


def check_dataset(
    reader: DatasetReader, table: pa.Table, target: TargetModel, target_layer_ids: Sequence[int]
) -> None:
    """Raise DatasetError, with both values, when the samples of `table` are not of `target`.

    What neither the dataset nor the target's folder says is not checked.
    """
    layers = list(extraction_layer_ids(target_layer_ids, target.num_layers))
    stored = {stage: reader.settings_of(stage) for stage in ("generate", "extract")}
    for stage, what in (("generate", "completions"), ("extract", "hidden states")):
        made_by = stored[stage].get("model", target.name)
        if made_by != target.name:
            raise DatasetError(
                f"{reader.dataset.path}: the {what} are of {made_by}, the draft is to be for "
                f"{target.name}. Set model under [target] back, or start a new dataset."
            )
    width = stored["extract"].get("hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise DatasetError(
            f"{reader.dataset.path}: the hidden states are {width} wide, {target.name} in "
            f"{target.folder} has {target.hidden_size}. Name the folder of the dataset's target."
        )
    _check_layers(stored["extract"].get("layer_ids"), layers)
    if table.num_rows:
        content = reader.shards.header("extract", _location(table, 0, "extract")).content
        _check_layers(content.get("layer_ids"), layers)
        _check_tokenizer(reader, table, target)


def _check_layers(stored: Sequence[int] | None, wanted: list[int]) -> None:
    if stored and list(stored) != wanted:
        raise DatasetError(
            f"The hidden states are of layers {list(stored)}, the draft is to use {wanted} "
            "(the last is the model's output). Extract again, or set target_layer_ids alike."
        )


def _check_tokenizer(reader: DatasetReader, table: pa.Table, target: TargetModel) -> None:
    """The target's tokenizer must turn token ids that were served into the text that came along."""
    tokenizer = _tokenizer(target)
    if tokenizer is None:
        return
    count = min(table.num_rows, _COMPLETIONS_DECODED)
    differing = None
    for row in (place * table.num_rows // count for place in range(count)):
        completion = reader.shards.completion(_location(table, row, "generate"))
        if not (served := _letters(completion.content or "")):
            continue
        ids = completion.completion_token_ids.tolist()
        decoded = _letters(tokenizer.decode(ids, skip_special_tokens=True))
        if served in decoded:
            return
        differing = (decoded, served)
    if differing is not None:
        decoded, served = differing
        raise DatasetError(
            f"The tokenizer in {target.folder} reads the dataset's completions otherwise than the "
            f"server that made them: {decoded[:40]!r} for {served[:40]!r}. Is it the folder of "
            f"{target.name}?"
        )


def _letters(text: str) -> str:
    # Servers strip and parsers split: spaces say nothing here.
    return "".join(text.split())


def _tokenizer(target: TargetModel) -> Any:
    """The target's tokenizer; None where there is none that runs without code of its own."""
    if not any((target.folder / f"tokenizer{end}").is_file() for end in (".json", "_config.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            target.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library under it raises plain ones for what it cannot read
        words = " ".join(str(error).split())[:200]
        log.warning(
            "the tokenizer in %s is not compared with the dataset: %s", target.folder, words
        )
        return None


def _location(table: pa.Table, row: int, stage: str) -> Location:
    names = (f"{stage}_{part}" for part in ("shard", "offset", "length"))
    return Location(*(table.column(name)[row].as_py() for name in names))
