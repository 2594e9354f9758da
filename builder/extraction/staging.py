"""The staging folder: where an extraction server leaves hidden states, and how they are taken.

Owns names, locks, opening without trust, and the removal of files that nobody waits for. The server
decides nothing but a base name. Whether the content is right is left to `validate`.

Works with vLLM's ExampleHiddenStatesConnector (writes in place, the lock is released even when the
write failed) and with draftmill's (FILE appears whole, FILE.error says what went wrong).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.builder.requests.client import PROBE_ID
from draftmill.builder.requests.failures import GarbledReplyError
from draftmill.manifests.errors import (
    NOT_UNDERSTOOD,
    ConfigError,
    RejectedError,
    TransientError,
)

_SUFFIX = ".safetensors"
_COMPANIONS = ("", ".lock", ".part", ".error")
_MAX_HEADER = 1 << 20
_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.02
# Both connectors make the lock before they answer; so without one nothing will come.
NO_FILE_S = 10.0
# A lock that was made and not yet taken looks like one that was released: look again.
_SECOND_LOOK_S = 0.05
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4}


class IncompleteFileError(TransientError):
    """The staged file is shorter than its header says: its write failed or goes on."""


class LockHeldError(TransientError):
    """The server did not finish writing in time; its file may still come."""


class StagedFile:
    """One open hidden-states file whose header has been read. Use as a context manager.

    `shape` and `dtype` are the file's claims about `hidden_states`; that the file has that many
    bytes is checked. `layer_ids` is None when the server does not say which layers it wrote.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name
        tensors, metadata, start = _read_header(fd, name)
        self.dtype, self.shape, offset, _ = tensors["hidden_states"]
        self._offset = start + offset
        ids_dtype, ids_shape, ids_offset, _ = tensors["token_ids"]
        if ids_dtype not in ("I64", "I32") or len(ids_shape) != 1:
            raise GarbledReplyError(f"{name}: token_ids are {ids_dtype} {ids_shape}")
        self.num_token_ids = ids_shape[0]
        self._ids_dtype = np.dtype(f"<i{_ITEM_BYTES[ids_dtype]}")
        self._ids_offset = start + ids_offset
        self.layer_ids = _layer_ids(metadata)

    def token_ids(self) -> NDArray[np.int64]:
        """The ids that the server computed, int64 [num_token_ids]."""
        raw = np.empty(self.num_token_ids, self._ids_dtype)
        self._read(memoryview(raw).cast("B"), self._ids_offset)
        return raw.astype(np.int64)

    def read_into(self, out: NDArray[np.uint16], first_token: int) -> None:
        """Fill `out` [t, L, H] with the states from `first_token` on."""
        row_bytes = out.itemsize * int(np.prod(out.shape[1:]))
        self._read(memoryview(out).cast("B"), self._offset + first_token * row_bytes)

    def _read(self, view: memoryview, offset: int) -> None:
        # read, not mapped: a file that shrinks under a map would kill the process
        while view.nbytes:
            done = os.preadv(self._fd, [view[: 1 << 30]], offset)
            if not done:
                raise IncompleteFileError(f"{self.name} became shorter while it was read")
            view = view[done:]
            offset += done

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> StagedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Staging:
    """One dataset's part of a staging folder, during one run.

    Request ids carry the dataset and the run, servers put them into file names: so the files of a
    run that died are known, and datasets can share a folder.
    """

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder = folder
        owner = hashlib.sha256(str(dataset.resolve()).encode()).hexdigest()[:10]
        self._prefix = f"draftmill-{owner}-"
        self._ours = re.compile(rf"{self._prefix}[0-9a-f]{{8}}-\d+-\d+x|{PROBE_ID}")
        self._run = secrets.token_hex(4)
        try:
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"staging: {folder} cannot be opened ({error.strerror}). Create it, and start the "
                "extraction server with this folder."
            ) from error

    def close(self) -> None:
        os.close(self._fd)

    def request_id(self, sample: int, number: int) -> str:
        """The id of one request of this run; part of the staged file's name.

        Ends with a letter: no id is then the beginning of another one.
        """
        return f"{self._prefix}{self._run}-{sample}-{number}x"

    def name_of(self, path: str) -> str:
        """The base name of a path that a server sent; RejectedError if it is no name to use."""
        name = path.rpartition("/")[2]
        stem = name.removesuffix(_SUFFIX)
        try:
            length = len(name.encode())
        except UnicodeEncodeError:  # half of a character, which JSON can hold and no name can
            length = 0
        if stem == name or not stem.strip(".") or "\0" in name or not 0 < length <= 240:
            raise RejectedError(f"the server names {path[:200]!r}, which is no hidden-states file")
        return name

    async def wait(self, name: str, timeout_s: float, server: str) -> None:
        """Returns when `name` is written; TransientError when it will not be, or not in time."""
        start = time.monotonic()
        delay_s, released_at = _FIRST_LOOK_S, None
        while True:
            now = time.monotonic()
            locked = self._is_locked(name)
            if locked is not True and self._is_there(name, whole=locked is None):
                return
            if locked is False:
                if released_at is None:
                    released_at = now
                elif now - released_at >= _SECOND_LOOK_S:
                    raise TransientError(
                        f"{server} released {name}.lock and wrote no file: {self._error(name)}"
                    )
            elif now - start >= (timeout_s if locked else min(timeout_s, NO_FILE_S)):
                if locked:
                    raise LockHeldError(f"{server} held {name}.lock for more than {timeout_s:g} s")
                raise TransientError(
                    f"{server} wrote no {name} into {self.folder}: name the server's folder with "
                    "--staging, or start it with this one as its shared_storage_path"
                )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_LOOK_S)

    def open(self, name: str) -> StagedFile:
        """Open a file that is there; links and what is no regular file are refused.

        Raises FileNotFoundError, RejectedError, TransientError kinds; ConfigError where this
        process may not read it.
        """
        fd = self._open(name)
        try:
            return StagedFile(fd, name)
        except BaseException:
            os.close(fd)
            raise

    def remove(self, name: str) -> None:
        """Delete a staged file and what stands beside it; folders of that name are left."""
        for companion in _COMPANIONS:
            try:
                os.unlink(name + companion, dir_fd=self._fd)
            except (FileNotFoundError, IsADirectoryError):
                continue
            except OSError as error:
                raise self._refused(name + companion, "deleted", error) from error

    def sweep(self, live: Container[str], *, max_age_s: float) -> tuple[set[str], set[str]]:
        """Delete this dataset's files whose request id is not `live`; (ids deleted, ids left).

        What is being written is left until it is `max_age_s` old.
        """
        deleted: set[str] = set()
        left: set[str] = set()
        for found in os.listdir(self._fd):
            request_id = self.owner_of(found)
            if request_id is None or request_id in live:
                continue
            name = found
            for companion in _COMPANIONS[1:]:
                name = name.removesuffix(companion)
            try:
                if self._is_locked(name) and self._age_s(found) < max_age_s:
                    left.add(request_id)
                    continue
            except FileNotFoundError:
                continue
            except RejectedError:
                pass  # a link or the like in the place of the lock
            self.remove(name)
            deleted.add(request_id)
        return deleted - left, left

    def _age_s(self, name: str) -> float:
        return time.time() - os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime

    def owner_of(self, name: str) -> str | None:
        """The request id of this dataset in a file's name, if there is one."""
        found = self._ours.search(name)
        return found[0] if found else None

    def _open(self, name: str) -> int:
        try:
            fd = os.open(name, _FLAGS, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RejectedError(f"{name} is a link, which no server of ours writes") from error
            if isinstance(error, FileNotFoundError):
                raise
            if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device
                raise RejectedError(f"{name} is not a regular file") from error
            raise self._refused(name, "read", error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise RejectedError(f"{name} is not a regular file")
        return fd

    def _refused(self, name: str, verb: str, error: OSError) -> Exception:
        """What to say of a file that the system does not let us use."""
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            return TransientError(f"{self.folder / name} cannot be {verb}: {error.strerror}")
        return ConfigError(
            f"staging: {self.folder / name} cannot be {verb} ({error.strerror}). The extraction "
            "server and draftmill must run as the same user, or as users who may read and delete "
            "each other's files there."
        )

    def _is_locked(self, name: str) -> bool | None:
        """Whether the server holds the file's lock; None without a lock file."""
        try:
            fd = self._open(f"{name}.lock")
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _is_there(self, name: str, *, whole: bool) -> bool:
        """Whether the file exists; with `whole`, whether it has all its bytes."""
        try:
            if not whole:
                os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            else:
                self.open(name).close()
        except (FileNotFoundError, IncompleteFileError, GarbledReplyError):
            return False
        return True

    def _error(self, name: str) -> str:
        try:
            fd = self._open(f"{name}.error")
        except (OSError, RejectedError):
            return f"its disk may be full, see its log ({self.folder})"
        try:
            return os.pread(fd, 300, 0).decode(errors="replace").strip()
        finally:
            os.close(fd)


def _read_header(
    fd: int, name: str
) -> tuple[dict[str, tuple[str, tuple[int, ...], int, int]], dict[str, Any], int]:
    """({tensor: (dtype, shape, first byte, end)}, metadata, offset of the data), all checked."""
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise IncompleteFileError(f"{name} ends after {size} bytes")
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= _MAX_HEADER:
        raise GarbledReplyError(f"{name} claims a header of {length} bytes")
    raw = os.pread(fd, length, 8)
    if len(raw) < length:
        raise IncompleteFileError(f"{name} ends after {size} bytes, inside its header")
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", {})
        tensors = {key: _tensor(header[key]) for key in ("hidden_states", "token_ids")}
        end = max(int(each["data_offsets"][1]) for each in header.values())
    except NOT_UNDERSTOOD as error:
        raise GarbledReplyError(f"{name} has no header that can be understood: {error!r}") from None
    start = 8 + length
    if size < start + end:
        raise IncompleteFileError(f"{name} has {size} of {start + end} bytes")
    if size > start + end:
        raise GarbledReplyError(f"{name} has {size - start - end} bytes too many")
    return tensors, metadata if isinstance(metadata, dict) else {}, start


def _tensor(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    numbers = (*shape, begin, end)
    if not all(type(each) is int and 0 <= each < 1 << 48 for each in numbers) or len(shape) > 4:
        raise ValueError(f"impossible shape or offsets {numbers}")
    count = 1
    for each in shape:
        count *= each
    if begin + count * _ITEM_BYTES.get(dtype, 0) != end and dtype in _ITEM_BYTES:
        raise ValueError(f"{dtype} {shape} does not take {end - begin} bytes")
    return str(dtype), shape, begin, end


def _layer_ids(metadata: dict[str, Any]) -> tuple[int, ...] | None:
    try:
        return tuple(int(each) for each in json.loads(metadata["target_layer_ids"]))
    except NOT_UNDERSTOOD:
        return None
