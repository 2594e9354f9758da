"""Asks a manifest everything that a report needs, already added up. Arithmetic is in `document`.

Every query returns a bounded number of rows, however many prompts there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftmill.manifests.files import numbered
from draftmill.manifests.manifest import Manifest, QueryError

Rows = list[dict[str, Any]]

TIME_BINS = 48
_SHARDS_SHOWN = 1000
_DECISIONS_READ = 500
_EXAMPLE_CHARACTERS = 160

# What became of a row, as far as its completion goes.
GROUPS = ("completed", "recovered", "truncated", "timed_out", "missing")
_GROUP = """CASE
    WHEN s.generate_payload IS NOT NULL AND s.finish_reason = 'length' THEN 'truncated'
    WHEN s.generate_payload IS NOT NULL AND t.timeouts > 0 THEN 'recovered'
    WHEN s.generate_payload IS NOT NULL THEN 'completed'
    WHEN s.state = 'timed_out' THEN 'timed_out'
    ELSE 'missing' END"""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Sums over a manifest. Sizes in bytes, times in Unix seconds, lengths in tokens."""

    stages: Rows = field(default_factory=list)
    sources: Rows = field(default_factory=list)
    shards: Rows = field(default_factory=list)
    lengths: Rows = field(default_factory=list)
    groups: Rows = field(default_factory=list)
    histogram: Rows = field(default_factory=list)
    deadlines: Rows = field(default_factory=list)
    speeds: Rows = field(default_factory=list)
    error_classes: Rows = field(default_factory=list)
    error_endpoints: Rows = field(default_factory=list)
    error_times: Rows = field(default_factory=list)
    work: Rows = field(default_factory=list)
    control: Rows = field(default_factory=list)
    started_at: float | None = None
    bin_s: float = 1.0


def gather(manifest: Manifest, prompts: Path) -> Facts:
    """All sums; `prompts` is the dataset's folder of prompt files, read for prompt lengths."""
    ask = _Asker(manifest)
    # Extraction must not be judged by the time that lies between two nights: bins span it all.
    first, last = manifest.rows(
        "SELECT min(started_at), max(started_at + coalesce(total_s, 0)) FROM attempts "
        "WHERE started_at > 1 AND endpoint IS NOT NULL"
    )[0]
    bin_s = max(1.0, (last - first) / TIME_BINS) if first is not None else 1.0
    moment = [first or 0.0, bin_s]
    return Facts(
        stages=ask(_STAGES),
        sources=ask(_SOURCES),
        shards=ask(_SHARDS),
        lengths=ask(_LENGTHS),
        groups=_groups(manifest, [str(path) for path in numbered(prompts, ".parquet").values()]),
        histogram=ask(_HISTOGRAM),
        deadlines=ask(_DEADLINES),
        speeds=ask(_SPEEDS),
        error_classes=ask(_ERROR_CLASSES),
        error_endpoints=ask(_ERROR_ENDPOINTS),
        error_times=ask(_ERROR_TIMES, moment),
        work=ask(_WORK, moment),
        control=ask(_CONTROL),
        started_at=first,
        bin_s=bin_s,
    )


class _Asker:
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __call__(self, query: str, parameters: list[Any] | None = None) -> Rows:
        rows: Rows = self._manifest.table(query, parameters or []).to_pylist()
        return rows


def _groups(manifest: Manifest, files: list[str]) -> Rows:
    """Lengths by what became of the row; prompt characters only where the prompt `files` can be
    read."""
    source = "read_parquet($1)" if files else "(SELECT 0::BIGINT AS id, '' AS conversation)"
    try:
        rows: Rows = manifest.table(
            _GROUPS.format(group=_GROUP, prompts=source), [files] if files else []
        ).to_pylist()
    except QueryError as error:
        if not files or "interrupted" in str(error):
            raise
        return _groups(manifest, [])
    return rows


_STAGES = """
SELECT y.stage, count(DISTINCT y.shard) AS shards, count(*) AS samples,
       sum(y.tokens)::BIGINT AS tokens, sum(y.raw_bytes)::BIGINT AS raw_bytes,
       sum(y.length)::BIGINT AS bytes
FROM payloads y JOIN state s ON s.id = y.id AND y.attempt =
     CASE y.stage WHEN 'generate' THEN s.generate_payload ELSE s.extract_payload END
GROUP BY y.stage ORDER BY y.stage DESC"""

_SOURCES = """
SELECT source, count(*) AS prompts,
       count(*) FILTER (generate_payload IS NOT NULL) AS completed,
       count(*) FILTER (state = 'extracted') AS extracted,
       count(*) FILTER (state = 'timed_out') AS timed_out,
       count(*) FILTER (state IN ('failed', 'rejected')) AS lost,
       count(*) FILTER (state = 'pending') AS pending,
       count(*) FILTER (off_policy) AS off_policy,
       coalesce(sum(prompt_tokens + completion_tokens), 0)::BIGINT AS tokens,
       coalesce(sum(tokens), 0)::BIGINT AS extracted_tokens,
       coalesce(sum(generate_length), 0)::BIGINT AS completion_bytes,
       coalesce(sum(extract_length), 0)::BIGINT AS bytes,
       avg(completion_tokens) AS mean_completion_tokens
FROM samples GROUP BY source ORDER BY prompts DESC, source"""

