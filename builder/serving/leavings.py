"""What a server leaves on this machine when it is killed: sockets, temporary files, shared memory.

vLLM's processes talk through sockets in the temporary folder, with names that say nothing. So every
server gets a folder of its own, which goes when it ends; its shared memory is written down when it
is ready, because nobody can ask a process that was killed. When that happens is `launcher`'s.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from draftmill.builder.serving.processes import SHARED_MEMORY, in_use, marked, shared_memory
from draftmill.builder.serving.state import ServerFiles
from draftmill.manifests.errors import ServerError

_NAME = "draftmill-"
# The address of a socket has 108 bytes, the last one 0; vLLM puts a slash and a UUID behind this.
_LONGEST_PATH = 107 - 1 - 36
_SHORT_PARENT = "/tmp"


def temporary_folder(mark: str) -> Path:
    """Where the server with this mark keeps what is temporary. Not made here.

    Raises ServerError when nothing temporary can be written anywhere.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"{_NAME}{mark[:12]}"
    except FileNotFoundError as error:
        raise ServerError(f"{error.strerror}: set TMPDIR to one that can be written") from error
    if len(os.fsencode(folder)) > _LONGEST_PATH:
        return Path(_SHORT_PARENT) / folder.name
    return folder


def temporary_environment(folder: Path) -> dict[str, str]:
    """What makes a server keep its temporary files in `folder`, but not what it compiles: that
    saves the next one time."""
    kept = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(kept))
    return {
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": inductor,
    }


def note_shared_memory(server: ServerFiles, mark: str) -> None:
    """Write down what the server with this mark shares, now that it is ready."""
    state = server.read()
    if state is not None and state.mark == mark:
        found = shared_memory(marked(mark))
        server.write(replace(state, shared_memory=sorted(map(str, found))))


def remove(mark: str, temp_folder: str, shared: list[str]) -> None:
    """Delete what a server that has ended was known to use; nothing else, whatever the file of its
    state says."""
    folder = Path(temp_folder)
    with contextlib.suppress(OSError, ValueError):
        if folder.name == f"{_NAME}{mark[:12]}" and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    named = (each for each in map(Path, shared) if each.parent == SHARED_MEMORY)
    left = {each for each in named if os.path.lexists(each)}
    # A name may be somebody else's by now: what a process still uses is its own.
    for each in left - in_use(left):
        with contextlib.suppress(OSError, ValueError):
            if each.lstat().st_uid == os.getuid():
                each.unlink()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"
