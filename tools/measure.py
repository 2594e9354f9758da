"""Measures what a server makes of held-out prompts: accepted draft tokens and speed, by source.

The command that shows it is `evaluate`; the arithmetic of acceptance is the trainer's.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.builder.requests.client import TargetClient
from draftmill.builder.serving.command import ServeSettings
from draftmill.builder.serving.launcher import Server
from draftmill.builder.sources.read import read_source, source_name
from draftmill.manifests.errors import (
    PermanentError,
    RejectedError,
    ServerError,
    SourceFileError,
    TransientError,
)
from draftmill.manifests.types import Prompt
from draftmill.tools.render import say
from draftmill.trainer.acceptance import Acceptance, from_metrics, total

SPEC_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class Load:
    """How prompts are asked. Temperature 0 is greedy."""

    max_tokens: int
    concurrency: int
    temperature: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a server did on the prompts of one source."""

    acceptance: Acceptance
    prompts: int
    failed: int
    completion_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of this part, with its concurrency."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one server did on the held-out prompts."""

    by_source: Mapping[str, Part]
    load: Load

    @property
    def whole(self) -> Part:
        """All sources together."""
        parts = self.by_source.values()
        return Part(
            acceptance=total(part.acceptance for part in parts),
            prompts=sum(part.prompts for part in parts),
            failed=sum(part.failed for part in parts),
            completion_tokens=sum(part.completion_tokens for part in parts),
            seconds=sum(part.seconds for part in parts),
        )


async def measure(client: TargetClient, prompts: Sequence[Prompt], load: Load) -> Measurement:
    """Ask every prompt once and read the server's counters around each source.

    The counters belong to the whole server: nobody else may use it meanwhile.
    """
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.source].append(prompt)
    slots = asyncio.Semaphore(load.concurrency)

    async def ask(prompt: Prompt) -> int | None:
        async with slots:
            try:
                found = await client.chat(
                    prompt.conversation,
                    sampling={"temperature": load.temperature},
                    max_tokens=load.max_tokens,
                )
            except (TransientError, PermanentError, RejectedError) as error:
                say(f"a held-out prompt failed: {error}")
                return None
            return len(found.completion_token_ids)

    parts: dict[str, Part] = {}
    for source, members in groups.items():
        before = await _counters(client)
        started = time.monotonic()
        lengths = await asyncio.gather(*(ask(prompt) for prompt in members))
        seconds = time.monotonic() - started
        done = [length for length in lengths if length is not None]
        parts[source] = Part(
            acceptance=_since(before, await _counters(client), client),
            prompts=len(members),
            failed=len(members) - len(done),
            completion_tokens=sum(done),
            seconds=seconds,
        )
    found = Measurement(by_source=parts, load=load)
    if found.whole.failed == len(prompts):
        raise ServerError("every held-out prompt failed; see the messages above")
    return found


def _since(before: Acceptance, after: Acceptance, client: TargetClient) -> Acceptance:
    try:
        return after - before
    except ValueError as error:
        raise ServerError(f"{client.url}: {error}. Measure again.") from error


async def _counters(client: TargetClient) -> Acceptance:
    return from_metrics(await client.metrics_text() or "")


def document(drafted: Measurement, plain: Measurement | None) -> dict[str, Any]:
    """The document of `eval --json`."""
    whole = drafted.whole
    return {
        **_part(whole, None if plain is None else plain.whole),
        "by_source": {
            name: _part(part, None if plain is None else plain.by_source.get(name))
            for name, part in sorted(drafted.by_source.items())
        },
        "max_tokens": drafted.load.max_tokens,
        "concurrency": drafted.load.concurrency,
        "temperature": drafted.load.temperature,
    }


def _part(drafted: Part, plain: Part | None) -> dict[str, Any]:
    return {
        **drafted.acceptance.to_json(),
        "prompts": drafted.prompts,
        "failed": drafted.failed,
        "completion_tokens": drafted.completion_tokens,
        "tokens_per_s": {
            "with_draft": round(drafted.tokens_per_s, 2),
            "without_draft": None if plain is None else round(plain.tokens_per_s, 2),
        },
    }


def held_out(paths: Sequence[str], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts of each file, which is their source.

    Files of one name are told apart by their paths. Lines that cannot be used are told and left
    out. Raises SourceFileError for a file with none.
    """
    found: list[Prompt] = []
    names = [source_name(Path(path)) for path in paths]
    for path, name in zip(paths, names, strict=True):
        before = len(found)
        for item in read_source(Path(path), name=path if names.count(name) > 1 else name):
            if len(found) - before == limit:
                break
            if isinstance(item, Prompt):
                found.append(item)
            else:
                say(f"skipped {item}")
        if len(found) == before:
            raise SourceFileError(f"{path} holds no prompts")
    return found


async def measure_own_server(
    draft: Path | None,
    target: str,
    prompts: Sequence[Prompt],
    load: Load,
    *,
    settings: ServeSettings,
    name: str,
    run_folder: Path,
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
        return await measure(client, prompts, load)


async def measure_url(
    url: str, name: str | None, prompts: Sequence[Prompt], load: Load, *, drafting: bool
) -> Measurement:
    """Measure a server that runs already; it must draft, or must not, as `drafting` says."""
    async with TargetClient(url, model=name) as client:
        await client.connect()
        found = await measure(client, prompts, load)
    drafts = found.whole.acceptance.drafts
    if drafting and not drafts:
        raise ServerError(
            f"{url} drafted nothing: it runs without a draft model, or shows no counters at "
            "/metrics. Start it with --speculative-config."
        )
    if drafts and not drafting:
        raise ServerError(f"{url} is to be measured without a draft model, but it drafts")
    return found
