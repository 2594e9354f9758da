"""`draftmill serve`, `generate`, `extract` and `build`: filling a dataset from vLLM servers."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from draftmill.builder.budget import Budget
from draftmill.builder.extraction.stage import Layers, extract
from draftmill.builder.generation.stage import generate
from draftmill.builder.progress import StageReport
from draftmill.builder.serving.launcher import Server
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import UsageError
from draftmill.manifests.open_files import allow_many
from draftmill.manifests.target.target import find_folder
from draftmill.manifests.writer import DatasetWriter
from draftmill.tools.account import budget_account
from draftmill.tools.render import Display, say, stage_line
from draftmill.tools.settings import (
    Settings,
    load,
    staging_folder,
    target_weights,
    writer_options,
)
from draftmill.tools.terminal import echo
from draftmill.tools.train import make_vocab
from draftmill.tools.turns import Kind, turns

_RESTARTS = 3

URLS = click.option(
    "--url", "urls", multiple=True, metavar="URL", help="A server; give it once per server."
)
WEIGHTS = click.option(
    "--weights", metavar="DIR", help="The target's config and weights, for the canary."
)


def weights_folder(given: str | None) -> str | None:
    """The folder of `--weights`; ConfigError if there is no model in it."""
    return None if given is None else str(find_folder(given))


def exit_code(reports: Sequence[StageReport], left: dict[str, int]) -> int:
    """The documented exit code: 130 interrupted, 3 budget, 1 stopped, 4 rows left, 0 done."""
    if any(report.interrupted for report in reports):
        return 130
    if any(report.over_budget for report in reports):
        return 3
    if any(report.stopped for report in reports):
        return 1
    return 4 if left["timed_out"] or left["failed"] else 0


def target_argument(settings: Settings) -> str:
    """What a server is to load: the folder if it is here, else the name."""
    return settings.target.path or settings.target.model


async def run_generate(
    writer: DatasetWriter, settings: Settings, urls: Sequence[str], staging: Path
) -> StageReport:
    """The generate stage, with its progress on the screen."""
    chosen = settings.generate
    if chosen.model is None:
        chosen = replace(chosen, model=settings.target.model)
    with Display("generate") as show:
        report = await generate(writer, chosen, urls, show, budget=_budget(writer, staging))
    say(stage_line(report))
    return report


async def run_extract(
    writer: DatasetWriter, settings: Settings, urls: Sequence[str], staging: Path
) -> StageReport:
    """The extract stage, with its progress on the screen."""
    target = settings.target
    with Display("extract") as show:
        report = await extract(
            writer,
            settings.extract,
            urls,
            model=settings.generate.model or target.model,
            layers=Layers(layer_ids=target.extraction_layer_ids, hidden_size=target.hidden_size),
            staging=staging,
            budget=_budget(writer, staging),
            on_progress=show,
            target=target_weights(settings),
            say=say,
        )
    say(stage_line(report))
    return report


def _budget(writer: DatasetWriter, staging: Path) -> Budget:
    """What is left in a staging folder counts at either stage."""
    return Budget(limit_bytes=writer.budget_bytes, dataset=writer.dataset.path, staging=staging)


async def run_stage(
    stage: Kind, writer: DatasetWriter, settings: Settings, urls: Sequence[str], staging: Path
) -> StageReport:
    """One stage, on servers that are there."""
    run = run_generate if stage == "generate" else run_extract
    return await run(writer, settings, urls, staging)


async def serve_and_run(
    stages: Sequence[Kind], writer: DatasetWriter, settings: Settings, staging: Path
) -> list[StageReport]:
    """Start a server for `stages`, or find it running, run them in turn and stop the server.

    It is the last stage's: an extraction server can tokenise for generate. One that dies is started
    again, a few times: the stage then goes on where it was.
    """

    async def work(server: Server) -> list[StageReport]:
        reports: list[StageReport] = []
        for stage in stages:
            reports.append(await run_stage(stage, writer, settings, [server.url], staging))
            if ended_early(reports[-1]):
                break
        return reports

    for restarts_left in reversed(range(_RESTARTS + 1)):
        async with _server(stages[-1], writer, settings, staging) as server:
            stage, death = asyncio.create_task(work(server)), asyncio.create_task(server.died())
            try:
                await asyncio.wait((stage, death), return_when=asyncio.FIRST_COMPLETED)
                if stage.done() or not restarts_left:
                    return await stage
                error = death.result()
            finally:
                for task in (stage, death):
                    task.cancel()
                await asyncio.gather(stage, death, return_exceptions=True)
        say(f"{error}\nstarting it again")
    raise AssertionError("unreachable")


def _server(kind: Kind, writer: DatasetWriter, settings: Settings, staging: Path) -> Server:
    model = target_argument(settings)
    name = settings.generate.model or settings.target.model
    run_folder = writer.dataset.path
    if kind == "generate":
        return Server.generation(
            model, settings.serve, name=name, run_folder=run_folder, on_wait=say
        )
    return Server.extraction(
        model,
        settings.serve,
        name=name,
        layer_ids=settings.target.extraction_layer_ids,
        staging=staging,
        run_folder=run_folder,
        on_wait=say,
    )


def build(
    opened: Dataset, settings: Settings, stages: Sequence[Kind], urls: dict[Kind, tuple[str, ...]]
) -> tuple[list[StageReport], dict[str, int]]:
    """Run stages one after the other; a stage without URLs starts its own server."""
    allow_many()
    reports: list[StageReport] = []
    staging = staging_folder(opened, settings)
    with opened.writer(**writer_options(opened, settings)) as writer:
        for line in writer.recovery.lines():
            say(line)
        for turn in turns(stages, urls, writer):
            if turn[-1] == "extract" and not urls["extract"]:
                staging.mkdir(parents=True, exist_ok=True)
            if urls[turn[0]]:
                given = run_stage(turn[0], writer, settings, urls[turn[0]], staging)
                reports.append(asyncio.run(given))
            else:
                reports += asyncio.run(serve_and_run(turn, writer, settings, staging))
            if ended_early(reports[-1]):
                break
        summary = writer.summary()
        if any(report.over_budget for report in reports):
            say(_account(writer, settings, summary))
    return reports, summary["prompts"]


def ended_early(report: StageReport) -> bool:
    """Whether what comes after this stage should not begin."""
    return bool(report.interrupted or report.stopped or report.over_budget)


def _account(writer: DatasetWriter, settings: Settings, summary: dict[str, Any]) -> str:
    target, codec = settings.target, settings.extract.codec
    left, left_tokens = writer.to_extract(settings.extract.max_seq_len)
    return budget_account(
        summary,
        left=left,
        left_tokens=left_tokens,
        bytes_per_token=2 * target.hidden_size * len(target.extraction_layer_ids),
        codec=codec,
    )


def finish(ctx: click.Context, reports: Sequence[StageReport], left: dict[str, int]) -> None:
    """Say what is left and end with the documented exit code."""
    counts = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" for name, count in left.items() if count
    )
    echo(f"dataset: {counts or 'empty'}")
    if left["timed_out"] or left["failed"]:
        say(f"`draftmill retry {ctx.params['dataset']} --timed-out --failed` asks for these again")
    if left["extracted"] and not (left["pending"] or left["generated"]):
        dataset = shlex.quote(ctx.params["dataset"])
        say(f"next: draftmill train {dataset} --output {dataset}-draft")
    ctx.exit(exit_code(reports, left))


@click.command("generate")
@click.argument("dataset")
@URLS
@click.option("--serve", is_flag=True, help="Start the server, and stop it at the end.")
@click.option("--concurrency", type=int, help="Requests at once on each server.")
@click.option("--timeout", "timeout_s", type=float, help="Seconds that a request may take.")
@click.option(
    "--reasoning",
    type=click.Choice(["any", "required", "drop"]),
    help="Reasoning text: kept if there is some, required, or dropped.",
)
@click.pass_context
def generate_command(
    ctx: click.Context,
    dataset: str,
    urls: tuple[str, ...],
    serve: bool,
    concurrency: int | None,
    timeout_s: float | None,
    reasoning: str | None,
) -> None:
    """Have the target model answer every pending prompt of DATASET.

    \b
    draftmill generate DATASET --url http://127.0.0.1:8000
    """
    _one_way(urls, serve)
    opened = Dataset.open(dataset)
    given = {"concurrency": concurrency, "timeout_s": timeout_s, "reasoning": reasoning}
    settings = load(opened, generate=given)
    finish(ctx, *build(opened, settings, ["generate"], {"generate": urls, "extract": ()}))


@click.command("extract")
@click.argument("dataset")
@URLS
@click.option("--serve", is_flag=True, help="Start the server, and stop it at the end.")
@click.option("--staging", metavar="DIR", help="Folder that the server writes into.")
@WEIGHTS
@click.option("--concurrency", type=int, help="Requests at once on each server.")
@click.option("--codec", help="How hidden states are stored.")
@click.option("--disk-budget", help='e.g. "3TB" or "80%".')
@click.pass_context
def extract_command(
    ctx: click.Context,
    dataset: str,
    urls: tuple[str, ...],
    serve: bool,
    staging: str | None,
    weights: str | None,
    concurrency: int | None,
    codec: str | None,
    disk_budget: str | None,
) -> None:
    """Fetch hidden states of every generated sample of DATASET, within the disk budget.

    \b
    draftmill extract DATASET --url http://127.0.0.1:8001 --staging /dev/shm/staging
    """
    _one_way(urls, serve)
    opened = Dataset.open(dataset)
    given = {"staging": staging, "concurrency": concurrency, "codec": codec}
    settings = load(
        opened,
        extract=given,
        dataset={"disk_budget": disk_budget},
        target={"path": weights_folder(weights)},
    )
    finish(ctx, *build(opened, settings, ["extract"], {"generate": (), "extract": urls}))


@click.command("build")
@click.argument("dataset")
@click.option("--serve", is_flag=True, help="Start and stop both servers, one after the other.")
@click.option("--url", "urls", multiple=True, help="A generation server; once per server.")
@click.option("--extract-url", "extract_urls", multiple=True, help="An extraction server.")
@click.pass_context
def build_command(
    ctx: click.Context,
    dataset: str,
    serve: bool,
    urls: tuple[str, ...],
    extract_urls: tuple[str, ...],
) -> None:
    """Generate, extract and choose the vocabulary: everything that is still to do in DATASET.

    \b
    draftmill build DATASET --serve
    draftmill build DATASET --url http://a:8000 --url http://b:8000 --extract-url http://c:8001
    """
    if serve and (urls or extract_urls):
        raise UsageError("--serve starts its own servers; leave --url and --extract-url out")
    if not serve and not urls and not extract_urls:
        raise UsageError("give --serve, or servers with --url and --extract-url")
    opened = Dataset.open(dataset)
    settings = load(opened)
    stages: list[Kind] = ["generate", "extract"]
    if not serve:
        given: dict[Kind, tuple[str, ...]] = {"generate": urls, "extract": extract_urls}
        stages = [stage for stage in stages if given[stage]]
    reports, left = build(opened, settings, stages, {"generate": urls, "extract": extract_urls})
    if left["extracted"] and settings.target.path:
        make_vocab(opened.path, settings)
    elif left["extracted"]:
        say(f"vocabulary not made, the target's folder is not known: draftmill vocab {dataset}")
    finish(ctx, reports, left)


def _one_way(urls: tuple[str, ...], serve: bool) -> None:
    if serve == bool(urls):
        raise UsageError("give --url for running servers, or --serve to start one")