_SHARDS = f"""
SELECT CASE y.stage WHEN 'generate' THEN 'completions' ELSE 'hidden_states' END AS kind,
       y.shard AS number, coalesce(any_value(h.state), 'open') AS state, count(*) AS samples,
       count(*) FILTER (y.attempt =
           CASE y.stage WHEN 'generate' THEN s.generate_payload ELSE s.extract_payload END
       ) AS current_samples,
       sum(y.tokens)::BIGINT AS tokens, sum(y.raw_bytes)::BIGINT AS raw_bytes,
       sum(y.length)::BIGINT AS bytes
FROM payloads y JOIN state s USING (id)
LEFT JOIN shards h ON h.number = y.shard
     AND h.kind = CASE y.stage WHEN 'generate' THEN 'completions' ELSE 'hidden_states' END
GROUP BY ALL ORDER BY kind, number LIMIT {_SHARDS_SHOWN}"""

_LENGTHS = """
SELECT greatest(6, floor(log2(greatest(1, tokens))))::INTEGER AS power, count(*) AS samples,
       sum(tokens)::BIGINT AS tokens, sum(extract_length)::BIGINT AS bytes
FROM samples WHERE state = 'extracted' GROUP BY power ORDER BY power"""

_TIMEOUTS = """
t AS (SELECT id, count(*) FILTER (outcome = 'timed_out') AS timeouts,
      max(deadline_s) FILTER (outcome = 'timed_out') AS deadline_s
      FROM attempts WHERE stage = 'generate' GROUP BY id)"""

_GROUPS = (
    "WITH"
    + _TIMEOUTS
    + """
SELECT {group} AS name, count(*) AS rows, avg(length(p.conversation)) AS prompt_characters,
       avg(s.completion_tokens) AS mean, quantile_cont(s.completion_tokens, 0.5) AS p50,
       quantile_cont(s.completion_tokens, 0.9) AS p90, max(s.completion_tokens) AS longest,
       quantile_cont(t.deadline_s, 0.5) AS deadline_s
FROM samples s LEFT JOIN t USING (id) LEFT JOIN {prompts} p USING (id)
GROUP BY 1"""
)

_HISTOGRAM = (
    "WITH"
    + _TIMEOUTS
    + f"""
SELECT greatest(4, floor(log2(greatest(1, s.completion_tokens))))::INTEGER AS power,
       {_GROUP} AS name, count(*) AS rows
FROM samples s LEFT JOIN t USING (id) WHERE s.completion_tokens IS NOT NULL
GROUP BY ALL ORDER BY power"""
)

# Of rows that have no completion: how long their last request was waited for, and where.
_DEADLINES = """
SELECT a.endpoint, a.deadline_s, count(*) AS rows
FROM state s JOIN attempts a ON a.id = s.id AND a.stage = 'generate' AND a.attempt = s.attempts
WHERE s.state = 'timed_out' AND s.stage = 'generate' AND a.outcome = 'timed_out'
GROUP BY ALL ORDER BY ALL"""

_SPEEDS = """
SELECT endpoint, quantile_cont(completion_tokens / total_s, 0.5) AS tokens_per_s
FROM attempts WHERE outcome = 'generated' AND total_s > 0 AND completion_tokens > 0
GROUP BY endpoint ORDER BY endpoint"""

_ERRORS = "outcome IN ('timed_out', 'failed', 'rejected', 'transient', 'damaged', 'missing')"

_ERROR_CLASSES = f"""
SELECT a.stage, a.outcome, coalesce(a.error_class, '') AS error_class, count(*) AS attempts,
       count(DISTINCT a.id) AS rows,
       count(DISTINCT a.id) FILTER (s.state IN ('timed_out', 'failed', 'rejected')) AS still_lost,
       any_value(left(a.error, {_EXAMPLE_CHARACTERS})) AS example
FROM attempts a JOIN state s USING (id) WHERE {_ERRORS}
GROUP BY ALL ORDER BY attempts DESC, error_class"""

_ERROR_ENDPOINTS = f"""
SELECT stage, coalesce(endpoint, '') AS endpoint, count(*) AS attempts,
       count(*) FILTER (outcome = 'timed_out') AS timed_out,
       count(*) FILTER (outcome = 'failed') AS failed,
       count(*) FILTER (outcome = 'rejected') AS rejected,
       count(*) FILTER (outcome = 'transient') AS transient
FROM attempts WHERE {_ERRORS} OR outcome IN ('generated', 'extracted')
GROUP BY ALL ORDER BY stage DESC, endpoint"""

_MOMENT = "floor((started_at + coalesce(total_s, 0) - $1) / $2)::INTEGER"

_ERROR_TIMES = f"""
SELECT {_MOMENT} AS bin, outcome, count(*) AS attempts FROM attempts
WHERE {_ERRORS} AND started_at >= $1 AND endpoint IS NOT NULL GROUP BY ALL ORDER BY ALL"""

_WORK = f"""
SELECT {_MOMENT} AS bin, a.stage, count(*) AS samples,
       sum(CASE a.stage WHEN 'generate' THEN a.completion_tokens ELSE y.tokens END)::BIGINT
       AS tokens
FROM attempts a LEFT JOIN payloads y USING (id, stage, attempt)
WHERE a.outcome IN ('generated', 'extracted') AND a.started_at >= $1 AND a.endpoint IS NOT NULL
GROUP BY ALL ORDER BY ALL"""

# One row for each decision, with the readings it came from; thinned evenly where there are many.
_CONTROL = f"""
SELECT time, endpoint, "limit", running, waiting, kv_usage, tokens_per_s, decision
FROM (SELECT *, row_number() OVER (ORDER BY time, endpoint) AS n, count(*) OVER () AS total
      FROM control)
WHERE n % greatest(1, total // {_DECISIONS_READ}) = 0 ORDER BY n"""
