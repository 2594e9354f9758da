"""`draftmill eval`: accepted tokens per step of a draft, in vLLM, on prompts it has not seen."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from draftmill.builder.requests.client import TargetClient
from draftmill.builder.serving.command import ServeSettings
from draftmill.builder.serving.launcher import Server
from draftmill.builder.sources.read import read_source
from draftmill.manifests.errors import PermanentError, ServerError, SourceFileError, TransientError
from draftmill.manifests.types import Prompt
from draftmill.tools.render import say
from draftmill.trainer.acceptance import Acceptance, by_source, from_metrics, total

SPEC_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one server did on the held-out prompts."""

    by_source: dict[str, Acceptance]
    completion_tokens: int
    seconds: float
    prompts: int
    failed: int

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0


async def measure(
    client: TargetClient,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    concurrency: int,
    temperature: float = 0.0,
) -> Measurement:
    """Ask every prompt once and read the server's counters around each source.

    The counters belong to the whole server: nobody else may use it meanwhile.
    """
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.source].append(prompt)
    slots = asyncio.Semaphore(concurrency)
    tokens = failed = 0

    async def ask(prompt: Prompt) -> None:
        nonlocal tokens, failed
        async with slots:
            try:
                found = await client.chat(
                    prompt.conversation,
                    sampling={"temperature": temperature},
                    max_tokens=max_tokens,
                )
            except (TransientError, PermanentError) as error:
                failed += 1
                say(f"a held-out prompt failed: {error}")
                return
            tokens += len(found.completion_token_ids)

    parts: dict[str, Acceptance] = {}
    seconds = 0.0
    for source, members in groups.items():
        before = from_metrics(await client.metrics_text() or "")
        started = time.monotonic()
        await asyncio.gather(*(ask(prompt) for prompt in members))
        seconds += time.monotonic() - started
        parts[source] = from_metrics(await client.metrics_text() or "") - before
    if failed == len(prompts):
        raise ServerError("every held-out prompt failed; see the messages above")
    return Measurement(
        by_source=parts,
        completion_tokens=tokens,
        seconds=seconds,
        prompts=len(prompts),
        failed=failed,
    )


def document(drafted: Measurement, plain: Measurement | None) -> dict[str, Any]:
    """The document of `eval --json`."""
    whole = total(drafted.by_source.values())
    return {
        **whole.to_json(),
        "by_source": by_source(drafted.by_source),
        "prompts": drafted.prompts,
        "failed": drafted.failed,
        "completion_tokens": drafted.completion_tokens,
        "tokens_per_s": {
            "with_draft": round(drafted.tokens_per_s, 2),
            "without_draft": None if plain is None else round(plain.tokens_per_s, 2),
        },
    }


def held_out(path: str, limit: int | None) -> list[Prompt]:
    """The prompts of a file; lines that cannot be used are told and left out."""
    found: list[Prompt] = []
    for item in read_source(Path(path)):
        if isinstance(item, Prompt):
            found.append(item)
        else:
            say(f"skipped {item}")
    if not found:
        raise SourceFileError(f"{path} holds no prompts")
    return found[:limit]


async def evaluate_with_server(
    draft: Path | None,
    target: str,
    prompts: Sequence[Prompt],
    *,
    settings: ServeSettings,
    name: str,
    run_folder: Path,
    max_tokens: int,
    concurrency: int,
    spec_tokens: int = SPEC_TOKENS,
) -> Measurement:
    """Start a server with (or without) the draft, measure, stop it."""
    async with (
        Server.evaluation(
            target,
            settings,
            name=name,
            draft=draft,
            spec_tokens=spec_tokens,
            run_folder=run_folder,
            on_wait=say,
        ) as server,
        TargetClient(server.url, model=name) as client,
    ):
        await client.connect()
        return await measure(client, prompts, max_tokens=max_tokens, concurrency=concurrency)


async def _evaluate_url(
    url: str, name: str | None, prompts: Sequence[Prompt], max_tokens: int, concurrency: int
) -> Measurement:
    async with TargetClient(url, model=name) as client:
        await client.connect()
        return await measure(client, prompts, max_tokens=max_tokens, concurrency=concurrency)


@click.command("eval")
@click.argument("draft")
@click.option("--target", required=True, help="The target model: its folder, or its name.")
@click.option("--prompts", required=True, metavar="FILE", help="Held-out prompts.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many prompts.")
@click.option("--url", help="A server that runs target and draft already; else one is started.")
@click.option("--name", help="The target's name on the server.")
@click.option("--max-tokens", default=256, show_default=True, help="Longest completion.")
@click.option("--concurrency", default=8, show_default=True, help="Requests at once.")
@click.option("--k", "spec_tokens", default=SPEC_TOKENS, show_default=True, help="Draft tokens.")
@click.option("--baseline", is_flag=True, help="Also measure the target without a draft.")
@click.option("--server-args", default="", help="More arguments for the server.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with stable keys.")
def evaluate_command(
    draft: str,
    target: str,
    prompts: str,
    limit: int | None,
    url: str | None,
    name: str | None,
    max_tokens: int,
    concurrency: int,
    spec_tokens: int,
    baseline: bool,
    server_args: str,
    as_json: bool,
) -> None:
    """Measure DRAFT with its target in vLLM: accepted draft tokens per step, greedy.

    \b
    draftmill eval draft --target ./Kimi-K2.5 --prompts held_out.jsonl
    """
    from draftmill.trainer.checkpoint import resolve_draft  # brings torch

    rows = held_out(prompts, limit)
    folder = resolve_draft(draft)
    if url:
        drafted = asyncio.run(_evaluate_url(url, name, rows, max_tokens, concurrency))
        plain = None
    else:
        settings = ServeSettings(args=tuple(shlex.split(server_args)))
        name = name or (Path(target).resolve().name if Path(target).is_dir() else target)

        def run(candidate: Path | None) -> Measurement:
            return asyncio.run(
                evaluate_with_server(
                    candidate,
                    target,
                    rows,
                    settings=settings,
                    name=name,
                    run_folder=folder / ".serve",
                    max_tokens=max_tokens,
                    concurrency=concurrency,
                    spec_tokens=spec_tokens,
                )
            )

        drafted = run(folder)
        plain = run(None) if baseline else None
    found = document(drafted, plain)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"{found['prompts']} prompts, {found['completion_tokens']:,} tokens")
    click.echo(_line("all", found))
    for source, part in found["by_source"].items():
        click.echo(_line(source, part))
    speed = found["tokens_per_s"]
    line = f"{speed['with_draft']:,.1f} tokens/s with the draft"
    if speed["without_draft"]:
        line += f", {speed['without_draft']:,.1f} without"
    click.echo(line)


def _line(label: str, part: dict[str, Any]) -> str:
    positions = " / ".join(f"{share:.3f}" for share in part["accepted_by_position"])
    return (
        f"{label}: {part['accepted_per_step']:.3f} accepted per step "
        f"(by position {positions}; {part['drafts']:,} drafts)"
    )
