"""Tables of the manifest and the Arrow forms of their rows. What they mean: docs/format.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa

from draftmill.manifests.shards.record_fields import storable
from draftmill.manifests.types import STATES, Attempt

SCHEMA_VERSION = "1"

CONTROL_COLUMNS = (
    "time",
    "endpoint",
    "limit",
    "running",
    "waiting",
    "kv_usage",
    "tokens_per_s",
    "decision",
)
ATTEMPT_COLUMNS = tuple(field.name for field in fields(Attempt))

# No primary keys and no secondary indexes: duckdb#23645 ends in a FATAL error when an indexed
# column is updated often, and every lookup here runs over id ranges that zone maps cut well.
TABLES = f"""
CREATE TYPE row_state AS ENUM ({", ".join(f"'{state}'" for state in STATES)});
CREATE TABLE meta(key VARCHAR, value VARCHAR);
CREATE TABLE prompts(
    id BIGINT, hash VARCHAR, source VARCHAR, row BIGINT, conversation VARCHAR,
    off_policy BOOLEAN, file INTEGER);
CREATE TABLE state(
    id BIGINT, state row_state, stage VARCHAR, attempts INTEGER,
    generate_payload INTEGER, extract_payload INTEGER);
CREATE TABLE attempts(
    id BIGINT, stage VARCHAR, attempt INTEGER, outcome VARCHAR, error_class VARCHAR,
    error VARCHAR, http_status INTEGER, finish_reason VARCHAR, prompt_tokens INTEGER,
    completion_tokens INTEGER, reasoning_tokens INTEGER, queue_s DOUBLE, total_s DOUBLE,
    deadline_s DOUBLE, endpoint VARCHAR, started_at DOUBLE);
CREATE TABLE payloads(
    id BIGINT, stage VARCHAR, attempt INTEGER, shard INTEGER, "offset" BIGINT, length BIGINT,
    tokens INTEGER, raw_bytes BIGINT, digest VARCHAR);
CREATE TABLE shards(
    kind VARCHAR, number INTEGER, state VARCHAR, records BIGINT, tokens BIGINT,
    raw_bytes BIGINT, bytes BIGINT);
CREATE TABLE control(
    time DOUBLE, endpoint VARCHAR, "limit" INTEGER, running DOUBLE, waiting DOUBLE,
    kv_usage DOUBLE, tokens_per_s DOUBLE, decision VARCHAR);
"""

PROMPT_FILE = pa.schema(
    [
        ("id", pa.int64()),
        ("hash", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("conversation_id", pa.string()),
        ("off_policy", pa.bool_()),
        ("reference", pa.string()),
        ("conversation", pa.string()),
    ]
)

_ATTEMPT_TYPES = {
    "id": pa.int64(),
    "attempt": pa.int32(),
    "http_status": pa.int32(),
    "prompt_tokens": pa.int32(),
    "completion_tokens": pa.int32(),
    "reasoning_tokens": pa.int32(),
    "queue_s": pa.float64(),
    "total_s": pa.float64(),
    "deadline_s": pa.float64(),
    "started_at": pa.float64(),
}
ATTEMPT_ROWS = pa.schema(
    [(name, _ATTEMPT_TYPES.get(name, pa.string())) for name in ATTEMPT_COLUMNS]
)
PAYLOAD_ROWS = pa.schema(
    [
        ("id", pa.int64()),
        ("stage", pa.string()),
        ("attempt", pa.int32()),
        ("shard", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("tokens", pa.int32()),
        ("raw_bytes", pa.int64()),
        ("digest", pa.string()),
    ]
)
STATE_ROWS = pa.schema(
    [
        ("id", pa.int64()),
        ("state", pa.string()),
        ("stage", pa.string()),
        ("attempts", pa.int32()),
        ("generate_payload", pa.int32()),
        ("extract_payload", pa.int32()),
    ]
)


def attempt_rows(attempts: Sequence[Attempt]) -> pa.Table:
    """Attempts as an Arrow table in the column order of the table `attempts`."""
    columns = [
        [storable(getattr(attempt, name)) for attempt in attempts] for name in ATTEMPT_COLUMNS
    ]
    return pa.Table.from_arrays(
        [pa.array(c, type=f.type) for c, f in zip(columns, ATTEMPT_ROWS, strict=True)],
        schema=ATTEMPT_ROWS,
    )


def state_rows(columns: Collection[str], changes: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Changes of rows of the table `state`, with only those of its columns that they change."""
    fields = [field for field in STATE_ROWS if field.name in columns]
    return pa.Table.from_arrays(
        [pa.array([change[f.name] for change in changes], type=f.type) for f in fields],
        schema=pa.schema(fields),
    )


# Where the current payload of each stage lies, one row per prompt.
CURRENT_VIEW = """
CREATE OR REPLACE {temporary} VIEW samples AS
SELECT p.id, p.hash, p.source, p.row, p.conversation, p.off_policy,
       s.state, s.stage, s.attempts, s.generate_payload, s.extract_payload,
       g.shard AS generate_shard, g."offset" AS generate_offset, g.length AS generate_length,
       g.digest, e.shard AS extract_shard, e."offset" AS extract_offset,
       e.length AS extract_length, e.tokens, e.raw_bytes,
       a.prompt_tokens, a.completion_tokens, a.reasoning_tokens, a.finish_reason
FROM prompts p JOIN state s USING (id)
LEFT JOIN payloads g ON g.id = p.id AND g.stage = 'generate' AND g.attempt = s.generate_payload
LEFT JOIN payloads e ON e.id = p.id AND e.stage = 'extract' AND e.attempt = s.extract_payload
LEFT JOIN attempts a ON a.id = p.id AND a.stage = 'generate' AND a.attempt = s.generate_payload
     AND a.outcome = 'generated'
"""
