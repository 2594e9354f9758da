"""Questions that the writer and recovery ask of a manifest. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from draftmill.manifests.errors import DatasetError
from draftmill.manifests.manifest import Manifest, QueryError
from draftmill.manifests.types import Stage, State

_UNREADABLE = (
    "prompts cannot be read: {}. Restore the file from a copy; `draftmill verify` names every one "
    "that is damaged."
)


def unknown(manifest: Manifest, hashes: Sequence[str]) -> set[str]:
    """Those of `hashes` that no prompt of the dataset has."""
    batch = pa.table({"hash": pa.array(hashes, pa.string())})
    with manifest.batch("new_hashes", batch):
        found = manifest.rows(
            "SELECT DISTINCT hash FROM new_hashes b ANTI JOIN prompts p USING (hash)"
        )
    return {row[0] for row in found}


def source_counts(manifest: Manifest) -> dict[tuple[str, bool], int]:
    """Number of prompts of each source and `off_policy`."""
    query = "SELECT source, off_policy, count(*) FROM prompts GROUP BY source, off_policy"
    return {(source, given): count for source, given, count in manifest.rows(query)}


def max_id(manifest: Manifest) -> int:
    """The largest prompt id, 0 if there is none."""
    return int(manifest.rows("SELECT coalesce(max(id), 0) FROM prompts")[0][0])


def prompt_files(manifest: Manifest) -> set[int]:
    """Numbers of the prompt files whose rows are in the manifest."""
    return {row[0] for row in manifest.rows("SELECT DISTINCT file FROM prompts")}


def todo(manifest: Manifest, state: State, after_id: int, limit: int) -> list[tuple[Any, ...]]:
    """(id, hash, source, file, attempts, shard, offset, length, digest, off_policy) of rows.

    Those in `state`, in id order, from the first id above `after_id`; shard to digest are those of
    the current completion and None if there is none.
    """
    return manifest.rows(
        "WITH w AS (SELECT id, attempts, generate_payload FROM state "
        "           WHERE state = ? AND id > ? ORDER BY id LIMIT ?), "
        "r AS (SELECT min(id) AS lo, max(id) AS hi FROM w) "
        'SELECT w.id, p.hash, p.source, p.file, w.attempts, g.shard, g."offset", g.length, '
        "g.digest, p.off_policy FROM w JOIN prompts p ON p.id = w.id "
        "LEFT JOIN payloads g ON g.id = w.id AND g.stage = 'generate' "
        "AND g.attempt = w.generate_payload ORDER BY w.id",
        [state, after_id, limit],
    )


def conversations(manifest: Manifest, paths: Iterable[Path], ids: Sequence[int]) -> dict[int, str]:
    """Conversation JSON of `ids` (ascending), read from the prompt files `paths`."""
    if not ids:
        return {}
    names = [str(path) for path in paths]
    if not names:
        raise DatasetError(_UNREADABLE.format("there is no file in prompts/"))
    batch = pa.table({"id": pa.array(ids, pa.int64())})
    with manifest.batch("wanted_ids", batch):
        try:
            found = dict(
                manifest.rows(
                    "SELECT id, conversation FROM read_parquet(?) SEMI JOIN wanted_ids USING (id) "
                    "WHERE id BETWEEN ? AND ?",
                    [names, ids[0], ids[-1]],
                )
            )
        except QueryError as error:
            if "interrupted" in str(error):
                raise
            raise DatasetError(_UNREADABLE.format(str(error).splitlines()[0])) from error
    if missing := next((each for each in ids if each not in found), None):
        where = ", ".join(names) or "prompts"
        raise DatasetError(_UNREADABLE.format(f"{where}: prompt {missing} is not there"))
    return found


def mean_characters(manifest: Manifest, paths: Iterable[Path]) -> float | None:
    """Mean length of conversation JSON in the prompt files `paths`; None where there is none."""
    names = [str(path) for path in paths]
    if not names:
        raise DatasetError(_UNREADABLE.format("there is no file in prompts/"))
    try:
        found = manifest.rows("SELECT avg(length(conversation)) FROM read_parquet(?)", [names])
    except QueryError as error:
        if "interrupted" in str(error):
            raise
        raise DatasetError(_UNREADABLE.format(str(error).splitlines()[0])) from error
    return None if found[0][0] is None else float(found[0][0])


def known_ends(manifest: Manifest, stage: Stage) -> dict[int, int]:
    """Last acknowledged byte of each shard of a stage."""
    return dict(
        manifest.rows(
            'SELECT shard, max("offset" + length) FROM payloads WHERE stage = ? GROUP BY shard',
            [stage],
        )
    )


def shard_states(manifest: Manifest, kind: str) -> dict[int, str]:
    """`open`, `sealed` or `evicted` for every shard of a kind that has records."""
    return dict(manifest.rows("SELECT number, state FROM shards WHERE kind = ?", [kind]))
