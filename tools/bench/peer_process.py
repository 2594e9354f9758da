"""What is measured beside the codecs: peers in another Python, and draftmill's own shards.

Owns starting `peers.py` in the environment of `make bench-env` and talking to it, and files on a
RAM disk; what is made of the seconds is `shards`'s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from draftmill.manifests.errors import DraftmillError, UsageError
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.types import Location, StatesTLH
from draftmill.manifests.writer import DEFAULT_SHARD_BYTES
from draftmill.tools.bench import peers
from draftmill.tools.bench.process import ram_disk
from draftmill.tools.bench.reads import write_samples
from draftmill.tools.render import say

CLONE = Path(__file__).resolve().parents[2]
# states, one raw file a sample, and shards both compressed and not
_FOLDER_SHARE = 5


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One way to store the samples: the bytes it takes, and `seconds("encode" | "decode")`."""

    name: str
    stored_bytes: int
    seconds: Callable[[str], float]


def bench_python() -> Path | None:
    """The Python of `make bench-env`, if it was made."""
    python = CLONE / ".venv-bench" / "bin" / "python"
    return python if python.exists() else None


@contextmanager
def rivals_in(
    python: Path, states_TLH: StatesTLH, sample_tokens: int, *, script: Path | None = None
) -> Iterator[list[Rival]]:
    """The peers that `python` has, and em-zfast in shards, all with these samples stored.

    `script` speaks as `peers.py` does. What is missing is said, a line each.
    """
    with tempfile.TemporaryDirectory(
        prefix="draftmill-bench-", dir=ram_disk(_FOLDER_SHARE * states_TLH.nbytes)
    ) as work:
        folder = Path(work)
        np.save(folder / "states.npy", states_TLH)
        samples = [
            states_TLH[start : start + sample_tokens]
            for start in range(0, len(states_TLH), sample_tokens)
        ]
        with _process(python, script or Path(peers.__file__), folder, sample_tokens) as process:
            found = [
                Rival(name=name, stored_bytes=size, seconds=partial(process.seconds, name))
                for name, size in process.stored_bytes.items()
            ]
            yield [*found, _shard_files(samples, folder / "shards")]


def _shard_files(samples: Sequence[StatesTLH], folder: Path) -> Rival:
    """em-zfast as a dataset has it: in files, with checksums that are compared on reading.

    This is what peers that write files stand beside.
    """
    locations: list[Location] = []

    def seconds(operation: str) -> float:
        if operation == "encode":
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            start = time.perf_counter()
            size = DEFAULT_SHARD_BYTES
            locations[:] = write_samples(folder, samples, "em-zfast", shard_bytes=size)
            return time.perf_counter() - start
        start = time.perf_counter()
        reader = ShardReader(folder)
        for location in locations:
            reader.states(location)
        reader.close()
        return time.perf_counter() - start

    seconds("encode")
    size = sum(path.stat().st_size for path in (folder / "hidden_states").iterdir())
    return Rival(name="em-zfast-shards", stored_bytes=size, seconds=seconds)


class _Process:
    """`peers.py`, started: it waits for lines and answers each."""

    def __init__(self, process: subprocess.Popen[bytes], python: Path, errors: IO[bytes]) -> None:
        self._process = process
        self._python = python
        self._errors = errors
        answer = self._answer()
        self.stored_bytes: dict[str, int] = answer["stored_bytes"]
        for name, reason in answer["missing"].items():
            say(f"{name} is left out: {reason}")

    def seconds(self, name: str, operation: str) -> float:
        """Seconds that this peer takes for all samples."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{name} {operation}\n".encode())
        except BrokenPipeError:
            pass  # the answer will be missing
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise DraftmillError(f"the peers in {self._python} ended with exit code {code}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def _process(python: Path, script: Path, folder: Path, sample_tokens: int) -> Iterator[_Process]:
    stored = folder / "peers"
    stored.mkdir()
    # -I: no path of this environment, nor this file's folder, whose modules have common names
    words = ("-I", script, folder / "states.npy", sample_tokens, stored)
    command = [str(python), *map(str, words)]
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, bufsize=0)
        except OSError as error:
            raise UsageError(f"--peers {python}: {error.strerror}") from error
        with process:
            try:
                yield _Process(process, python, errors)
            finally:
                process.terminate()
