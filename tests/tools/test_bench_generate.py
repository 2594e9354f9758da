"""The benches of the generate stage run to their end and give the figures they promise."""

from __future__ import annotations

from functools import partial

import pytest

from draftmill.manifests.errors import DraftmillError
from draftmill.tools.bench import generate
from draftmill.tools.bench.fake_server import fake_server
from draftmill.tools.bench.figures import Figure
from draftmill.tools.bench.generate import ThroughputBench, bench_throughput
from draftmill.tools.bench.manifest import ManifestBench, bench_manifest
from draftmill.tools.bench.story import StoryBench, bench_story


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    found = {each["name"]: each for each in figures}
    assert len(found) == len(figures)
    return found


def test_manifest() -> None:
    found = by_name(bench_manifest(ManifestBench(completions=300, window=50)))
    assert found["manifest.completions_per_s"]["value"] > 0
    assert found["manifest.snapshot_s"]["unit"] == "s"
    with pytest.raises(ValueError, match="window"):
        ManifestBench(window=0)


@pytest.mark.slow
def test_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run says every 3 s how far it is: this server's answers take 20 s on any machine."""
    monkeypatch.setattr(generate, "fake_server", partial(fake_server, latency_s=0.8))
    bench = ThroughputBench(prompts=25 * 64, concurrency=64, client_requests=64)
    found = by_name(bench_throughput(bench))
    for name in ("generate.completions_per_s", "generate.peak_rss_mb", "status.worst_s"):
        assert found[name]["value"] > 0
    over = found["generate.cpu_ms"]["value"] - found["client.cpu_ms"]["value"]
    assert found["generate.cpu_ms_over_client"]["value"] == pytest.approx(over)


@pytest.mark.slow
def test_a_run_that_is_over_at_once_gives_no_figures() -> None:
    """Two prompts are two commits at most, and nothing is said between commits."""
    with pytest.raises(DraftmillError, match="more prompts"):
        bench_throughput(ThroughputBench(prompts=2, client_requests=10))


@pytest.mark.slow
def test_story() -> None:
    found = by_name(bench_story(StoryBench(scale=60, prompts=120)))
    for name in ("no_deadline", "draftmill_timeout", "draftmill_auto"):
        assert found[f"{name}.lost"]["value"] == 0
    assert found["plain_timeout.lost"]["unit"] == "%"
    assert found["draftmill_auto.wall_s"]["baseline"] == "no_deadline.wall_s"
