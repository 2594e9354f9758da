"""A folder of speculators as samples of a dataset: completions, then their states, checked.

Prompts are known by content, and the dataset's own row states say what is still to do: so a killed
import goes on where it was, and importing twice adds nothing. The folder's form is `folder`'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.builder.exchange import folder as form
from draftmill.builder.extraction.intake import Layers
from draftmill.builder.extraction.validate import check_shape, check_states, check_token_ids
from draftmill.manifests.codec.block import OutOfRangeError
from draftmill.manifests.codec.codec import encode_states
from draftmill.manifests.errors import (
    NOT_UNDERSTOOD,
    BudgetError,
    DamagedError,
    RejectedError,
    SourceFileError,
)
from draftmill.manifests.headroom import default_headroom
from draftmill.manifests.sizes import format_size
from draftmill.manifests.types import (
    Attempt,
    Completion,
    GeneratedSample,
    Prompt,
    Result,
    StatesPayload,
    StatesTLH,
)
from draftmill.manifests.writer import DatasetWriter

_ROWS = 64
_BYTES = 256 << 20
_PAGE = 512
# Of a row that draftmill exported.
_OURS = {"hash", "conversation", "source", "conversation_id", "off_policy"}


@dataclass(kw_only=True)
class ImportReport:
    """What an import did. Rows of the folder: `new` prompts, `known` ones, and `useless` ones
    without a supervised token; of the dataset: `completions` and `states` stored now, `rejected`
    states; `without_states` rows have no file and can be extracted. `narrowed` rows had more than
    one supervised stretch; only the last one is kept."""

    new: int = 0
    known: int = 0
    useless: int = 0
    narrowed: int = 0
    completions: int = 0
    states: int = 0
    without_states: int = 0
    rejected: int = 0
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """One usable row: prompt, completion and how many tokens of states belong to it."""

    row: int
    prompt: Prompt
    completion: Completion
    num_tokens: int
    narrowed: bool


def import_folder(
    writer: DatasetWriter,
    folder: Path,
    *,
    source: str,
    layers: Layers,
    codec: str,
    max_seq_len: int,
    on_sample: Callable[[int, int], None] = lambda done, total: None,
) -> ImportReport:
    """Adds what the dataset does not have yet. Raises SourceFileError and BudgetError."""
    report = ImportReport()
    table = form.Table(folder)
    rows: dict[str, int] = {}

    def prompts() -> Iterator[Prompt]:
        for row, found in enumerate(table):
            sample = _sample_of(row, found, source)
            if sample is None:
                report.useless += 1
                continue
            report.narrowed += sample.narrowed
            rows[sample.prompt.hash] = row
            yield sample.prompt

    added = writer.add_prompts(prompts())
    report.new, report.known = added.added, added.known
    _Import(
        writer=writer,
        folder=folder,
        table=table,
        source=source,
        layers=layers,
        codec=codec,
        max_seq_len=max_seq_len,
        report=report,
        rows=rows,
        on_sample=on_sample,
    ).run()
    return report


def _sample_of(row: int, found: form.Row, source: str) -> _Sample | None:
    """None if nothing in the row is supervised; SourceFileError if its note is not one of ours."""
    try:
        return _read_row(row, found, source)
    except NOT_UNDERSTOOD as error:
        raise SourceFileError(f"row {row:,} of the table cannot be used: {error}") from error


def _read_row(row: int, found: form.Row, source: str) -> _Sample | None:
    mask = np.asarray(found.loss_mask, bool)
    if not mask.any():
        return None
    end = int(np.flatnonzero(mask)[-1]) + 1
    zeros = np.flatnonzero(~mask[:end])
    start = int(zeros[-1]) + 1 if len(zeros) else 0
    ids = np.asarray(found.token_ids, np.int32)
    note = found.note
    cut = np.asarray(note.get("cut_token_ids", []), np.int32)
    completion = Completion(
        prompt_token_ids=ids[:start],
        completion_token_ids=np.concatenate([ids[start:end], cut]),
        content=_text(note, "content"),
        reasoning=_text(note, "reasoning"),
        finish_reason=str(note.get("finish_reason") or "stop"),
        extra={"imported_from": source},
    )
    return _Sample(
        row=row,
        prompt=_prompt(row, found, source),
        completion=completion,
        num_tokens=end,
        narrowed=bool(mask[:start].any()),
    )


def _text(note: dict[str, Any], key: str) -> str | None:
    found = note.get(key)
    if found is not None and not isinstance(found, str):
        raise TypeError(f"{key} is {type(found).__name__}, not text")
    return found


def _prompt(row: int, found: form.Row, source: str) -> Prompt:
    note = found.note
    if note.keys() >= _OURS:
        return Prompt(
            hash=str(note["hash"]),
            conversation=str(note["conversation"]),
            source=str(note["source"]),
            row=row,
            conversation_id=str(note["conversation_id"]),
            off_policy=bool(note["off_policy"]),
        )
    # No messages: the tokens are what the prompt is.
    ids = np.asarray([found.token_ids, found.loss_mask], np.int64).tobytes()
    mark = hashlib.sha256(ids).hexdigest()
    conversation = json.dumps({"imported": mark, "messages": []}, separators=(",", ":"))
    digest = hashlib.sha256(conversation.encode()).hexdigest()[:32]
    return Prompt(
        hash=digest, conversation=conversation, source=source, row=row, conversation_id=digest
    )


@dataclass(kw_only=True)
class _Import:
    writer: DatasetWriter
    folder: Path
    table: form.Table
    source: str
    layers: Layers
    codec: str
    max_seq_len: int
    report: ImportReport
    rows: dict[str, int]  # hash of a prompt → its row of the table
    on_sample: Callable[[int, int], None]
    batch: list[Result] = field(default_factory=list)
    batch_bytes: int = 0
    used_bytes: int = 0  # of the dataset, when the batch began

    def run(self) -> None:
        self._completions()
        self._states()

    def _completions(self) -> None:
        for prompt in _pages(self.writer.pending):
            if (sample := self._sample(prompt.hash)) is None:
                continue
            completion = sample.completion
            result = Result.taken_over(prompt, completion, endpoint=f"import {self.source}")
            self._put(result, 8 * len(completion.token_ids) + 4096)
            self.report.completions += 1
        self._commit()

    def _states(self) -> None:
        for generated in _pages(self.writer.generated):
            sample = self._sample(generated.hash)
            if sample is None or not _same(generated, sample):
                continue
            path = form.states_file(self.folder, sample.row)
            if not path.exists():
                self.report.without_states += 1
                continue
            self._take_in(generated, sample, path)
            self.on_sample(self.report.states + self.report.rejected, len(self.rows))
        self._commit()

    def _take_in(self, generated: GeneratedSample, sample: _Sample, path: Path) -> None:
        num_tokens = min(sample.num_tokens, self.max_seq_len)
        prompt_tokens = len(sample.completion.prompt_token_ids)
        attempt = Attempt(
            id=generated.id,
            stage="extract",
            attempt=generated.attempts + 1,
            outcome="extracted",
            finish_reason="length" if num_tokens < len(generated.completion.token_ids) else None,
            prompt_tokens=min(prompt_tokens, num_tokens),
            completion_tokens=max(0, num_tokens - prompt_tokens),
            endpoint=f"import {self.source}",
        )
        try:
            if prompt_tokens >= num_tokens:
                raise RejectedError(
                    f"nothing to learn from: the prompt has {prompt_tokens:,} tokens, max_seq_len "
                    f"is {self.max_seq_len:,}"
                )
            payload = self._payload(generated, sample, path, num_tokens)
        except (RejectedError, DamagedError) as error:
            self.report.rejected += 1
            self.report.reasons.append(f"{path.name}: {error}")
            bad = replace(attempt, outcome="rejected", error_class="bad_states", error=str(error))
            self._put(Result(attempt=bad, hash=generated.hash), 4096)
            return
        self._put(
            Result(attempt=attempt, hash=generated.hash, states=payload),
            sum(map(len, payload.blocks)) + 4096,
        )
        self.report.states += 1

    def _payload(
        self, generated: GeneratedSample, sample: _Sample, path: Path, num_tokens: int
    ) -> StatesPayload:
        """The states of one file, with every check that an extracted sample passes."""
        layers = self.layers
        states_TLH, token_ids = form.read_states(path)
        check_shape(
            states_TLH.shape,
            "BF16",
            num_layers=len(layers.layer_ids),
            hidden_size=layers.hidden_size,
        )
        if len(states_TLH) != len(token_ids) or len(token_ids) < num_tokens:
            raise RejectedError(
                f"states of {len(states_TLH)} tokens for {len(token_ids)} token ids, "
                f"{num_tokens} are needed"
            )
        ids = generated.completion.token_ids[:num_tokens]
        check_token_ids(ids, token_ids[:num_tokens])
        states_TLH = np.ascontiguousarray(states_TLH[:num_tokens])
        check_states(ids, states_TLH, layers.layer_ids)
        return StatesPayload(
            codec=self.codec,
            shape=(num_tokens, len(layers.layer_ids), layers.hidden_size),
            blocks=_encoded(states_TLH, self.codec),
            digest=generated.digest,
            target_layer_ids=layers.layer_ids,
        )

    # -- batches ---------------------------------------------------------------------------------

    def _put(self, result: Result, num_bytes: int) -> None:
        limit = self.writer.budget_bytes
        if limit is not None:
            if not self.batch:
                self.used_bytes = self.writer.used_bytes()
            used, need = self.used_bytes, self.batch_bytes + num_bytes
            if used + need + default_headroom(limit) > limit:
                self._commit()
                raise BudgetError(
                    f"The disk budget of {format_size(limit)} is used up: {format_size(used)} are "
                    f"stored and the next sample needs {format_size(num_bytes)}. Raise "
                    "disk_budget and import again: it goes on from here."
                )
        self.batch.append(result)
        self.batch_bytes += num_bytes
        if len(self.batch) >= _ROWS or self.batch_bytes >= _BYTES:
            self._commit()

    def _commit(self) -> None:
        if self.batch:
            self.writer.commit(self.batch)
            self.writer.publish(running={"stage": "import", "done": self.report.states})
        self.batch, self.batch_bytes = [], 0

    def _sample(self, digest: str) -> _Sample | None:
        row = self.rows.get(digest)
        return None if row is None else _sample_of(row, self.table[row], self.source)


def _encoded(states_TLH: StatesTLH, codec: str) -> list[memoryview]:
    try:
        return encode_states(states_TLH, codec)
    except OutOfRangeError as error:
        raise RejectedError(f"{codec} cannot hold these states: {error}") from error


def _same(generated: GeneratedSample, sample: _Sample) -> bool:
    """Whether the dataset's completion is the imported one, and not another of the same prompt."""
    return bool(np.array_equal(generated.completion.token_ids, sample.completion.token_ids))


def _pages(claim: Callable[[int, int], list[Any]]) -> Iterator[Any]:
    """All rows of a claim in id order, a page at a time. What is committed meanwhile leaves it."""
    cursor = 0
    while page := claim(cursor, _PAGE):
        yield from page
        cursor = page[-1].id
