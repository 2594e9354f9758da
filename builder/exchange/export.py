"""A dataset as the folder that `speculators train` reads; resumable, with its room checked first.

The folder's form is `folder`'s. Rows keep their number for ever: what is exported again later comes
behind what is there, so that files of states stay those of their row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.builder.exchange import folder as form
from draftmill.manifests import lock, queries
from draftmill.manifests.dataset import Dataset, DatasetReader
from draftmill.manifests.errors import BudgetError, DatasetError, SourceFileError
from draftmill.manifests.files import disk_full_is_budget
from draftmill.manifests.sizes import format_size
from draftmill.manifests.types import Completion, Location

_PAGE = 256
_LOCK = ".lock"
# Bytes of the table for a token (two int64) and for a sample beside its text.
_TABLE_TOKEN, _TABLE_ROW = 16, 1024


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export did: samples written now, and those that were there already."""

    written: int
    kept: int
    tokens: int
    bytes: int


def export(
    dataset: Dataset,
    output: Path,
    *,
    num_layers: int,
    hidden_size: int,
    fp8: bool = False,
    say: Callable[[str], None] = lambda _: None,
    on_sample: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write every extracted sample into `output`; files that are whole already are kept.

    Raises BudgetError before anything is written when the volume has no room, DatasetError when
    the folder holds other samples, or states in the other form.
    """
    with ExitStack() as stack:
        reader = stack.enter_context(dataset.reader())
        samples = {row["hash"]: row for row in reader.extracted().to_pylist()}
        if not samples:
            raise DatasetError(
                f"{dataset.path} has no sample with hidden states yet. Run "
                f"`draftmill extract {dataset.path}` first."
            )
        stack.enter_context(_locked(output))
        order = _order(output, samples)
        _check_form(output, len(order), fp8=fp8)
        left = [
            row
            for row, each in enumerate(order)
            if form.digest_of(form.states_file(output, row), fp8=fp8) != samples[each]["digest"]
        ]
        text, need = _arithmetic(
            [samples[order[row]]["tokens"] for row in left],
            [samples[each]["tokens"] for each in order],
            (num_layers, hidden_size),
            fp8=fp8,
        )
        _check_room(output, text, need, say)
        with disk_full_is_budget(output):
            (output / form.STATES).mkdir(parents=True, exist_ok=True)
            form.write_rows(output, _rows(reader, [samples[each] for each in order]))
            tokens = size = 0
            for done, row in enumerate(left):
                sample = samples[order[row]]
                states_TLH = reader.shards.states(_at(sample, "extract"))
                token_ids = _completion(reader, sample, text=False).token_ids[: len(states_TLH)]
                path = form.states_file(output, row)
                form.write_states(
                    path, states_TLH, token_ids.tolist(), fp8=fp8, digest=sample["digest"]
                )
                tokens += len(states_TLH)
                size += path.stat().st_size
                on_sample(done + 1, len(left))
    return ExportReport(written=len(left), kept=len(order) - len(left), tokens=tokens, bytes=size)


def _order(output: Path, samples: dict[str, dict[str, Any]]) -> list[str]:
    """Hashes of the samples by row: as the folder has them, then those that are new, by id."""
    if {each.name for each in output.iterdir()} <= {_LOCK}:
        return list(samples)
    try:
        there = [row.note for row in form.Table(output)]
    except SourceFileError:
        started = {_LOCK, form.STATES, f".{form.ARROW}.tmp", form.ARROW, "dataset_info.json"}
        if {each.name for each in output.iterdir()} <= started:
            return list(samples)  # killed before its table was whole
        raise DatasetError(f"{output} holds something else. Name a new folder.") from None
    for note in there:
        found = samples.get(str(note.get("hash")))
        if found is None or found["digest"] != note.get("digest"):
            raise DatasetError(
                f"{output} was exported from samples that the dataset does not have now (evicted, "
                "generated again, or of another dataset). Name a new folder."
            )
    known = dict.fromkeys(str(note["hash"]) for note in there)
    return [*known, *(each for each in samples if each not in known)]


def _check_form(output: Path, num_rows: int, *, fp8: bool) -> None:
    """States of the other form are somebody's work: they are not replaced unasked."""
    for row in range(num_rows):
        if form.digest_of(form.states_file(output, row), fp8=not fp8) is not None:
            there, wanted = ("bf16", "fp8") if fp8 else ("fp8", "bf16")
            raise DatasetError(
                f"{output} holds states as {there}, this export would write {wanted}. Name a new "
                f"folder, or export {'without' if fp8 else 'with'} --fp8."
            )


def _arithmetic(
    left: list[int], all_rows: list[int], shape: tuple[int, int], *, fp8: bool
) -> tuple[str, int]:
    """How many bytes will be written, in words and in sum; tokens of each sample are given."""
    layers, hidden = shape
    states = sum(form.states_bytes(tokens, layers, hidden, fp8=fp8) for tokens in left)
    table = sum(_TABLE_TOKEN * tokens + _TABLE_ROW for tokens in all_rows)
    text = (
        f"{len(left):,} samples, {sum(left):,} tokens × {layers} layers × {hidden:,} × "
        f"{1 if fp8 else 2} bytes = {format_size(states)}, and {format_size(table)} for the table"
    )
    return text, states + table


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Make the folder and hold its lock: two exports would mix up their rows."""
    if output.exists() and not output.is_dir():
        raise DatasetError(f"{output} is no folder. Name a new one.")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(
            f"{output} cannot be made: {error.strerror}. Name a new folder."
        ) from error
    refusal = (
        f"{output} is being written by process {{owner}}. Wait until it ends, or name another "
        "folder."
    )
    with lock.held(output / _LOCK, refusal):
        yield


def _check_room(output: Path, text: str, need: int, say: Callable[[str], None]) -> None:
    volume = os.statvfs(output)
    free = volume.f_bavail * volume.f_frsize
    if need > free:
        raise BudgetError(
            f"{output}: {text}, but {format_size(free)} are free there. Export to another volume, "
            "or with --fp8."
        )
    say(f"{text}; {format_size(free)} are free")


def _rows(reader: DatasetReader, samples: list[dict[str, Any]]) -> Iterator[form.Row]:
    paths = list(reader.dataset.prompt_files().values())
    for start in range(0, len(samples), _PAGE):
        page = samples[start : start + _PAGE]
        texts = queries.conversations(reader.manifest, paths, sorted(each["id"] for each in page))
        for sample in page:
            completion = _completion(reader, sample, text=True)
            token_ids = completion.token_ids[: sample["tokens"]].tolist()
            prompt_tokens = len(completion.prompt_token_ids)
            note = {
                **{key: sample[key] for key in ("hash", "digest", "source", "off_policy")},
                "conversation_id": sample["conversation"],
                "conversation": texts[sample["id"]],
                "content": completion.content,
                "reasoning": completion.reasoning,
                "finish_reason": completion.finish_reason,
                "cut_token_ids": completion.token_ids[sample["tokens"] :].tolist(),
            }
            mask = [0] * prompt_tokens + [1] * (len(token_ids) - prompt_tokens)
            yield form.Row(token_ids=token_ids, loss_mask=mask, note=note)


def _completion(reader: DatasetReader, sample: dict[str, Any], *, text: bool) -> Completion:
    return reader.shards.completion(_at(sample, "generate"), text=text)


def _at(sample: dict[str, Any], stage: str) -> Location:
    return Location(*(sample[f"{stage}_{part}"] for part in ("shard", "offset", "length")))
