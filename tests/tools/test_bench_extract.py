"""The bench of extraction: every sample goes through the stage, every figure is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftmill.manifests.errors import ConfigError
from draftmill.tools.bench.extract import ExtractBench, bench_extract
from tests.manifests.test_codec_error import normal_words


@pytest.mark.slow
def test_figures(tmp_path: Path) -> None:
    states = normal_words((700, 4, 64))
    work, memory = tmp_path / "work", tmp_path / "memory"
    work.mkdir()
    memory.mkdir()
    rounds: list[tuple[int, int]] = []
    figures = bench_extract(
        states,
        ExtractBench(rounds=2, samples=9, sample_tokens=200, folder=work, memory=memory),
        on_round=lambda done, total: rounds.append((done, total)),
    )
    assert rounds == [(1, 2), (2, 2)]
    by_name = {figure["name"]: figure for figure in figures}
    assert by_name["extract.mb_s"]["baseline"] == "em-zfast.encode_threads_mb_s"
    assert by_name["em-zfast.encode_threads_mb_s"]["value"] > 0
    assert by_name["check.mb_s"]["value"] > 0
    ratio = by_name["extract.mb_s"]["ratio"]
    assert ratio is not None
    assert ratio > 0
    assert os.listdir(work) == os.listdir(memory) == []


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="lzma"):
        ExtractBench(codec="lzma")
    with pytest.raises(ValueError, match="samples"):
        ExtractBench(samples=0)
    with pytest.raises(ValueError, match="sample_tokens"):
        ExtractBench(sample_tokens=3)
