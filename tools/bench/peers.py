"""Other ways to store hidden states, in a Python environment that has them.

Owns how each peer stores and reads the samples; what is timed when is `peer_process`'s, which
starts this file in that environment. There is no draftmill there: only the standard library,
numpy and the peers, each of which may be missing.

    python -I peers.py STATES.npy SAMPLE_TOKENS FOLDER

Answers are JSON, one document a line. The first says which peers are there, the bytes that each
stored, and why others are missing; then each line `NAME encode` or `NAME decode` of standard input
is answered with the seconds that it took for all samples.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]


class Peer(ABC):
    """One way to store samples; `folder` is its own, and empty at first."""

    name: str

    def __init__(self, samples: Sequence[Words], folder: Path) -> None:
        self.samples = samples
        self.folder = folder

    @abstractmethod
    def prepare(self) -> None:
        """What has to be done before each encoding and is not part of it."""

    @abstractmethod
    def encode(self) -> None:
        """Store all samples."""

    @abstractmethod
    def decode(self) -> Iterator[Any]:
        """All samples as the peer gives them: arrays, or buffers of the same bytes."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that `encode` stored."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


class Safetensors(Peer):
    """One uncompressed file a sample, as vLLM's connector and speculators have it."""

    name = "safetensors"

    def __init__(self, samples: Sequence[Words], folder: Path) -> None:
        super().__init__(samples, folder)
        self._numpy = importlib.import_module("safetensors.numpy")

    def prepare(self) -> None:
        empty(self.folder)

    def encode(self) -> None:
        for number, sample in enumerate(self.samples):
            self._numpy.save_file({"hidden_states": sample}, self._path(number))

    def decode(self) -> Iterator[Words]:
        for number in range(len(self.samples)):
            yield self._numpy.load_file(self._path(number))["hidden_states"]

    def _path(self, number: int) -> Path:
        return self.folder / f"hs_{number}.safetensors"


class MdsZstd(Peer):
    """Shards of mosaicml-streaming, compressed by zstd at level 1.

    Read as its streams do: a shard is decompressed into a file, and samples are read from there.
    """

    name = "mds-zstd"
    _COMPRESSION = "zstd:1"

    def __init__(self, samples: Sequence[Words], folder: Path) -> None:
        super().__init__(samples, folder)
        # The packages' own __init__ files want transformers and torchvision, for other data.
        bare_package("streaming")
        bare_package("streaming.base")
        self._format = importlib.import_module("streaming.base.format")
        self._compression = importlib.import_module("streaming.base.compression")
        self._size_limit = max(1 << 26, *(2 * sample.nbytes for sample in samples))

    def prepare(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def encode(self) -> None:
        with self._format.MDSWriter(
            columns={"states": "ndarray:uint16"},
            out=str(self.folder),
            compression=self._COMPRESSION,
            size_limit=self._size_limit,
        ) as writer:
            for sample in self.samples:
                writer.write({"states": sample})

    def decode(self) -> Iterator[Words]:
        index = json.loads((self.folder / "index.json").read_bytes())
        for shard in index["shards"]:
            reader = self._format.reader_from_json(str(self.folder), None, shard)
            path = self.folder / reader.raw_data.basename
            packed = (self.folder / reader.zip_data.basename).read_bytes()
            path.write_bytes(self._compression.decompress(self._COMPRESSION, packed))
            for number in range(reader.samples):
                yield reader[number]["states"]
            path.unlink()


class Zipnn(Peer):
    """zipnn's bf16 coding, from memory to memory."""

    name = "zipnn"

    def __init__(self, samples: Sequence[Words], folder: Path) -> None:
        super().__init__(samples, folder)
        module = importlib.import_module("zipnn")
        self._coder = module.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
        self._input: list[list[bytearray]] = []
        self._stored: list[list[bytes]] = []

    def prepare(self) -> None:
        # its compress overwrites what it is given
        self._input = [[bytearray(part) for part in self._parts(each)] for each in self.samples]

    def encode(self) -> None:
        self._stored = [[self._coder.compress(part) for part in parts] for parts in self._input]

    def decode(self) -> Iterator[Any]:
        for parts in self._stored:
            yield self._joined([self._coder.decompress(part) for part in parts])

    @property
    def stored_bytes(self) -> int:
        return sum(len(part) for parts in self._stored for part in parts)

    def _parts(self, sample: Words) -> list[Words]:
        return [sample]

    def _joined(self, parts: list[bytearray]) -> Any:
        return parts[0]


class ZipnnLayers(Zipnn):
    """The same with each layer on its own: smaller, and taking them apart is not timed."""

    name = "zipnn-layers"

    def _parts(self, sample: Words) -> list[Words]:
        return [np.ascontiguousarray(sample[:, layer]) for layer in range(sample.shape[1])]

    def _joined(self, parts: list[bytearray]) -> Words:
        hidden = self.samples[0].shape[2]
        return np.stack([np.frombuffer(part, np.uint16).reshape(-1, hidden) for part in parts], 1)


PEERS: tuple[type[Peer], ...] = (Zipnn, ZipnnLayers, MdsZstd, Safetensors)


def bare_package(name: str) -> None:
    """Make modules of a package importable without running what the package itself imports."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {name!r}")
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package


def empty(folder: Path) -> None:
    """An empty folder in its place."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def checked(kind: type[Peer], samples: Sequence[Words], folder: Path) -> tuple[Peer, int]:
    """A peer that gave back the bytes it was given, and how many it stored."""
    folder.mkdir()
    peer = kind(samples, folder)
    peer.prepare()
    peer.encode()
    stored_bytes = peer.stored_bytes
    for sample, found in zip(samples, peer.decode(), strict=True):
        if bytes(found) != sample.tobytes():
            raise ValueError("what it decodes is not what it was given")
    return peer, stored_bytes


def seconds(peer: Peer, operation: str) -> float:
    """Seconds of one operation on all samples."""
    if operation == "encode":
        peer.prepare()
    start = time.perf_counter()
    if operation == "encode":
        peer.encode()
    else:
        for _ in peer.decode():
            pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("states", type=Path)
    parser.add_argument("sample_tokens", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    # one core, whatever threads a peer starts: they all count its cores for themselves
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    states = np.load(options.states)
    starts = range(0, len(states), options.sample_tokens)
    samples = [np.ascontiguousarray(states[at : at + options.sample_tokens]) for at in starts]
    peers: dict[str, Peer] = {}
    stored: dict[str, int] = {}
    missing: dict[str, str] = {}
    for kind in PEERS:
        try:
            peers[kind.name], stored[kind.name] = checked(kind, samples, options.folder / kind.name)
        except Exception as error:  # somebody else's code: the other peers are measured
            missing[kind.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    answers.write(json.dumps({"stored_bytes": stored, "missing": missing}) + "\n")
    for line in sys.stdin:
        name, operation = line.split()
        answers.write(json.dumps({"seconds": seconds(peers[name], operation)}) + "\n")


if __name__ == "__main__":
    main()
