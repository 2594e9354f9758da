"""`draftmill serve`: one vLLM server in the foreground, or the command that starts it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Literal

import click

from draftmill.builder.serving import launcher
from draftmill.builder.serving.command import CONNECTOR_MODULE, printable_command, vllm_engine
from draftmill.builder.serving.launcher import Server, ServerSpec
from draftmill.builder.stop import StopSignals
from draftmill.manifests.errors import ServerError, UsageError
from draftmill.manifests.target.target import TargetModel, default_target_layer_ids
from draftmill.tools.init import layer_list
from draftmill.tools.render import say
from draftmill.tools.terminal import echo

Kind = Literal["generate", "extract"]
# A file for the server's environment; importing it here would need vLLM.
CONNECTOR_FILE = Path(launcher.__file__).with_name("connector.py")


@click.command("serve")
@click.argument("kind", type=click.Choice(["generate", "extract"]))
@click.argument("model")
@click.option("--name", help="Name that the server gives the model (default: as given).")
@click.option("--layer-ids", help="Layers to extract, the last one included, e.g. 2,15,27,30.")
@click.option("--staging", metavar="DIR", help="Folder for hidden states.")
@click.option(
    "--run-folder",
    default=".draftmill",
    show_default=True,
    help="Where its log, its state and the connector lie.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Where the server listens, on 127.0.0.1.",
)
@click.option("--print", "print_only", is_flag=True, help="Only print the command.")
def serve_command(
    kind: Kind,
    model: str,
    name: str | None,
    layer_ids: str | None,
    staging: str | None,
    run_folder: str,
    port: int,
    print_only: bool,
) -> None:
    """Start vLLM for MODEL with the flags that generate or extract needs, until Ctrl-C.

    \b
    draftmill serve generate ./Kimi-K2.5 --name moonshotai/Kimi-K2.5
    draftmill serve extract ./Kimi-K2.5 --staging /dev/shm/staging --print
    """
    try:
        spec = ServerSpec(
            kind=kind,
            model=model,
            name=name or (Path(model).resolve().name if Path(model).is_dir() else model),
            layer_ids=layer_list(layer_ids) or _default_layers(kind, model),
            staging=Path(staging) if staging else None,
        )
    except ValueError as error:
        missing = [] if staging else ["--staging DIR"]
        if not (layer_ids or Path(model).is_dir()):
            missing.append("--layer-ids (target_layer_ids of config.toml, then the last layer)")
        raise UsageError(f"{error}: give {' and '.join(missing)}") from error
    folder = Path(run_folder)
    if print_only:
        engine = _engine_or_gpu()
        if kind == "extract":
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(CONNECTOR_FILE, folder / f"{CONNECTOR_MODULE}.py")
        echo(
            printable_command(
                spec, engine=engine, port=port, host="127.0.0.1", connector_folder=folder
            )
        )
        return
    asyncio.run(_foreground(Server(spec, run_folder=folder, on_wait=say, port=port)))


def _default_layers(kind: str, model: str) -> tuple[int, ...]:
    if kind != "extract" or not Path(model).is_dir():
        return ()
    count = TargetModel.from_folder(model).num_layers
    return (*default_target_layer_ids(count), count)


def _engine_or_gpu() -> Literal["cpu", "gpu"]:
    """The kind of vLLM that is here; where there is none, the command is for a GPU machine."""
    try:
        return vllm_engine()
    except ServerError:
        return "gpu"


async def _foreground(server: Server) -> None:
    """Serve until Ctrl-C or until the server ends by itself."""
    with StopSignals() as signals:
        async with server:
            echo(server.url)
            ended = asyncio.create_task(server.died())
            asked = asyncio.create_task(signals.requested.wait())
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if ended.done():
                raise ended.result()
            ended.cancel()
