"""The figures of a dataset as `status --json` prints them; keys are documented and stable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftmill.manifests import files
from draftmill.manifests.codec.names import CODECS, is_lossless
from draftmill.manifests.codec_error import ErrorSums
from draftmill.manifests.errors import NOT_UNDERSTOOD
from draftmill.manifests.headroom import room_for_samples
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.shards.record import Record
from draftmill.manifests.types import STATES


def summarize(
    folder: Path,
    manifest: Manifest,
    *,
    budget_bytes: int | None = None,
    staging: Path | None = None,
) -> dict[str, Any]:
    """Rows per state, tokens, and where the bytes are. Sizes in bytes, measured now."""
    states = dict(manifest.rows("SELECT state::VARCHAR, count(*) FROM state GROUP BY state"))
    tokens = manifest.rows(
        "SELECT coalesce(sum(prompt_tokens), 0)::BIGINT, "
        "coalesce(sum(completion_tokens), 0)::BIGINT, "
        "count(*) FILTER (finish_reason = 'length') "
        "FROM state s JOIN attempts a ON a.id = s.id AND a.stage = 'generate' "
        "AND a.attempt = s.generate_payload AND a.outcome = 'generated'"
    )[0]
    extracted, raw, stored, cut = manifest.rows(
        "SELECT coalesce(sum(y.tokens), 0)::BIGINT, coalesce(sum(y.raw_bytes), 0)::BIGINT, "
        "coalesce(sum(y.length), 0)::BIGINT, count(*) FILTER (y.tokens < g.tokens) "
        "FROM state s JOIN payloads y ON y.id = s.id AND y.stage = 'extract' "
        "AND y.attempt = s.extract_payload "
        "LEFT JOIN payloads g ON g.id = s.id AND g.stage = 'generate' "
        "AND g.attempt = s.generate_payload"
    )[0]
    sources = _sources(manifest)
    hidden_states_bytes = files.folder_bytes(folder / "hidden_states")
    staging_bytes = files.folder_bytes(staging) if staging is not None else 0
    used = files.folder_bytes(folder)
    if staging is not None and folder.resolve() not in staging.resolve().parents:
        used += staging_bytes
    free = shutil.disk_usage(folder).free
    room = room_for_samples(limit_bytes=budget_bytes, used_bytes=used, free_bytes=free)
    samples = states.get("extracted", 0)
    return {
        "prompts": {"total": sum(states.values()), **{s: states.get(s, 0) for s in STATES}},
        "tokens": {
            "prompt": tokens[0],
            "completion": tokens[1],
            "extracted": extracted,
        },
        "truncated": tokens[2],
        "cut_at_max_seq_len": cut,
        "off_policy": _off_policy(manifest, sources),
        "sources": sources,
        "rejected": _rejected(manifest),
        "codecs": {
            name: {"lossless": is_lossless(name)}
            for name in (codecs_used(manifest) if extracted else ())
        },
        "codec_error": {name: sums.figures() for name, sums in codec_errors(manifest).items()},
        "disk": {
            "budget_bytes": budget_bytes,
            "used_bytes": used,
            "completions_bytes": files.folder_bytes(folder / "completions"),
            "hidden_states_bytes": hidden_states_bytes,
            "manifest_bytes": sum(
                path.stat().st_size for path in folder.glob("manifest.*") if path.is_file()
            ),
            "staging_bytes": staging_bytes,
            "free_bytes": free,
            "bytes_per_token": round(stored / extracted, 1) if extracted else None,
            "raw_bytes_per_token": round(raw / extracted, 1) if extracted else None,
            "compression_ratio": round(raw / stored, 3) if stored else None,
            "samples_that_still_fit": int(room // (stored / samples)) if stored else None,
        },
    }


def _sources(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Rows per state of each source, and how many of them have given answers."""
    found: dict[str, dict[str, int]] = {}
    for source, state, given, count in manifest.rows(
        "SELECT source, state::VARCHAR, off_policy, count(*) FROM prompts JOIN state USING (id) "
        "GROUP BY ALL ORDER BY source"
    ):
        row = found.setdefault(source, {"total": 0, **dict.fromkeys(STATES, 0), "off_policy": 0})
        row["total"] += count
        row[state] += count
        row["off_policy"] += count if given else 0
    return found


def _off_policy(manifest: Manifest, sources: dict[str, dict[str, int]]) -> dict[str, int]:
    """Rows of mode prefill: their answers are not the target model's own."""
    found = (0, 0, 0)
    if any(row["off_policy"] for row in sources.values()):  # few datasets have them: it costs
        found = manifest.rows(
            "SELECT count(*), coalesce(sum(completion_tokens), 0)::BIGINT, "
            "count(*) FILTER (state = 'extracted') FROM samples WHERE off_policy"
        )[0]
    return dict(zip(("prompts", "completion_tokens", "extracted"), found, strict=True))


def _rejected(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Rows that are rejected now, per stage and gate."""
    found: dict[str, dict[str, int]] = {}
    for stage, gate, count in manifest.rows(
        "SELECT a.stage, a.error_class, count(*) AS n FROM state s JOIN attempts a "
        "ON a.id = s.id AND a.attempt = s.attempts AND a.outcome = 'rejected' "
        "WHERE s.state = 'rejected' GROUP BY ALL ORDER BY a.stage DESC, n DESC"
    ):
        found.setdefault(stage, {})[gate or "unknown"] = count
    return found


def codec_errors(manifest: Manifest) -> dict[str, ErrorSums]:
    """What lossy codecs were measured to cost in this dataset, by codec.

    Sums that cannot be read count as not measured: no sample hangs on them.
    """
    prefix = "codec_error."
    rows = manifest.rows("SELECT key, value FROM meta WHERE starts_with(key, ?)", [prefix])
    found = {}
    for key, value in sorted(rows):
        with suppress(*NOT_UNDERSTOOD):
            found[key[len(prefix) :]] = ErrorSums.read(value)
    return found


def add_codec_error(manifest: Manifest, codec: str, found: ErrorSums) -> None:
    """Add what a lossy codec was measured to cost to what is known of it."""
    sums = codec_errors(manifest).get(codec, ErrorSums()) + found
    with manifest.transaction("codec_error"):
        manifest.set_meta(f"codec_error.{codec}", json.dumps(asdict(sums)))


def codecs_used(manifest: Manifest) -> list[str]:
    """Codecs that hidden states of this dataset were stored with; evicted ones count."""
    prefix = "codec."
    rows = manifest.rows("SELECT key FROM meta WHERE starts_with(key, ?) ORDER BY key", [prefix])
    return [key[len(prefix) :] for (key,) in rows]


def note_codecs(manifest: Manifest, records: Iterable[Record]) -> None:
    """Put the codecs of these records among those used, before the records become current."""
    names = {str(each.content.get("codec")) for each in records if each.stage == "extract"}
    names &= set(CODECS)
    if names and (fresh := names.difference(codecs_used(manifest))):
        with manifest.transaction("codecs"):
            for name in fresh:
                manifest.set_meta(f"codec.{name}", "")
