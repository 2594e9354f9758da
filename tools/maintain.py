"""`draftmill retry`, `verify` and `evict`: what is done to a dataset between runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from draftmill.manifests import maintenance
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import UsageError
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.sizes import format_size, parse_size
from draftmill.manifests.verify import VerifyReport, verify
from draftmill.tools import settings
from draftmill.tools.render import say
from draftmill.tools.terminal import echo, echo_json


class _TokenRange(click.ParamType[tuple[int | None, int | None]]):
    """`MIN..MAX`, either of which may be left out, as a pair."""

    name = "MIN..MAX"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int | None, int | None]:
        if isinstance(value, tuple):
            return value
        low, dots, high = str(value).partition("..")
        try:
            least, most = (int(each) if each.strip() else None for each in (low, high))
        except ValueError:
            least = most = None
        known = [each for each in (least, most) if each is not None]
        if not dots or not known or known != sorted(known) or known[-1] >= 1 << 63:
            self.fail(f"{value!r} is no range of tokens; write 100..2000, 4000.. or ..50")
        return least, most


def _check_known(manifest: Manifest, what: str, column: str, table: str, given: str | None) -> None:
    """A name that is nowhere is a typing error: it must not pass for "nothing to do"."""
    if given is None:
        return
    query = f"SELECT DISTINCT {column} FROM {table} WHERE {column} IS NOT NULL ORDER BY 1"
    known = [row[0] for row in manifest.rows(query)]
    if given not in known:
        listed = ", ".join(known[:12]) or "none"
        raise UsageError(f"no row has the {what} {given!r}; there are: {listed}")


def _matching(
    manifest: Manifest, chosen: maintenance.RowFilter
) -> tuple[list[maintenance.Match], int]:
    _check_known(manifest, "source", "source", "prompts", chosen.source)
    _check_known(manifest, "error class", "error_class", "attempts", chosen.error_class)
    return maintenance.matching(manifest, chosen)


@click.command("retry")
@click.argument("dataset")
@click.option("--timed-out", is_flag=True, help="Rows whose deadline passed.")
@click.option("--failed", is_flag=True, help="Rows that a server refused or broke on.")
@click.option("--rejected", is_flag=True, help="Rows whose sample was not usable.")
@click.option("--truncated", is_flag=True, help="Rows whose completion was cut by its limit.")
@click.option("--stage", type=click.Choice(["generate", "extract"]), help="Only this stage.")
@click.option("--source", help="Only rows of this source.")
@click.option(
    "--error-class", help="Only rows whose last error is of this class, or that this gate rejected."
)
@click.option(
    "--prompt-tokens", type=_TokenRange(), help="Only prompts of this length, e.g. 2000.. or ..500."
)
@click.option(
    "--completion-tokens", type=_TokenRange(), help="Only rows whose last completion was so long."
)
@click.option("--dry-run", is_flag=True, help="Only say which rows would be asked again.")
def retry_command(
    dataset: str,
    timed_out: bool,
    failed: bool,
    rejected: bool,
    truncated: bool,
    stage: str | None,
    source: str | None,
    error_class: str | None,
    prompt_tokens: tuple[int | None, int | None] | None,
    completion_tokens: tuple[int | None, int | None] | None,
    dry_run: bool,
) -> None:
    """Put rows of DATASET back, so that the next run asks for them again. History stays.

    \b
    draftmill retry DATASET --timed-out --failed
    draftmill retry DATASET --rejected --error-class repetition --dry-run
    """
    flags = {"timed_out": timed_out, "failed": failed, "rejected": rejected}
    states = [name for name, wanted in flags.items() if wanted]
    if not states and not truncated:
        raise UsageError("say what to retry: --timed-out, --failed, --rejected or --truncated")
    chosen = maintenance.RowFilter(
        states=states,
        truncated=truncated,
        stage=stage,
        source=source,
        error_class=error_class,
        prompt_tokens=prompt_tokens or (None, None),
        completion_tokens=completion_tokens or (None, None),
    )
    opened = Dataset.open(dataset)
    loaded = settings.load(opened)
    if dry_run:
        with opened.reader() as reader:
            matches, unknown = _matching(reader.manifest, chosen)
        _print_matches(matches, unknown)
        echo(f"{len(matches):,} rows would be asked again")
        return
    with opened.writer(**settings.writer_options(opened, loaded)) as writer:
        matches, unknown = _matching(writer.manifest, chosen)
        count = maintenance.retry(writer, [match.id for match in matches])
        limits = writer.settings_of("generate")
    _print_matches(matches, unknown)
    echo(f"{count:,} rows will be asked again")
    if truncated and limits.get("max_completion_tokens") == loaded.generate.max_completion_tokens:
        say(
            f"max_completion_tokens is still {loaded.generate.max_completion_tokens}: truncated "
            "completions will be cut again unless you raise it before the next run"
        )


def _print_matches(matches: list[maintenance.Match], unknown: int) -> None:
    kinds = Counter(match[1:] for match in matches)
    for (state, stage, error_class), count in kinds.most_common():
        if state in ("generated", "extracted"):
            echo(f"{count:,} truncated")
        else:
            why = f" ({error_class})" if error_class else ""
            echo(f"{count:,} {state.replace('_', ' ')} at {stage}{why}")
    if unknown:
        say(f"{unknown:,} rows left out: no server answered them, so their length is not known")


@click.command("verify")
@click.argument("dataset")
@click.option("--repair", is_flag=True, help="Put damaged rows back; rebuild a lost manifest.")
@click.option("--deep", is_flag=True, help="Also decode every sample and look for NaN and Inf.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Shards checked at a time.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document with stable keys.")
@click.pass_context
def verify_command(
    ctx: click.Context, dataset: str, repair: bool, deep: bool, threads: int, as_json: bool
) -> None:
    """Check every byte of DATASET against its checksum and every row against its bytes.

    \b
    draftmill verify DATASET
    draftmill verify DATASET --repair
    """
    opened = Dataset.open(dataset)
    if repair:
        with opened.writer(**settings.writer_options(opened, settings.load(opened))) as writer:
            for line in writer.recovery.lines():
                say(line)
            report = verify(opened.path, writer.manifest, threads=threads, deep=deep)
            maintenance.repair(writer, report)
    else:
        with opened.reader() as reader:
            report = verify(opened.path, reader.manifest, threads=threads, deep=deep)
    if as_json:
        echo_json(report.document())
    else:
        _print_report(report)
    if not report.ok:
        if not as_json:
            say(_advice(dataset, report, repair))
        ctx.exit(1)


def _advice(dataset: str, report: VerifyReport, repaired: bool) -> str:
    """What helps against the faults that are left."""
    if repaired or all(fault.shard.startswith("prompts/") for fault in report.damaged):
        return "what is left is in no other file: restore these files from a copy"
    return f"draftmill verify {dataset} --repair puts these rows back to be made again"


def _print_report(report: VerifyReport) -> None:
    for fault in report.damaged:
        whose = "" if fault.sample is None else f", sample {fault.sample}"
        end = fault.offset + fault.length
        echo(f"damaged: {fault.shard} bytes {fault.offset}..{end}{whose}: {fault.reason}")
    for fault in report.unused:
        end = fault.offset + fault.length
        echo(f"damage in unused bytes: {fault.shard} bytes {fault.offset}..{end}")
    size, count = format_size(report.bytes_checked), len(report.damaged)
    echo(
        f"{report.samples_checked:,} completions and hidden states, {size} checked: "
        + ("ok" if not count else f"{count:,} fault{'s' if count > 1 else ''}")
        + (f", {report.repaired} repaired" if report.repaired else "")
    )


@click.command("evict")
@click.argument("dataset")
@click.option("--bytes", "size", help='Free at least this much, e.g. "200GB".')
@click.option("--all", "everything", is_flag=True, help="All hidden states.")
@click.option(
    "--policy",
    type=click.Choice(["oldest", "longest"]),
    default="oldest",
    show_default=True,
    help="Which shards go first.",
)
@click.option("--source", help="Only shards that hold samples of this source.")
def evict_command(
    dataset: str, size: str | None, everything: bool, policy: str, source: str | None
) -> None:
    """Free hidden states of DATASET in whole shards; completions are kept.

    The rows go back to `generated`: the next extract makes their hidden states again.

    \b
    draftmill evict DATASET --bytes 200GB
    """
    if bool(size) == everything:
        raise UsageError("say how much to free: either --bytes SIZE or --all")
    opened = Dataset.open(dataset)
    try:
        wanted = None if size is None else parse_size(size)
    except ValueError as error:
        raise UsageError(f"--bytes: {error}") from error
    with opened.writer(**settings.writer_options(opened, settings.load(opened))) as writer:
        _check_known(writer.manifest, "source", "source", "prompts", source)
        shards, rows, freed = maintenance.evict(writer, wanted, policy=policy, source=source)
    echo(f"{shards:,} shards removed, {format_size(freed)} freed, {rows:,} rows to extract")
