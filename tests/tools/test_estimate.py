"""Estimates: the published planning figures, arithmetic that holds for any job, what is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.tools.cli import main
from draftmill.tools.estimate.costs import STAGES, STORED_SHARE, Job, Rate, estimate
from tests.tools import story

KIMI = ("--hidden-size", "7168", "--layers", "4")


class Run:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["estimate", *words])
        captured = self.capsys.readouterr()
        self.err = captured.err
        assert ended.value.code == code, captured
        return captured.out


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


# -- published figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "raw", "printed"),
    [
        (10_000, 2_348_810_240_000, "2.35 TB (2.14 TiB)"),
        (50_000, 11_744_051_200_000, "11.7 TB (10.7 TiB)"),
    ],
)
def test_published_sizes(run: Run, samples: int, raw: int, printed: str) -> None:
    words = [*KIMI, "--samples", str(samples), "--tokens-per-sample", "4096"]
    found = json.loads(run(*words, "--json"))
    assert found["bytes_per_token"] == 57_344
    assert found["raw_bytes"] == found["stored_bytes"]["raw"] == raw
    text = run(*words)
    assert printed in text
    assert "4 layers x 7,168 x 2 bytes = 57,344" in text


def test_published_hours(run: Run) -> None:
    words = [*KIMI, "--samples", "25000", "--tokens-per-sample", "650"]
    for rate in ((), ("--rate", "generate=1600"), ("--rate", "generate=1,600")):
        found = json.loads(run(*words, *rate, "--json"))
        assert found["hours"]["generate"] == pytest.approx(2.8, abs=0.05)
    assert "2.8 h: 25,000 x 650 tokens at 1,600/s (given)" in run(*words, "--rate", "generate=1600")


def test_keys_are_stable(run: Run) -> None:
    found = json.loads(run(*KIMI, "--samples", "5", "--tokens-per-sample", "650", "--json"))
    assert set(found) >= {
        "hidden_size", "layers", "bytes_per_token", "samples", "tokens", "raw_bytes",
        "stored_bytes", "hours", "samples_that_fit",
    }  # fmt: skip
    assert list(found["hours"]) == ["generate", "extract", "train"]
    assert found["samples_that_fit"] is None


# -- any job -------------------------------------------------------------------------------------

rates = st.floats(1, 1e6).map(lambda speed: Rate(tokens_per_s=speed, source="test"))
jobs = st.builds(
    Job,
    hidden_size=st.integers(1, 20_000),
    layers=st.integers(1, 8),
    samples=st.integers(1, 10**6),
    tokens_per_sample=st.floats(1, 1e5),
    completion_tokens=st.just(1.0),
    rates=st.fixed_dictionaries(dict.fromkeys(STAGES, rates)),
    epochs=st.floats(0.5, 20),
    codec=st.sampled_from(list(STORED_SHARE)),
    budget_bytes=st.integers(1, 10**14),
    cost_per_hour=st.floats(0.1, 1000),
    link_gbps=st.floats(0.01, 1000),
)


@given(jobs)
def test_each_way_that_works_brings_the_job_into_its_budget(job: Job) -> None:
    found = estimate(job)
    assert found["fits"] == (not found["ways"])
    assert job.budget_bytes is not None
    for way in found["ways"]:
        if not way["works"]:
            continue
        changed = job
        if "codec" in way:
            changed = replace(job, codec=way["codec"])
        elif way["way"] == "fewer samples":
            changed = replace(job, samples=way["samples"])
        elif way["way"] == "shorter samples":
            changed = replace(job, tokens_per_sample=way["tokens_per_sample"])
        else:
            changed = replace(job, samples=-(-job.samples // way["rounds"]))
        # Tokens are whole: half of one may be rounded up.
        assert changed.stored_bytes <= job.budget_bytes + job.bytes_per_token


@given(jobs)
def test_the_link_idles_nobody_when_it_is_fast_enough(job: Job) -> None:
    move = estimate(job)["move"]
    needed = move["gbps_without_idling"]
    for factor, waits in ((0.5, True), (2.0, False)):
        if needed > 0.1:
            shown = estimate(replace(job, link_gbps=needed * factor))["move"]
            assert (shown["idle_hours"] > 0) == waits or shown["transfer_hours"] < 0.01
            hours = shown["hours_all_here"] + shown["idle_hours"]
            assert shown["hours_with_move"] == pytest.approx(hours, abs=0.01)


@given(jobs, st.integers(2, 9))
def test_twice_the_samples_take_twice_the_time_and_money(job: Job, times: int) -> None:
    job = replace(job, tokens_per_sample=float(round(job.tokens_per_sample)))
    once, more = estimate(job), estimate(replace(job, samples=times * job.samples))
    assert more["raw_bytes"] == times * once["raw_bytes"]
    for stage in STAGES:
        assert more["hours"][stage] == pytest.approx(times * once["hours"][stage], abs=0.01)
    assert more["samples_that_fit"] == once["samples_that_fit"]


def test_moving_the_states_has_its_arithmetic(run: Run) -> None:
    words = [*KIMI, "--samples", "10000", "--tokens-per-sample", "4096", "--codec", "raw"]
    words += ["--link-gbps", "1", "--cost-per-hour", "20", "--rate", "extract=10000"]
    move = json.loads(run(*words, "--json"))["move"]
    # 2.35 TB x 8 / 1 Gbit/s = 5.22 h; extraction takes 40.96 M / 10,000 / 3600 = 1.14 h
    assert move["transfer_hours"] == pytest.approx(5.22, abs=0.01)
    assert move["idle_hours"] == pytest.approx(4.08, abs=0.01)
    assert move["idle_cost"] == pytest.approx(81.6, abs=0.5)
    assert move["gbps_without_idling"] == pytest.approx(4.59, abs=0.01)
    assert "the GPUs wait" in run(*words)


def test_what_does_not_fit_is_said_with_every_way_out(run: Run) -> None:
    words = [*KIMI, "--samples", "10000", "--tokens-per-sample", "4096", "--disk-budget", "1TB"]
    text = run(*words)
    for way in ("fewer samples", "shorter samples", "lossy: rot4", "evict and extract again"):
        assert f"+ {way}" in text
    assert "- lossy: bitround-4" in text
    assert "samples fit" in text
    assert "fits" in run(*words[:-1], "2TB")


# -- where numbers come from ---------------------------------------------------------------------


def test_what_is_missing_is_named(run: Run, tmp_path: Path) -> None:
    run("--layers", "4", code=2)
    assert "--hidden-size, --samples, --tokens-per-sample" in run.err
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    run(*KIMI, "--prompts", str(prompts), code=2)
    assert "give --completion-tokens" in run.err
    run(*KIMI, "--rate", "generate", code=2)
    assert "generate=1600" in run.err
    run(*KIMI, "--rate", "generate=0", code=2)


def test_prompts_and_a_model_folder(run: Run, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 100}
    config |= {
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "architectures": ["LlamaForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n:0100d}"}}\n' for n in range(30)))
    words = ["--model", str(tmp_path), "--prompts", str(prompts), "--completion-tokens", "100"]
    found = json.loads(run(*words, "--json"))
    assert found["bytes_per_token"] == 4 * 64 * 2
    assert found["samples"] == 30
    assert found["completion_tokens"] == 100
    assert 125 < found["tokens_per_sample"] < 145
    assert "characters, 4 taken for a token" in run(*words)


def test_a_running_dataset_says_its_own_lengths_ratio_and_rates(run: Run, tmp_path: Path) -> None:
    path = str(story.make(tmp_path / "ds").path)
    found = json.loads(run(path, "--json"))
    assert found["samples"] == 200
    assert found["rates"]["extract"]["from"].startswith("measured over")
    assert found["rates"]["train"]["from"] == "kimi-8gpu"
    assert found["budget_bytes"] == 24_000_000
    status = _status(path)
    tokens = status["tokens"]["prompt"] + status["tokens"]["completion"]
    completed = status["prompts"]["generated"] + status["prompts"]["extracted"]
    assert found["tokens_per_sample"] >= tokens / (completed + 10)
    ratio = found["raw_bytes"] / found["stored_bytes"]["em-zfast"]
    assert ratio == pytest.approx(status["disk"]["compression_ratio"], rel=0.01)
    given = json.loads(run(path, "--json", "--samples", "7", "--rate", "extract=5"))
    assert given["samples"] == 7
    assert given["rates"]["extract"] == {"tokens_per_s": 5.0, "from": "given"}


def _status(path: str) -> dict[str, Any]:
    from draftmill.tools.status.command import document

    return document(path)


def test_a_new_dataset_is_taken_at_its_limits(run: Run, tmp_path: Path) -> None:
    path = str(story.make(tmp_path / "ds", prompts=20, generate=0, extract=0).path)
    found = json.loads(run(path, "--json"))
    assert found["samples"] == 20
    assert found["completion_tokens"] == 4096
    assert "as long as they may be" in run(path)
    assert "as long as they may be" not in run(path, "--tokens-per-sample", "99")
