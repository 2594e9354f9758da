"""The bench of codecs gives every figure it promises, each against its baseline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftmill.manifests.codec import codec
from draftmill.manifests.errors import ConfigError, UsageError
from draftmill.tools.bench.saved_states import load_states
from draftmill.tools.bench.shards import ShardsBench, bench_shards
from tests.manifests.test_codec_error import normal_words, tiny_target


def test_figures(tmp_path: Path) -> None:
    states = normal_words((codec.BLOCK_TOKENS + 30, 2, 16))
    rounds: list[tuple[int, int]] = []
    figures = bench_shards(
        states,
        ShardsBench(codecs=("em-zfast", "bitround-4", "rot4", "raw"), rounds=5, kl_tokens=16),
        target=tiny_target(tmp_path),
        on_round=lambda done, total: rounds.append((done, total)),
    )
    assert rounds == [(i, 5) for i in range(1, 6)]
    by_name = {figure["name"]: figure for figure in figures}
    assert len(by_name) == len(figures)
    for name in ("zstd-1", "em-zfast", "bitround-4", "rot4", "raw"):
        for what in ("ratio", "encode_mb_s", "decode_mb_s"):
            figure = by_name[f"{name}.{what}"]
            assert figure["value"] > 0
            assert figure["baseline"] == "zstd-1"
            base = by_name[f"zstd-1.{what}"]["value"]
            assert figure["ratio"] == pytest.approx(figure["value"] / base)
    stored = sum(map(len, codec.encode_states(states, "em-zfast")))
    assert by_name["em-zfast.ratio"]["value"] == pytest.approx(states.nbytes / stored)
    assert by_name["em-zfast.decode_planes_mb_s"]["baseline"] == "zstd-1"
    assert by_name["em-zfast.encode_threads_mb_s"]["baseline"] == "em-zfast.encode_mb_s"
    for name in ("bitround-4", "rot4"):
        for what in ("kl", "error.layer_1", "channel_error.layer_0"):
            assert by_name[f"{name}.{what}"]["baseline"] == "fp8-e4m3"
            assert by_name[f"{name}.{what}"]["value"] > 0
    assert by_name["fp8-e4m3.ratio"]["value"] > 2
    assert "em-zfast.kl" not in by_name


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="lzma"):
        ShardsBench(codecs=("lzma",))
    with pytest.raises(ValueError, match="rounds"):
        ShardsBench(rounds=3)
    with pytest.raises(ValueError, match="threads"):
        ShardsBench(threads=0)


def test_states_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "states.npy"
    states = normal_words((3, 2, 4))
    np.save(path, states)
    assert np.array_equal(load_states(path), states)
    np.save(path, states.astype(np.float32))
    with pytest.raises(UsageError, match="uint16"):
        load_states(path)
    path.write_bytes(b"no array")
    with pytest.raises(UsageError, match=r"states\.npy"):
        load_states(path)
    with pytest.raises(UsageError, match="missing"):
        load_states(tmp_path / "missing.npy")
