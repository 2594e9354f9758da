"""What stands beside the codecs: other people's formats, in a Python of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from draftmill.manifests.codec import codec
from draftmill.manifests.errors import DraftmillError, UsageError
from draftmill.tools.bench import peer_process, peers
from draftmill.tools.bench.peer_process import rivals_in
from draftmill.tools.bench.shards import ShardsBench, bench_shards
from draftmill.tools.cli import main
from tests.manifests.test_codec_error import normal_words

PYTHON = Path(sys.executable)
TOKENS = 40
# peers.py with other peers in it: one that is good, though it prints and overwrites what it is
# given, and some that are not
SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(Path(peers.__file__).parent)!r})
import peers

class Good(peers.Peer):
    name = "good"
    def prepare(self):
        self.given = [bytearray(sample) for sample in self.samples]
    def encode(self):
        print("this is no answer")
        self.stored = [bytes(data) for data in self.given]
        for data in self.given:
            data[:] = bytes(len(data))
    def decode(self):
        yield from self.stored
    @property
    def stored_bytes(self):
        return sum(map(len, self.stored))

class Wrong(Good):
    name = "wrong"
    def decode(self):
        for data in self.stored:
            yield data[:-1] + bytes([data[-1] ^ 1])

class Short(Good):
    name = "short"
    def decode(self):
        yield from self.stored[:-1]

class Absent(Good):
    name = "absent"
    def prepare(self):
        import not_a_package_of_anybody

class Dying(Good):
    name = "dying"
    decodes = 0
    def decode(self):
        self.decodes += 1
        if self.decodes > 1:
            sys.stderr.write("free(): invalid pointer\\n")
            sys.stderr.flush()
            os._exit(7)
        yield from self.stored

peers.PEERS = (Wrong, Good, Short, Absent, Dying)
peers.main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_what_is_missing_or_wrong_is_left_out(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = normal_words((3 * TOKENS + 1, 2, 16))
    with rivals_in(PYTHON, states, TOKENS, script=script) as found:
        by_name = {rival.name: rival for rival in found}
        assert list(by_name) == ["good", "dying", "em-zfast-shards"]
        assert by_name["good"].stored_bytes == states.nbytes
        for name in ("good", "em-zfast-shards"):
            for operation in ("encode", "decode", "encode", "encode", "decode"):
                assert by_name[name].seconds(operation) > 0
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in said] == ["wrong", "short", "absent"]
    assert "not_a_package_of_anybody" in said[2]


def test_a_peer_that_dies_ends_the_bench_with_its_last_words(script: Path) -> None:
    with rivals_in(PYTHON, normal_words((TOKENS, 2, 16)), TOKENS, script=script) as found:
        dying = next(rival for rival in found if rival.name == "dying")
        for _ in range(2):  # the second time, nobody reads what is asked
            with pytest.raises(DraftmillError, match=r"exit code 7: free\(\): invalid pointer"):
                dying.seconds("decode")


def test_a_python_that_cannot_be_used(tmp_path: Path) -> None:
    states = normal_words((TOKENS, 2, 16))
    with (
        pytest.raises(UsageError, match="no-python"),
        rivals_in(tmp_path / "no-python", states, TOKENS),
    ):
        pass
    script = tmp_path / "script.py"
    script.write_text("import not_a_package_of_anybody")
    with (
        pytest.raises(DraftmillError, match=r"exit code 1: .*not_a_package"),
        rivals_in(PYTHON, states, TOKENS, script=script),
    ):
        pass


def test_figures_beside_those_of_the_codecs() -> None:
    """Of the peers, draftmill's own environment has safetensors."""
    states = normal_words((codec.BLOCK_TOKENS + 30, 2, 16))
    settings = ShardsBench(codecs=("em-zfast",), rounds=5)
    with rivals_in(PYTHON, states, codec.BLOCK_TOKENS) as found:
        figures = bench_shards(states, settings, rivals=found)
    by_name = {figure["name"]: figure for figure in figures}
    for name in ("safetensors", "em-zfast-shards"):
        for what in ("ratio", "encode_mb_s", "decode_mb_s"):
            figure = by_name[f"{name}.{what}"]
            assert figure["value"] > 0
            base = by_name[f"zstd-1.{what}"]["value"]
            assert figure["ratio"] == pytest.approx(figure["value"] / base)
    assert 0.95 < by_name["safetensors.ratio"]["value"] < 1
    assert by_name["em-zfast-shards.ratio"]["value"] < by_name["em-zfast.ratio"]["value"]


def test_without_peers_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer_process, "CLONE", tmp_path)
    np.save(tmp_path / "states.npy", normal_words((TOKENS, 2, 16)))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "shards", "--states", str(tmp_path / "states.npy"), "--json"])
    assert ended.value.code == 0
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "make bench-env" in captured.err
    names = {figure["name"] for figure in json.loads(captured.out)}
    assert "em-zfast.ratio" in names
    assert "safetensors.ratio" not in names


@pytest.mark.slow
@pytest.mark.skipif(not peer_process.bench_python(), reason="`make bench-env` was not run")
def test_the_peers_of_the_bench_environment(capsys: pytest.CaptureFixture[str]) -> None:
    python = peer_process.bench_python()
    assert python is not None
    states = normal_words((2 * codec.BLOCK_TOKENS + 30, 4, 64))
    with rivals_in(python, states, codec.BLOCK_TOKENS) as found:
        by_name = {rival.name: rival for rival in found}
        assert set(by_name) == {kind.name for kind in peers.PEERS} | {"em-zfast-shards"}
        for rival in found:
            assert rival.seconds("encode") > 0
            assert rival.seconds("decode") > 0
    assert by_name["zipnn"].stored_bytes < by_name["mds-zstd"].stored_bytes < states.nbytes
    assert by_name["safetensors"].stored_bytes > states.nbytes
    assert "left out" not in capsys.readouterr().err
