"""The snapshot `manifest.parquet`: everything but prompt texts, one row per prompt.

What readers use while a writer holds the database, and what a lost database is rebuilt from.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.manifests import files, queries
from draftmill.manifests.errors import DatasetError
from draftmill.manifests.manifest import Manifest, QueryError

# Rows are gathered for so many ids at a time: memory does not grow with the dataset.
WINDOW_IDS = 5000
# Decisions are few; of a run that makes very many, the last ones tell how it goes.
_CONTROL = (
    "SELECT * FROM (SELECT * FROM control ORDER BY time DESC LIMIT 5000) ORDER BY time, endpoint"
)


_WINDOW = """
SELECT p.*, s.* EXCLUDE (id) REPLACE (s.state::VARCHAR AS state), a.attempts_history, y.payloads
FROM (SELECT * FROM prompts WHERE id BETWEEN $1 AND $2) p
JOIN (SELECT * FROM state WHERE id BETWEEN $1 AND $2) s USING (id)
LEFT JOIN (SELECT id, list(x) AS attempts_history FROM attempts x
           WHERE id BETWEEN $1 AND $2 GROUP BY id) a USING (id)
LEFT JOIN (SELECT id, list(x) AS payloads FROM payloads x
           WHERE id BETWEEN $1 AND $2 GROUP BY id) y USING (id)
ORDER BY id
"""


def write_snapshot(manifest: Manifest, path: Path, *, window_ids: int = WINDOW_IDS) -> None:
    """Write the snapshot; publishing it atomically is left to the caller."""
    facts = json.dumps(
        {
            "meta": dict(manifest.rows("SELECT key, value FROM meta")),
            "shards": manifest.table("SELECT * FROM shards").to_pylist(),
            "control": manifest.table(_CONTROL).to_pylist(),
        }
    )
    # No prompt has the id 0: the empty first window gives the columns.
    schema = manifest.table(_WINDOW, [0, 0]).schema.with_metadata({"draftmill": facts})
    with files.disk_full_is_budget(path):
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for first in range(1, queries.max_id(manifest) + 1, window_ids):
                window = manifest.table(_WINDOW, [first, first + window_ids - 1])
                writer.write_table(window.cast(schema))


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
