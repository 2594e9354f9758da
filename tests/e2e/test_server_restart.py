"""A real generation server, killed in the middle of a run and started again: nothing is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from draftmill.builder.generation.stage import GenerateSettings, generate
from draftmill.builder.progress import Progress
from draftmill.builder.requests.client import TargetClient
from draftmill.builder.serving.command import (
    ServerSpec,
    serve_command,
    serve_environment,
    vllm_engine,
)
from draftmill.builder.serving.launcher import ServeSettings, free_port
from draftmill.builder.serving.leavings import temporary_environment, temporary_folder
from draftmill.tools.demo.embedded import MODEL_NAME
from tests.builder.generation import completions, history, states, writer_of

PROMPTS = 48
SETTINGS = ServeSettings(max_model_len=2048, kv_cache_gib=1)


@contextmanager
def running(model: Path, port: int, folder: Path) -> Iterator[None]:
    """A generation server on this port that ends by SIGKILL, with all its children."""
    engine = vllm_engine()
    spec = ServerSpec(kind="generate", model=str(model), name=MODEL_NAME, settings=SETTINGS)
    extra = serve_environment(spec, engine=engine, connector_folder=folder)
    temporary = temporary_folder(uuid.uuid4().hex)
    temporary.mkdir(mode=0o700)
    extra |= temporary_environment(temporary)
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(
            serve_command(spec, engine=engine, port=port),
            env={**os.environ, **extra},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
        assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
    finally:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        # a killed process cannot remove its shared memory
        shared = {name for each in family for name in shared_memory(each.pid)}
        for each in family:
            each.kill()
        server.wait()
        psutil.wait_procs(family, timeout=30)
        for name in shared:
            Path(name).unlink(missing_ok=True)
        shutil.rmtree(temporary)


def shared_memory(pid: int) -> set[str]:
    """Files of Python's shared memory that a process has mapped or open."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().split()
        opened = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {each for each in (*maps, *opened) if each.startswith("/dev/shm/psm_")}


async def ready(url: str) -> None:
    async with TargetClient(url) as client:
        while not await client.healthy():  # noqa: ASYNC110
            await asyncio.sleep(0.5)


@pytest.mark.usefixtures("no_server")
def test_a_server_killed_in_mid_run_costs_no_row_an_attempt(
    model_folder: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}/v1"
        some_done = asyncio.Event()

        def watch(progress: Progress) -> None:
            if progress.done >= 8:
                some_done.set()

        settings = GenerateSettings(max_completion_tokens=64, concurrency=8, temperature=0.7)
        with writer_of(tmp_path / "d", PROMPTS) as writer:
            with running(model_folder, port, tmp_path):
                await ready(url)
                run = asyncio.create_task(generate(writer, settings, [url], watch))
                await asyncio.wait_for(some_done.wait(), 600)
            assert not run.done()
            with running(model_folder, port, tmp_path):
                report = await asyncio.wait_for(run, 900)
            assert report.outcomes == {"generated": PROMPTS}
            assert states(writer) == {"generated": PROMPTS}
            assert history(writer) == {("generated", None): PROMPTS}
            kept = completions(tmp_path / "d", writer)
            assert all(len(each.completion_token_ids) > 0 for each in kept.values())

    asyncio.run(body())
