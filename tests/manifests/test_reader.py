"""Reading hidden states back: any block length, any prefix, and records that lie about both."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests.codec import codec
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.shards.record import Draft
from draftmill.manifests.shards.shard_writer import ShardWriter
from draftmill.manifests.types import Attempt, Location, StatesTLH

CODECS = ("em-zfast", "bitround-4", "rot4", "raw")


def states_of(num_tokens: int, layers: int = 2, hidden: int = 70) -> StatesTLH:
    values = np.random.default_rng(num_tokens).normal(size=(num_tokens, layers, hidden))
    words: StatesTLH = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return words


def draft_of(
    states: StatesTLH, name: str, block_tokens: int, claims: dict[str, Any] | None = None
) -> Draft:
    """A record of these states; `claims` are what its header says instead."""
    blocks = codec.encode_states(states, name, block_tokens=block_tokens)
    form = {"codec": name, "shape": list(states.shape), "block_tokens": block_tokens}
    content = {**form, **(claims or {})}
    raw_bytes = content.pop("raw_bytes", states.nbytes)
    return Draft(
        id=1,
        hash="0" * 32,
        stage="extract",
        attempt=Attempt(id=1, stage="extract", attempt=1, outcome="extracted"),
        digest="d",
        tokens=len(states),
        raw_bytes=raw_bytes,
        content=content,
        payloads=[(f"states.{i:04d}", block) for i, block in enumerate(blocks)],
    )


def stored(root: Path, item: Draft) -> Location:
    folder = root / "hidden_states"
    folder.mkdir(exist_ok=True)
    number = len(list(folder.iterdir()))
    writer = ShardWriter(folder, "hidden_states", 1 << 20, next_number=number, resume=None)
    location = writer.append(item)[1]
    writer.close()
    return location


@settings(max_examples=40)
@given(
    st.sampled_from(CODECS),
    st.integers(0, 300),
    st.sampled_from([1, 7, 64, 100, 256, 299, 300, 301, 512, 1024]),
    st.integers(1, 3),
    st.data(),
)
def test_every_prefix_with_every_block_length(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    num_tokens: int,
    block_tokens: int,
    threads: int,
    data: st.DataObject,
) -> None:
    root = tmp_path_factory.mktemp("reader")
    states = states_of(num_tokens)
    item = draft_of(states, name, block_tokens)
    location = stored(root, item)
    whole = np.empty_like(states)
    blocks = [block for _, block in item.payloads]
    codec.decode_states(name, blocks, whole, block_tokens=block_tokens)
    if codec.is_lossless(name):
        np.testing.assert_array_equal(whole, states)
    reader = ShardReader(root)
    np.testing.assert_array_equal(reader.states(location, threads=threads), whole)
    tokens = data.draw(st.integers(0, num_tokens + 5), label="tokens")
    prefix = whole[:tokens]
    found = reader.states(location, tokens=tokens, threads=threads)
    np.testing.assert_array_equal(found, prefix)
    out = np.zeros_like(prefix)
    assert reader.states(location, tokens=tokens, out=out, threads=threads) is out
    np.testing.assert_array_equal(out, prefix)
    reader.close()


@pytest.mark.parametrize(
    "claims",
    [
        {"block_tokens": 0},
        {"block_tokens": -512},
        {"block_tokens": 99},
        {"block_tokens": 1},
        {"block_tokens": 1e308},
        {"block_tokens": "many"},
        {"shape": [200, 2, 69]},
        {"shape": [-200, -2, 70]},
        {"shape": [200, 2]},
        {"shape": [200.5, 2, 70], "codec": "none"},
        {"codec": "zip"},
        # nothing at all, in a billion blocks
        {"shape": [10**9, 0, 0], "block_tokens": 1, "raw_bytes": 0},
        {"shape": [1 << 60, 2, 70], "block_tokens": 1 << 60, "raw_bytes": (1 << 60) * 2 * 70 * 2},
        {"shape": [10**7, 2, 70], "block_tokens": 5 * 10**6, "raw_bytes": 10**7 * 2 * 70 * 2},
    ],
)
def test_a_record_that_lies_about_its_shape(tmp_path: Path, claims: dict[str, Any]) -> None:
    location = stored(tmp_path, draft_of(states_of(200), "em-zfast", 100, claims))
    with pytest.raises(DamagedError, match="hidden_states/000000 at byte"):
        ShardReader(tmp_path).states(location)


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    location = stored(tmp_path, draft_of(states_of(200), "em-zfast", 100))
    with pytest.raises(ValueError, match="out has shape"):
        ShardReader(tmp_path).states(location, out=np.empty((100, 2, 70), np.uint16))


FEW_FILES = """
import resource, sys
from pathlib import Path
from draftmill.manifests.errors import DraftmillError
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.types import Location

folder, offset, length, spare, more = Path(sys.argv[1]), *map(int, sys.argv[2:])
used = len(list(Path("/proc/self/fd").iterdir())) - 1  # the listing's own
resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare + more))
reader = ShardReader(folder)
try:
    for number in range(6):
        print(reader.states(Location(number, offset, length)).shape)
except DraftmillError as error:
    print(error)
"""


@pytest.mark.parametrize(("more", "read"), [(30, 6), (0, 3)])
def test_more_shards_than_files_may_be_open(tmp_path: Path, more: int, read: int) -> None:
    """What is granted without asking is taken; beyond that, it says what to do."""
    found = [stored(tmp_path, draft_of(states_of(3), "raw", 512)) for _ in range(6)]
    assert [(each.shard, each.offset) for each in found] == [(n, found[0].offset) for n in range(6)]
    arguments = (tmp_path, found[0].offset, found[0].length, 3, more)
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines.count("(3, 2, 70)") == read
    assert (lines[-1].count("ulimit -n") == 1) == (read < 6)


def test_a_shard_whose_opening_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither other shards nor closing; and whoever comes back late leaves one file open."""
    locations = [stored(tmp_path, draft_of(states_of(9), "raw", 4)) for _ in range(2)]
    reader = ShardReader(tmp_path)
    answers, asked = threading.Event(), threading.Barrier(3)
    opened = ShardReader._open

    def hanging(self: ShardReader, kind: Any, number: int) -> int:
        if number == 0:
            asked.wait()
            answers.wait()
        return opened(self, kind, number)

    monkeypatch.setattr(ShardReader, "_open", hanging)
    threads = [threading.Thread(target=reader.states, args=locations[:1]) for _ in range(2)]
    for thread in threads:
        thread.start()
    asked.wait()
    assert np.array_equal(reader.states(locations[1]), states_of(9))
    reader.close()
    before = len(os.listdir("/proc/self/fd"))
    answers.set()
    for thread in threads:
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    reader.close()
