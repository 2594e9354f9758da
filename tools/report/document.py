"""From sums to the document of `report --json`: shares, forecasts, the bias picture. Pure.

Keys are stable. Sizes in bytes, times in Unix seconds or seconds, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmill.manifests.headroom import room_for_samples
from draftmill.tools.report.gather import GROUPS, Facts, Rows


def document(
    facts: Facts, status: Mapping[str, Any], *, dataset: str, now: float, snapshot: Any = None
) -> dict[str, Any]:
    """The whole report. `status` is the document of `status --json`; `snapshot` says what was
    read instead of the database while another process writes."""
    return {
        "dataset": dataset,
        "time": now,
        "snapshot": snapshot,
        "prompts": dict(status["prompts"]),
        "tokens": dict(status["tokens"]),
        "disk": disk(facts, status),
        "errors": errors(facts),
        "lengths": lengths(facts),
        "throughput": throughput(facts),
        "off_policy": off_policy(facts.sources),
        "codecs": dict(status.get("codecs") or {}),
        # Of lossy codecs, as it was measured while extracting.
        "codec_error": dict(status.get("codec_error") or {}),
    }


# -- disk ----------------------------------------------------------------------------------------


def disk(facts: Facts, status: Mapping[str, Any]) -> dict[str, Any]:
    """Where the bytes are, and where they are going."""
    sources = [
        {
            "source": row["source"],
            "samples": row["extracted"],
            "tokens": row["extracted_tokens"],
            "completion_bytes": row["completion_bytes"],
            "hidden_states_bytes": row["bytes"],
        }
        for row in facts.sources
    ]
    buckets = [
        {"from_tokens": low, "to_tokens": high, **_kept(row, "samples", "tokens", "bytes")}
        for row in facts.lengths
        for low, high in [_bucket(row["power"], 6)]
    ]
    return {
        **status["disk"],
        "by_stage": [
            {**row, "bytes_per_token": _ratio(row["bytes"], row["tokens"], 1)}
            for row in facts.stages
        ],
        "by_source": sources,
        "by_shard": [
            {**row, "ratio": _ratio(row["raw_bytes"], row["bytes"], 3)} for row in facts.shards
        ],
        "by_length": buckets,
        "forecast": forecast(facts, status),
    }


def forecast(facts: Facts, status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Bytes when every row that can still be extracted is. None before anything is stored.

    Rows of a source are taken to be as long as those of the same source that are there: sources
    differ in length, and the short answers of all of them come first.
    """
    stored = sum(row["bytes"] for row in facts.sources)
    tokens = sum(row["extracted_tokens"] for row in facts.sources)
    if not stored or not tokens:
        return None
    per_token = stored / tokens
    completed = sum(row["completed"] for row in facts.sources)
    mean_of_all = sum(row["tokens"] for row in facts.sources) / max(1, completed)
    left = left_tokens = 0
    for row in facts.sources:
        to_come = row["prompts"] - row["extracted"] - row["lost"]
        mean = row["tokens"] / row["completed"] if row["completed"] else mean_of_all
        left += to_come
        left_tokens += round(to_come * mean)
    disk = status["disk"]
    used = disk["used_bytes"]
    at_end = used + round(left_tokens * per_token)
    room = room_for_samples(
        limit_bytes=disk["budget_bytes"], used_bytes=used, free_bytes=disk["free_bytes"]
    )
    return {
        "samples_left": left,
        "tokens_left": left_tokens,
        "stored_bytes_per_token": round(per_token, 1),
        "bytes_at_completion": at_end,
        "fits": at_end - used <= room,
        "short_by_bytes": max(0, at_end - used - room),
        "samples_that_fit": left if at_end - used <= room else int(left * room / (at_end - used)),
    }


# -- errors --------------------------------------------------------------------------------------


def errors(facts: Facts) -> dict[str, Any]:
    """What went wrong, by kind, by server and over time."""
    by_time: dict[int, dict[str, int]] = {}
    for row in facts.error_times:
        by_time.setdefault(row["bin"], {})[row["outcome"]] = row["attempts"]
    wrong = ("timed_out", "failed", "rejected", "transient")
    return {
        "by_class": [dict(row) for row in facts.error_classes],
        "by_endpoint": [
            {**row, "error_share": _ratio(sum(row[name] for name in wrong), row["attempts"], 4)}
            for row in facts.error_endpoints
        ],
        "over_time": [
            {"time": _time(facts, number), **{name: found.get(name, 0) for name in wrong}}
            for number, found in sorted(by_time.items())
        ],
    }


# -- lengths -------------------------------------------------------------------------------------


