"""The report in words and tables, from its document; the same on a terminal and on a page. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmill.tools.render import duration
from draftmill.tools.report.disk_section import disk_section
from draftmill.tools.report.words import Grid, Section, clock, number, percent, share

_DECISIONS_SHOWN = 8
GROUP_NAMES = {
    "completed": "completed",
    "recovered": "completed after a timeout",
    "truncated": "truncated",
    "timed_out": "timed out",
    "missing": "missing",
}


def sections(found: Mapping[str, Any]) -> list[Section]:
    """All sections of a report, in reading order."""
    return [
        _overview(found),
        disk_section(found),
        _lengths(found),
        _errors(found),
        _throughput(found),
    ]


def snapshot_note(found: Mapping[str, Any]) -> str | None:
    """What to know when the figures are not those of the database itself."""
    snapshot = found["snapshot"]
    if snapshot is None:
        return None
    return (
        f"Process {snapshot['writer_pid']} is writing this dataset: these figures are from its "
        f"snapshot, {duration(snapshot['age_s'])} old."
    )


def _overview(found: Mapping[str, Any]) -> Section:
    prompts, tokens = found["prompts"], found["tokens"]
    total = prompts["total"]
    rows = [
        (name.replace("_", " "), f"{count:,}", percent(count, total))
        for name, count in prompts.items()
        if name != "total"
    ]
    lost = prompts["timed_out"] + prompts["failed"] + prompts["rejected"]
    text = (
        f"{total:,} prompts: {percent(prompts['extracted'], total)} have hidden states, "
        f"{percent(prompts['generated'], total)} wait for theirs, "
        f"{percent(prompts['pending'], total)} are still to be asked, {percent(lost, total)} "
        f"are lost for now. {tokens['extracted']:,} tokens can be trained on."
    )
    off = found["off_policy"]
    if off["prompts"]:
        text += (
            f" {off['prompts']:,} prompts ({percent(off['prompts'], total)}) are off-policy: "
            + ", ".join(f"{row['source']} {row['prompts']:,}" for row in off["by_source"])
            + "."
        )
    else:
        text += " No sample is off-policy."
    return Section(
        key="overview",
        title="Where it stands",
        text=text,
        grids=(Grid(title="Rows by state", columns=("state", "rows", "share"), rows=rows),),
        charts=("states",) if total else (),
    )


def _lengths(found: Mapping[str, Any]) -> Section:
    lengths = found["lengths"]
    groups = {row["group"]: row for row in lengths["by_group"]}
    rows = []
    for row in lengths["by_group"]:
        least = row["at_least_tokens"]
        rows.append(
            (
                GROUP_NAMES[row["group"]],
                f"{row['rows']:,}",
                number(row["mean"]) if least is None else f"> {least:,}",
                number(row["p50"]) if least is None else f"> {least:,}",
                number(row["p90"]),
                number(row["longest"]),
                number(row["prompt_characters"]),
            )
        )
    sources = [
        (
            row["source"],
            f"{row['prompts']:,}",
            share(row["share_of_prompts"]),
            share(row["share_of_completed"]),
            f"{row['timed_out']:,}",
            share(row["timed_out_share"]),
            number(row["mean_completion_tokens"]),
        )
        for row in lengths["bias"]["by_source"]
    ]
    return Section(
        key="lengths",
        title="Lengths, and what is missing",
        text=_bias(lengths, groups),
        grids=(
            Grid(
                title="Completion tokens, by what became of the row",
                columns=(
                    "rows that are", "rows", "mean", "median", "90 %", "longest", "prompt chars",
                ),
                rows=rows,
            ),
            Grid(
                title="Sources",
                columns=(
                    "source", "prompts", "of prompts", "of completed", "timed out", "of asked",
                    "mean tokens",
                ),
                rows=sources,
            ),
        ),
        charts=("lengths", "sources") if lengths["histogram"] else (),
    )  # fmt: skip


def _bias(lengths: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> str:
    late, bias = groups["timed_out"], lengths["bias"]
    parts = []
    if late["rows"] and late["at_least_tokens"]:
        parts.append(
            f"{late['rows']:,} timed-out rows are longer than {late['at_least_tokens']:,} tokens "
            "(their deadline at the speed of requests that finished), completed ones "
            f"{number(bias['mean_completion_tokens'])} in the mean."
        )
        parts.append(
            "Leaving them out makes the set shorter than the model is: with them the mean is at "
            f"least {number(bias['mean_with_timed_out_at_least'])}. "
            "`draftmill retry DATASET --timed-out` asks again."
        )
    elif late["rows"]:
        parts.append(f"{late['rows']:,} rows timed out; how long they are is not known.")
    else:
        parts.append("No row is timed out.")
    back = groups["recovered"]
    if back["rows"]:
        parts.append(
            f"{back['rows']:,} rows timed out once and completed later, with "
            f"{number(back['mean'])} tokens in the mean, against "
            f"{number(groups['completed']['mean'])} of those that needed no retry."
        )
    if cut := groups["truncated"]["rows"]:
        parts.append(f"{cut:,} completions are cut at their limit.")
    return " ".join(parts)


def _errors(found: Mapping[str, Any]) -> Section:
    errors = found["errors"]
    count = sum(row["attempts"] for row in errors["by_class"])
    lost = sum(row["still_lost"] for row in errors["by_class"])
    text = "No attempt went wrong."
    if count:
        worst = errors["by_class"][0]
        name = worst["error_class"] or worst["outcome"]
        text = (
            f"{count:,} attempts went wrong, most often {name} ({worst['attempts']:,}); "
            f"{lost:,} rows that had one are still without a sample."
        )
    return Section(
        key="errors",
        title="Errors",
        text=text,
        grids=(
            Grid(
                title="By class",
                columns=("stage", "outcome", "class", "for example", "attempts", "rows", "lost"),
                rows=[
                    (
                        row["stage"],
                        row["outcome"].replace("_", " "),
                        row["error_class"],
                        row["example"] or "",
                        f"{row['attempts']:,}",
                        f"{row['rows']:,}",
                        f"{row['still_lost']:,}",
                    )
                    for row in errors["by_class"]
                ],
                words=4,
            ),
            Grid(
                title="By server",
                columns=(
                    "stage", "server", "attempts", "timed out", "failed", "rejected", "transient",
                    "wrong",
                ),
                rows=[
                    (
                        row["stage"],
                        row["endpoint"],
                        *(
                            f"{row[name]:,}"
                            for name in ("attempts", "timed_out", "failed", "rejected", "transient")
                        ),
                        share(row["error_share"]),
                    )
                    for row in errors["by_endpoint"]
                ],
                words=2,
            ),
        ),
        charts=("errors",) if errors["over_time"] else (),
    )  # fmt: skip


def _throughput(found: Mapping[str, Any]) -> Section:
    throughput = found["throughput"]
    parts = [
        f"{row['stage']}: {row['tokens_per_s']:,.0f} tokens/s over {duration(row['busy_s'])} "
        f"of work ({row['tokens']:,} tokens)."
        for row in throughput["by_stage"]
    ]
    decisions = throughput["control"][-_DECISIONS_SHOWN:]
    charts = ["throughput"] if throughput["over_time"] else []
    charts += ["control"] if throughput["control"] else []
    return Section(
        key="throughput",
        title="Throughput and controller",
        text=" ".join(parts) or "Nothing has run yet.",
        grids=(
            Grid(
                title="The controller's last decisions",
                columns=("time", "server", "decision", "running", "waiting", "KV memory"),
                rows=[
                    (
                        clock(row["time"], seconds=True),
                        row["endpoint"] or "",
                        row["decision"] or "",
                        number(row["running"]),
                        number(row["waiting"]),
                        share(row["kv_usage"]),
                    )
                    for row in decisions
                ],
                words=3,
            ),
        ),
        charts=tuple(charts),
    )
