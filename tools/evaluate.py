"""`draftmill eval`: accepted tokens per step of a draft, in vLLM, on prompts it has not seen."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from draftmill.builder.serving.command import ServeSettings
from draftmill.manifests.errors import UsageError
from draftmill.manifests.types import Prompt
from draftmill.tools.measure import (
    SPEC_TOKENS,
    Load,
    Measurement,
    document,
    held_out,
    measure_own_server,
    measure_url,
)
from draftmill.tools.render import say
from draftmill.tools.terminal import echo, echo_json

_COUNT = click.IntRange(1, 1 << 20)


@click.command("eval")
@click.argument("draft")
@click.option("--target", required=True, help="The target model: its folder, or its name.")
@click.option(
    "--prompts",
    required=True,
    multiple=True,
    metavar="FILE",
    help="Held-out prompts; give it once per source.",
)
@click.option("--limit", type=click.IntRange(min=1), help="At most so many prompts of each file.")
@click.option("--url", help="A server that runs target and draft already; else one is started.")
@click.option("--baseline-url", help="A server that runs the target alone, beside --url.")
@click.option("--name", help="The target's name on the server.")
@click.option(
    "--max-tokens", type=_COUNT, default=256, show_default=True, help="Longest completion."
)
@click.option("--concurrency", type=_COUNT, default=8, show_default=True, help="Requests at once.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Sampling; 0 is greedy.",
)
@click.option(
    "--k",
    "spec_tokens",
    type=_COUNT,
    default=SPEC_TOKENS,
    show_default=True,
    help="Draft tokens.",
)
@click.option("--baseline", is_flag=True, help="Also measure the target without a draft.")
@click.option("--server-args", default="", help="More arguments for the server.")
@click.option("--plot", metavar="FILE", help="Write a plot (PNG) there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with stable keys.")
def evaluate_command(
    draft: str,
    target: str,
    prompts: tuple[str, ...],
    limit: int | None,
    url: str | None,
    baseline_url: str | None,
    name: str | None,
    max_tokens: int,
    concurrency: int,
    temperature: float,
    spec_tokens: int,
    baseline: bool,
    server_args: str,
    plot: str | None,
    as_json: bool,
) -> None:
    """Measure DRAFT with its target in vLLM: accepted draft tokens per step, greedy.

    The figures also go into DRAFT's model card, where draftmill has written one.

    \b
    draftmill eval draft --target ./Kimi-K2.5 --prompts held_out.jsonl --baseline
    """
    from draftmill.trainer.checkpoint import resolve_draft  # brings torch

    if baseline_url and not url:
        raise UsageError("--baseline-url goes with --url; without a server, take --baseline")
    if baseline and url:
        raise UsageError("--baseline starts a server of its own; beside --url, name --baseline-url")
    rows = held_out(prompts, limit)
    folder = resolve_draft(draft)
    load = Load(max_tokens=max_tokens, concurrency=concurrency, temperature=temperature)
    if url:
        drafted, plain = asyncio.run(_at_urls(url, baseline_url, name, rows, load))
    else:
        settings = ServeSettings(args=tuple(shlex.split(server_args)))
        name = name or (Path(target).resolve().name if Path(target).is_dir() else target)

        def run(candidate: Path | None) -> Measurement:
            return asyncio.run(
                measure_own_server(
                    candidate,
                    target,
                    rows,
                    load,
                    settings=settings,
                    name=name,
                    run_folder=folder / ".serve",
                    spec_tokens=spec_tokens,
                )
            )

        drafted = run(folder)
        plain = run(None) if baseline else None
    found = document(drafted, plain)
    keep(found, folder, ", ".join(Path(p).name for p in prompts), Path(plot) if plot else None)
    if as_json:
        echo_json(found)
        return
    echo(f"{found['prompts']:,} prompts, {found['completion_tokens']:,} tokens")
    echo(_line("all", found))
    for source, part in found["by_source"].items():
        echo(_line(source, part))


async def _at_urls(
    url: str, baseline_url: str | None, name: str | None, rows: Sequence[Prompt], load: Load
) -> tuple[Measurement, Measurement | None]:
    drafted = await measure_url(url, name, rows, load, drafting=True)
    if baseline_url is None:
        return drafted, None
    return drafted, await measure_url(baseline_url, name, rows, load, drafting=False)


def keep(found: dict[str, Any], folder: Path, prompts: str, plot: Path | None) -> None:
    """Put the figures into the draft's model card, if it has one, and draw them."""
    from draftmill.trainer.model_card import ACCEPTANCE_PLOT, put_evaluation
    from draftmill.trainer.plots import plot_acceptance

    try:
        if put_evaluation(folder, found, prompts):
            plot_acceptance(found, folder / ACCEPTANCE_PLOT)
    except OSError as error:
        say(f"the model card in {folder} stays as it was: {error.strerror}")
    if plot is not None:
        plot_acceptance(found, plot)


def _line(label: str, part: dict[str, Any]) -> str:
    positions = " / ".join(f"{share:.3f}" for share in part["accepted_by_position"])
    speed = part["tokens_per_s"]
    line = (
        f"{label}: {part['accepted_per_step']:.3f} accepted per step (by position {positions}; "
        f"{part['drafts']:,} drafts), {speed['with_draft']:,.1f} tokens/s"
    )
    if speed["without_draft"]:
        line += f", {speed['without_draft']:,.1f} without draft"
    return line