def lengths(facts: Facts) -> dict[str, Any]:
    """Completed, recovered, truncated, timed-out and missing rows side by side."""
    found = {row["name"]: row for row in facts.groups}
    late = least_tokens(facts.deadlines, facts.speeds)
    groups = []
    for name in GROUPS:
        row = found.get(name, {})
        groups.append(
            {
                "group": name,
                "rows": row.get("rows", 0),
                "prompt_characters": _rounded(row.get("prompt_characters"), 0),
                **{key: _rounded(row.get(key), 1) for key in ("mean", "p50", "p90")},
                "longest": row.get("longest"),
                "at_least_tokens": late if name == "timed_out" else None,
                "deadline_s": _rounded(row.get("deadline_s"), 1),
            }
        )
    bars: dict[int, dict[str, int]] = {}
    for row in facts.histogram:
        bars.setdefault(row["power"], {})[row["name"]] = row["rows"]
    first, last = (min(bars), max(bars)) if bars else (0, -1)
    histogram = [
        {
            "from_tokens": _bucket(power, 4)[0],
            "to_tokens": _bucket(power, 4)[1],
            **{name: bars.get(power, {}).get(name, 0) for name in GROUPS[:3]},
        }
        for power in range(first, last + 1)
    ]
    return {"by_group": groups, "histogram": histogram, "bias": bias(facts, late)}


def least_tokens(deadlines: Rows, speeds: Rows) -> int | None:
    """Tokens that the median timed-out row had at least been written when it was given up.

    deadline x tokens/s of one request on that server (median of its completed requests): what the
    server would have written of any answer in that time, so the answer is longer.
    """
    if not speeds:
        return None
    speed = {row["endpoint"]: row["tokens_per_s"] for row in speeds}
    typical = sorted(speed.values())[len(speed) // 2]
    found: list[tuple[float, int]] = [
        (row["deadline_s"] * speed.get(row["endpoint"], typical), row["rows"])
        for row in deadlines
        if row["deadline_s"]
    ]
    total, seen = sum(rows for _, rows in found), 0
    for tokens, rows in sorted(found):
        seen += rows
        if 2 * seen >= total:
            return round(tokens)
    return None


def bias(facts: Facts, late: int | None) -> dict[str, Any]:
    """What the set loses when the rows without a completion stay away: length and sources."""
    rows = {row["name"]: row for row in facts.groups}
    named = [rows[name] for name in GROUPS[:3] if name in rows]
    # Rows of others' making may lack their lengths.
    there = [row for row in named if row["mean"] is not None]
    count = sum(row["rows"] for row in there)
    mean = sum(row["rows"] * row["mean"] for row in there) / count if count else None
    timed_out = rows.get("timed_out", {}).get("rows", 0)
    with_late = None
    if mean is not None and late is not None and timed_out:
        with_late = (mean * count + timed_out * max(late, mean)) / (count + timed_out)
    prompts = sum(row["prompts"] for row in facts.sources)
    done = sum(row["completed"] for row in facts.sources)
    return {
        "mean_completion_tokens": _rounded(mean, 1),
        "mean_with_timed_out_at_least": _rounded(with_late, 1),
        "by_source": [
            {
                "source": row["source"],
                **_kept(row, "prompts", "completed", "timed_out", "lost", "pending"),
                "timed_out_share": _ratio(row["timed_out"], row["prompts"] - row["pending"], 4),
                "share_of_prompts": _ratio(row["prompts"], prompts, 4),
                "share_of_completed": _ratio(row["completed"], done, 4),
                "mean_completion_tokens": _rounded(row["mean_completion_tokens"], 1),
            }
            for row in facts.sources
        ],
    }


# -- throughput ----------------------------------------------------------------------------------


def throughput(facts: Facts) -> dict[str, Any]:
    """Tokens per second of both stages over time, and what the controller decided."""
    by_stage: dict[str, dict[str, float]] = {}
    over_time = []
    for row in facts.work:
        tokens = row["tokens"] or 0
        over_time.append(
            {
                "time": _time(facts, row["bin"]),
                "stage": row["stage"],
                "samples": row["samples"],
                "tokens_per_s": round(tokens / facts.bin_s, 1),
            }
        )
        total = by_stage.setdefault(row["stage"], {"samples": 0, "tokens": 0, "busy_s": 0.0})
        total["samples"] += row["samples"]
        total["tokens"] += tokens
        total["busy_s"] += facts.bin_s
    return {
        "bin_s": round(facts.bin_s, 3),
        "by_stage": [
            {
                "stage": stage,
                "samples": total["samples"],
                "tokens": total["tokens"],
                "busy_s": round(total["busy_s"], 1),
                "tokens_per_s": round(total["tokens"] / total["busy_s"], 1),
            }
            for stage, total in sorted(by_stage.items(), reverse=True)
        ],
        "over_time": over_time,
        "control": [dict(row) for row in facts.control],
    }


def off_policy(sources: Rows) -> dict[str, Any]:
    """Samples whose completion is not known to be the target model's own."""
    prompts = sum(row["prompts"] for row in sources)
    count = sum(row["off_policy"] for row in sources)
    return {
        "prompts": count,
        "share": _ratio(count, prompts, 4),
        "by_source": [
            {"source": row["source"], "prompts": row["off_policy"]}
            for row in sources
            if row["off_policy"]
        ],
    }


def _time(facts: Facts, number: int) -> float:
    """The middle of a time bin, so that a point lies where its work was done."""
    return round((facts.started_at or 0.0) + (number + 0.5) * facts.bin_s, 3)


def _bucket(power: int, lowest: int) -> tuple[int, int]:
    return (0 if power == lowest else 2**power), 2 ** (power + 1) - 1


def _kept(row: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: row[key] for key in keys}


def _ratio(part: float | None, whole: float | None, digits: int) -> float | None:
    return round(part / whole, digits) if part is not None and whole else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
