"""The report's section on disk: bytes by stage, source, length and shard; the forecast. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftmill.manifests.sizes import format_size
from draftmill.tools.report.words import Grid, Section, percent, span
from draftmill.tools.status.command import precision_line

_SHARDS_SHOWN = 12
STAGE_NAMES = {"generate": "completions", "extract": "hidden states"}


def disk_section(found: Mapping[str, Any]) -> Section:
    """Where the bytes are, and where they are going."""
    disk = found["disk"]
    grids = [
        Grid(
            title="By stage",
            columns=("stage", "shards", "samples", "tokens", "bytes", "bytes a token"),
            rows=[
                (
                    STAGE_NAMES[row["stage"]],
                    f"{row['shards']:,}",
                    f"{row['samples']:,}",
                    f"{row['tokens']:,}",
                    format_size(row["bytes"]),
                    "" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:,.0f}",
                )
                for row in disk["by_stage"]
            ],
        ),
        Grid(
            title="By source",
            columns=("source", "samples", "tokens", "completions", "hidden states"),
            rows=[
                (
                    row["source"],
                    f"{row['samples']:,}",
                    f"{row['tokens']:,}",
                    format_size(row["completion_bytes"]),
                    format_size(row["hidden_states_bytes"]),
                )
                for row in disk["by_source"]
            ],
        ),
        Grid(
            title="Hidden states by length of the sample",
            columns=("tokens", "samples", "bytes"),
            rows=[
                (span(row), f"{row['samples']:,}", format_size(row["bytes"]))
                for row in disk["by_length"]
            ],
        ),
        _shards(disk["by_shard"]),
        _codecs(found["codec_error"]),
    ]
    charts = ["disk"] if disk["forecast"] else []
    charts += ["bytes_by_length"] if disk["by_length"] else []
    return Section(
        key="disk",
        title="Disk",
        text=_forecast(disk) + _stored(found),
        grids=tuple(grids),
        charts=tuple(charts),
    )


def _stored(found: Mapping[str, Any]) -> str:
    return f" Stored as {precision_line(found)}." if found["codecs"] else ""


def _codecs(errors: Mapping[str, Any]) -> Grid:
    return Grid(
        title="Error of lossy storage, measured while extracting",
        columns=("codec", "relative error by layer", "KL of the next token", "samples measured"),
        rows=[
            (
                codec,
                ", ".join(
                    f"{layer}: {error:.3f}" for layer, error in row["relative_error"].items()
                ),
                "" if row["kl_nats"] is None else f"{row['kl_nats']:.1e} nats",
                f"{row['samples']:,}",
            )
            for codec, row in errors.items()
        ],
        words=2,
    )


def _shards(shards: Sequence[Mapping[str, Any]]) -> Grid:
    largest = sorted(shards, key=lambda row: -row["bytes"])[:_SHARDS_SHOWN]
    hidden = len(shards) - len(largest)
    return Grid(
        title=f"By shard (the {len(largest)} largest of {len(shards):,})" if hidden else "By shard",
        columns=("shard", "state", "samples", "in use", "bytes", "ratio"),
        rows=[
            (
                f"{row['kind']}/{row['number']:06d}",
                row["state"],
                f"{row['samples']:,}",
                percent(row["current_samples"], row["samples"]),
                format_size(row["bytes"]),
                "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            )
            for row in largest
        ],
        words=2,
    )


def _forecast(disk: Mapping[str, Any]) -> str:
    used = format_size(disk["used_bytes"])
    budget = disk["budget_bytes"]
    text = f"{used} used" + (f" of {format_size(budget)}." if budget else ", no budget set.")
    ahead = disk["forecast"]
    if ahead is None:
        return f"{text} Nothing is extracted yet, so there is no forecast: draftmill estimate."
    text += (
        f" {ahead['samples_left']:,} samples are to come, {ahead['tokens_left']:,} tokens at "
        f"{ahead['stored_bytes_per_token']:,.0f} bytes: {format_size(ahead['bytes_at_completion'])}"
        " at the end."
    )
    if ahead["fits"]:
        return f"{text} They fit."
    return (
        f"{text} That is {format_size(ahead['short_by_bytes'])} too much: "
        f"{ahead['samples_that_fit']:,} of them fit."
    )
