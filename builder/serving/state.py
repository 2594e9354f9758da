"""The files of a server in its run folder: which process it is, its log, who looks after it.

`server-KIND.json` is written before the process starts and names the mark that it carries;
`server-KIND.log` is what it prints; `server-KIND.lock` is held by the draftmill that uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from draftmill.builder.serving.command import Kind
from draftmill.manifests import files, lock
from draftmill.manifests.errors import LockedError, ServerError

HOST = "127.0.0.1"
# 32 hex digits, as `secrets.token_hex(16)` gives them.
_MARK = re.compile("[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """What is needed to find a server again, to know whether it is the one that is wanted, and to
    sweep up after it. `shared_memory` is known once it is ready."""

    mark: str
    port: int
    fingerprint: str
    command: list[str]
    temp_folder: str
    shared_memory: list[str] = field(default_factory=list)


class ServerFiles:
    """The files of one kind of server. The folder is made when it is not there."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder = folder.absolute()
        self.kind = kind
        self.state_path = self.folder / f"server-{kind}.json"
        self.log_path = self.folder / f"server-{kind}.log"
        self.lock_path = self.folder / f"server-{kind}.lock"

    def read(self) -> ServerState | None:
        """What an earlier run left, or None if there is nothing that can be used."""
        try:
            state = ServerState(**json.loads(self.state_path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        # What is removed later is found by these, so nothing odd may be in them.
        shared = state.shared_memory
        whole = (
            isinstance(state.mark, str)
            and _MARK.fullmatch(state.mark)
            and isinstance(state.port, int)
            and isinstance(state.temp_folder, str)
            and isinstance(shared, list)
            and all(isinstance(each, str) for each in shared)
        )
        return state if whole else None

    def write(self, state: ServerState) -> None:
        files.write_atomic(self.state_path, json.dumps(asdict(state), indent=1), "server-state")

    def forget(self) -> None:
        self.state_path.unlink(missing_ok=True)

    def lock(self) -> int:
        """A descriptor that holds the lock until it is closed; ServerError if another holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        refusal = (
            f"another draftmill (pid {{owner}}) runs a {self.kind} server in {self.folder}; "
            "wait until it is done, or stop it"
        )
        try:
            return lock.acquire(self.lock_path, refusal)
        except LockedError as error:
            raise ServerError(str(error)) from None

    @contextlib.contextmanager
    def unattended(self) -> Iterator[bool]:
        """Whether no other draftmill looks after this server; if so, none can until the end."""
        try:
            lock_fd = self.lock()
        except ServerError:
            yield False
            return
        try:
            yield True
        finally:
            os.close(lock_fd)


def check_free(port: int) -> None:
    """ServerError if somebody listens on this port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"port {port} on {HOST} cannot be used: {error.strerror}. Stop what listens there, "
                "or name another port."
            ) from error


def free_port() -> int:
    """A port nobody listens on, below those that outgoing connections are given.

    vLLM takes it some seconds later, so one from that range might be gone by then.
    """
    for _ in range(100):
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerError("no free port between 20000 and 32000")
