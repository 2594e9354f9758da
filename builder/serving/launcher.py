"""Runs vLLM servers: starts one, waits until it is ready, finds it again after a crash, stops it.

What the command line is made of belongs to `command`, processes and signals to `processes`, files
in the run folder to `state`, other files to `leavings`, requests to `client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import aiohttp

from draftmill.builder.requests.api_key import api_key
from draftmill.builder.serving import leavings, processes
from draftmill.builder.serving.command import (
    CONNECTOR_MODULE,
    KINDS,
    Kind,
    ServerSpec,
    ServeSettings,
    fingerprint,
    serve_command,
    serve_environment,
    vllm_engine,
)
from draftmill.builder.serving.log import last_line, why_it_ended
from draftmill.builder.serving.state import HOST, ServerFiles, ServerState, check_free, free_port
from draftmill.manifests import files
from draftmill.manifests.errors import ServerError

__all__ = ["ServeSettings", "Server", "ServerSpec", "stop_leftovers"]

_POLL_S = 0.3
_SAY_EVERY_S = 10.0
_ANSWER_S = 10.0
_GRACE_S = 30.0

OnWait = Callable[[str], None]
_T = TypeVar("_T")


def _silent(_: str) -> None:
    return


class Server:
    """One vLLM server on this machine, for as long as the `async with` block runs.

    A server that an earlier run left behind, ready or still loading, is used again when it was
    started with the same settings and stopped otherwise. Servers of other kinds that were left in
    the run folder are stopped first: they hold the memory that this one needs.

    `on_wait` is told in a line of text what is being waited for, at most every 10 s. Without
    `port` it listens on one that is free.
    """

    def __init__(
        self,
        spec: ServerSpec,
        *,
        run_folder: Path,
        on_wait: OnWait = _silent,
        port: int | None = None,
    ) -> None:
        self.spec = spec
        self._wanted_port = port
        self.files = ServerFiles(run_folder, spec.kind)
        self.reused = False
        self._on_wait = on_wait
        self._port = 0
        self._mark = ""
        self._pid = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._lock_fd: int | None = None

    @classmethod
    def generation(
        cls,
        model: str,
        settings: ServeSettings,
        *,
        name: str,
        run_folder: Path,
        on_wait: OnWait = _silent,
    ) -> Server:
        """A server that answers prompts: prefix cache on, reasoning parser if there is one."""
        spec = ServerSpec(kind="generate", model=model, name=name, settings=settings)
        return cls(spec, run_folder=run_folder, on_wait=on_wait)

    @classmethod
    def extraction(
        cls,
        model: str,
        settings: ServeSettings,
        *,
        name: str,
        layer_ids: Sequence[int],
        staging: Path,
        run_folder: Path,
        on_wait: OnWait = _silent,
    ) -> Server:
        """A server that puts the hidden states of `layer_ids` into files in `staging`."""
        spec = ServerSpec(
            kind="extract",
            model=model,
            name=name,
            settings=settings,
            layer_ids=tuple(layer_ids),
            staging=staging,
        )
        return cls(spec, run_folder=run_folder, on_wait=on_wait)

    @classmethod
    def evaluation(
        cls,
        model: str,
        settings: ServeSettings,
        *,
        name: str,
        draft: Path | None,
        spec_tokens: int = 3,
        run_folder: Path,
        on_wait: OnWait = _silent,
    ) -> Server:
        """A server that speculates with `draft`, or the target alone if that is None."""
        spec = ServerSpec(
            kind="eval",
            model=model,
            name=name,
            settings=settings,
            draft=draft,
            spec_tokens=spec_tokens,
        )
        return cls(spec, run_folder=run_folder, on_wait=on_wait)

    @property
    def url(self) -> str:
        """The base URL of its API, ending in /v1."""
        return f"http://{HOST}:{self._port}/v1"

    @property
    def pid(self) -> int:
        """The process that listens; its children have other ones."""
        return self._pid

    async def start(self) -> Server:
        """Starts the server, or finds it, and returns when it is ready, however long it loads.

        Raises ServerError if it dies, or serves another model. When cancelled, stops the server.
        """
        self._lock_fd = self.files.lock()
        try:
            await stop_leftovers(self.files.folder, keep=self.spec.kind, on_wait=self._on_wait)
            command, environment = await _to_the_end(self._prepare)
            if not await self._find_again(fingerprint(command, environment)):
                self._launch(command, environment)
            await self._wait_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def stop(self) -> None:
        """Ends the server and its children, in order if they let themselves; can be repeated."""
        try:
            if self._mark:
                await _to_the_end(_end, self.files, self._mark)
                self._mark = ""
                if self._child is not None:
                    self._child.wait()
        finally:
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    def alive(self) -> bool:
        """Whether the server's main process runs."""
        if self._child is not None:
            return self._child.poll() is None
        return processes.is_marked(self._pid, self._mark)

    async def died(self) -> ServerError:
        """Waits until the server ends by itself; the error says why, as far as its log tells."""
        while self.alive():  # noqa: ASYNC110  (nobody tells when a process ends that is no child)
            await asyncio.sleep(_POLL_S)
        return self._death("while serving")

    async def __aenter__(self) -> Server:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def _prepare(self) -> tuple[list[str], dict[str, str]]:
        """Command and environment, with a free port; the connector is put where it is found."""
        self._port = self._wanted_port or free_port()
        engine = vllm_engine(self.spec.settings.python)
        if self.spec.kind == "extract":
            assert self.spec.staging is not None
            self.spec.staging.mkdir(parents=True, exist_ok=True)
            source = Path(__file__).with_name("connector.py").read_bytes()
            files.write_atomic(self.files.folder / f"{CONNECTOR_MODULE}.py", source, "connector")
        return (
            serve_command(self.spec, engine=engine, port=self._port),
            serve_environment(self.spec, engine=engine, connector_folder=self.files.folder),
        )

    async def _find_again(self, wanted: str) -> bool:
        """Whether an earlier run's server is here and fits; one that does not fit is ended."""
        state = self.files.read()
        if state is None:
            return False
        found = await _to_the_end(processes.marked, state.mark)
        root = processes.root_of(found)
        fits = state.fingerprint == wanted and self._wanted_port in (None, state.port)
        if root is not None and fits:
            self._mark, self._port, self._pid = state.mark, state.port, root.pid
            self.reused = True
            self._on_wait(f"found the {self.spec.kind} server of an earlier run (pid {root.pid})")
            return True
        if found:
            self._on_wait(f"stopping a {self.spec.kind} server that has other settings")
        await _to_the_end(_end, self.files, state.mark)
        return False

    def _launch(self, command: list[str], environment: dict[str, str]) -> None:
        check_free(self._port)
        self._mark = secrets.token_hex(16)
        temp = leavings.temporary_folder(self._mark)
        # first the state, then the process: killed in between, the mark still finds it
        self.files.write(
            ServerState(
                mark=self._mark,
                port=self._port,
                fingerprint=fingerprint(command, environment),
                command=command,
                temp_folder=str(temp),
            )
        )
        temp.mkdir(mode=0o700)
        whole = {**os.environ, **environment, **leavings.temporary_environment(temp)}
        whole |= {**processes.KEEP_MARK, processes.MARK: self._mark}
        # two or three processes import the same thousands of modules: let them keep the bytecode
        whole.pop("PYTHONDONTWRITEBYTECODE", None)
        with self.files.log_path.open("wb") as log:
            self._child = subprocess.Popen(
                command,
                env=whole,
                cwd=self.files.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for draftmill, which stops the server when it is done
                start_new_session=True,
            )
        self._pid = self._child.pid

    async def _wait_ready(self) -> None:
        started = said = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        # it inherits the key of this process and asks for it
        headers = {"Authorization": f"Bearer {key}"} if (key := api_key()) else None
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while (names := await self._served(session)) is None:
                if not self.alive():
                    raise self._death("before it was ready")
                if time.monotonic() - said >= _SAY_EVERY_S:
                    said = time.monotonic()
                    line = last_line(self.files.log_path)
                    self._on_wait(f"{self.spec.kind} server, {said - started:.0f} s: {line}")
                await asyncio.sleep(_POLL_S)
        if self.spec.name not in names:
            raise ServerError(
                f"the server at {self.url} serves {', '.join(names)}, not {self.spec.name}; "
                f"its log is {self.files.log_path}"
            )
        await _to_the_end(leavings.note_shared_memory, self.files, self._mark)
        self._on_wait(f"{self.spec.kind} server ready after {time.monotonic() - started:.0f} s")

    async def _served(self, session: aiohttp.ClientSession) -> list[str] | None:
        """The models it serves, or None while it is not ready."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with session.get(f"http://{HOST}:{self._port}/health") as reply:
                if reply.status != 200:
                    return None
            async with session.get(f"{self.url}/models") as reply:
                return [str(each["id"]) for each in (await reply.json())["data"]]
        return None

    def _death(self, when: str) -> ServerError:
        code = self._child.returncode if self._child is not None else None
        reason = why_it_ended(self.files.log_path, code)
        return ServerError(
            f"the {self.spec.kind} server ended {when}: {reason}\nits log is {self.files.log_path}"
        )


async def stop_leftovers(
    run_folder: Path, *, keep: Kind | None = None, on_wait: OnWait = _silent
) -> None:
    """Ends the servers that an earlier run left in this folder, but for those of kind `keep`.

    Servers that another running draftmill looks after are left alone.
    """
    for kind in KINDS:
        each = ServerFiles(run_folder, kind)
        if kind == keep or not each.state_path.exists():
            continue
        with each.unattended() as ours:
            if ours:
                state = each.read()
                if state is not None:
                    if await _to_the_end(processes.marked, state.mark):
                        on_wait(f"stopping the {kind} server of an earlier run")
                    await _to_the_end(_end, each, state.mark)


def _end(server: ServerFiles, mark: str) -> None:
    """Ends the processes, then forgets them: in this order, so that a kill leaves no orphan."""
    processes.end(mark, _GRACE_S)
    state = server.read()
    if state is not None and state.mark == mark:
        leavings.remove(mark, state.temp_folder, state.shared_memory)
    server.forget()


async def _to_the_end(function: Callable[..., _T], *arguments: object) -> _T:
    """Runs it in a thread; a cancellation is passed on when the thread is done, not before."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
