"""The snapshot `manifest.parquet`: everything but prompt texts, one row per prompt.

What readers use while a writer holds the database, and what a lost database is rebuilt from.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from draftmill.manifests.errors import DatasetError
from draftmill.manifests.manifest import Manifest, QueryError

# Decisions are few; of a run that makes very many, the last ones tell how it goes.
_CONTROL = (
    "SELECT * FROM (SELECT * FROM control ORDER BY time DESC LIMIT 5000) ORDER BY time, endpoint"
)


def write_snapshot(manifest: Manifest, path: Path) -> None:
    """Write the snapshot; publishing it atomically is left to the caller."""
    facts = json.dumps(
        {
            "meta": dict(manifest.rows("SELECT key, value FROM meta")),
            "shards": manifest.table("SELECT * FROM shards").to_pylist(),
            "control": manifest.table(_CONTROL).to_pylist(),
        }
    )
    manifest.run(
        "COPY (SELECT p.*, s.* EXCLUDE (id), a.attempts_history, y.payloads "
        "FROM prompts p JOIN state s USING (id) "
        "LEFT JOIN (SELECT id, list(x) AS attempts_history FROM attempts x GROUP BY id) a "
        "USING (id) "
        "LEFT JOIN (SELECT id, list(x) AS payloads FROM payloads x GROUP BY id) y USING (id)) "
        f"TO {_quoted(str(path))} (FORMAT parquet, COMPRESSION zstd, "
        f"KV_METADATA {{draftmill: {_quoted(facts)}}})"
    )


def load_snapshot(manifest: Manifest, path: Path) -> None:
    """Fill the empty tables of `manifest` from a snapshot; DatasetError if it is damaged."""
    try:
        _load(manifest, path)
    except (QueryError, LookupError, ValueError) as error:
        raise DatasetError(f"{path} is damaged: {error}") from error


def _load(manifest: Manifest, path: Path) -> None:
    source = f"read_parquet({_quoted(str(path))})"
    found = manifest.rows(
        f"SELECT decode(value) FROM parquet_kv_metadata({_quoted(str(path))}) "
        "WHERE decode(key) = 'draftmill'"
    )
    facts = json.loads(found[0][0])
    with manifest.transaction("restore"):
        for key, value in facts["meta"].items():
            manifest.set_meta(key, value)
        for table in ("shards", "control"):
            if facts[table]:
                with manifest.batch("old_rows", pa.Table.from_pylist(facts[table])):
                    manifest.run(f"INSERT INTO {table} BY NAME SELECT * FROM old_rows")
        prompts = "id, hash, source, row, conversation, off_policy, file"
        manifest.run(f"INSERT INTO prompts SELECT {prompts} FROM {source} ORDER BY id")
        states = "id, state, stage, attempts, generate_payload, extract_payload"
        manifest.run(f"INSERT INTO state SELECT {states} FROM {source} ORDER BY id")
        for table, column in (("attempts", "attempts_history"), ("payloads", "payloads")):
            manifest.run(
                f"INSERT INTO {table} BY NAME SELECT unnest(x) FROM "
                f"(SELECT unnest({column}) AS x FROM {source} ORDER BY id)"
            )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
