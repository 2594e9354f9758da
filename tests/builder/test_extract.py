"""The extract stage against the fake server: every fault of a server ends in the right state."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from draftmill.builder.extraction import staging as staging_module
from draftmill.builder.progress import Progress, StageReport
from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError, ServerError, SettingsMismatch, UsageError
from draftmill.manifests.files import folder_bytes
from tests.builder.extraction import IDS, look, make_dataset, run
from tests.fakes.target_server import TargetServer
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


def extract_from(
    dataset: Dataset,
    staging: Path,
    plans: dict[int, list[str]] | None = None,
    server_options: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[StageReport, TargetServer]:
    """One run against a server that meets each sample of `plans` with these faults."""
    ids = IDS[dataset.path]

    async def go() -> tuple[StageReport, TargetServer]:
        options = {"staging": str(staging)} | (server_options or {})
        async with TargetServer(**options) as server:
            for sample, faults in (plans or {}).items():
                server.plan(ids[sample], faults)
            return await run(dataset, server.url, staging, **settings), server

    return asyncio.run(go())


def test_extracts_everything_once(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [20 + 53 * n for n in range(24)])
    seen: list[Progress] = []
    report, server = extract_from(dataset, staging, on_progress=seen.append)
    assert report.outcomes == {"extracted": 24}
    assert report.stopped is None
    assert look(dataset).extracted == 24
    assert report.tokens == sum(20 + 53 * n for n in range(24))
    assert os.listdir(staging) == []
    assert max(server.requests.values()) == 1
    assert (seen[-1].done, seen[-1].total) == (24, 24)
    for headers in server.headers:
        assert headers["X-Request-Id"].startswith("draftmill-")

    again, server = extract_from(dataset, staging)
    assert again.outcomes == {}
    assert not server.requests


def test_long_samples_are_cut_from_the_end_and_counted(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [30, 50, 51, 900, 10])
    report, server = extract_from(dataset, staging, max_seq_len=50)
    assert report.outcomes == {"extracted": 4, "rejected": 1}
    assert report.truncated == 2
    seen = look(dataset, max_seq_len=50)
    assert seen.extracted == 4
    ((_, kind, text),) = seen.attempts[5]
    assert kind == "nothing_supervised"
    assert "the completion has no tokens" in text
    assert len(server.requests) == 4

    long_prompts = make_dataset(tmp_path / "e", [80, 90], prompt_tokens=60)
    report, server = extract_from(long_prompts, staging, max_seq_len=60)
    assert report.outcomes == {"rejected": 2}
    assert not server.requests
    text = look(long_prompts).attempts[1][0][2]
    assert "the prompt has 60 tokens, max_seq_len is 60" in text


REJECTED = {
    "nan": r"NaN state (layer 30, position 30)",
    "inf": r"infinite state (layer 2, position 30)",
    "zeros": "zero (layer 2, position 0)",
    "zero_layer": "zero (layer 30, position 0)",
    "constant": "same in all channels",
    "wrong_ids": "the states belong to other tokens",
    "wrong_layers": "5 layers in the file, not 4",
    "wrong_hidden": "hidden size 16 in the file, not 32",
    "wrong_dtype": "F16, not BF16",
    "symlink": "is a link",
    "traversal": "which is no hidden-states file",
    "absolute": "'/etc/passwd', which is no hidden-states file",
}


def test_what_must_not_be_stored_is_rejected_and_the_rest_goes_on(
    tmp_path: Path, staging: Path
) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * (2 * len(REJECTED)))
    plans = {2 * index: [fault] for index, fault in enumerate(REJECTED, 1)}
    report, _ = extract_from(dataset, staging, plans)
    assert report.outcomes == {"extracted": len(REJECTED), "rejected": len(REJECTED)}
    seen = look(dataset)
    assert seen.extracted == len(REJECTED)
    for sample, (fault,) in plans.items():
        (found,) = seen.attempts[sample]
        assert found[:2] == ("rejected", "bad_states")
        assert REJECTED[fault] in found[2]
    assert os.listdir(staging) == []
    _, server = extract_from(dataset, staging)
    assert not server.requests, "a rejected sample is not asked for again"


def test_what_a_lossy_codec_cannot_hold_is_rejected(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 6)
    report, _ = extract_from(dataset, staging, {2: ["huge"], 5: ["huge"]}, codec="rot4")
    assert report.outcomes == {"extracted": 4, "rejected": 2}
    with dataset.reader() as reader:
        rows = reader.sql("SELECT error FROM attempts WHERE outcome = 'rejected'").to_pylist()
    for row in rows:
        assert row["error"] == (
            "rot4 cannot hold these states: rot4 takes finite values below 2 ** 120 only "
            "(layer 15, position 30)"
        )
    # a lossless codec takes them, and says that they are odd
    dataset = make_dataset(tmp_path / "lossless", [60] * 2)
    report, _ = extract_from(dataset, staging, {2: ["huge"]})
    assert report.outcomes == {"extracted": 2}


TRANSIENT = {
    "http_500": "ServerFailedError",
    "http_503": "OverloadedError",
    "http_429": "OverloadedError",
    "drop": "ConnectionCutError",
    "garbage": "GarbledReplyError",
    "truncated_file": "IncompleteFileError",
    "no_file": "TransientError",
    "wrong_length": "LengthMismatchError",
}


def test_what_may_pass_is_tried_again(tmp_path: Path, staging: Path) -> None:
    late = ("slow_write", "no_lock")
    dataset = make_dataset(tmp_path / "d", [60] * (len(TRANSIENT) + len(late)))
    plans = {sample: [fault] for sample, fault in enumerate((*TRANSIENT, *late), 1)}
    report, _ = extract_from(dataset, staging, plans, {"slow_write_s": 0.05})
    assert report.outcomes == {"extracted": len(plans), "transient": len(TRANSIENT)}
    seen = look(dataset)
    assert seen.extracted == len(plans)
    for sample, (fault,) in plans.items():
        expected: list[tuple[str, str | None]] = [("extracted", None)]
        if fault in TRANSIENT:
            expected = [("transient", TRANSIENT[fault]), ("extracted", None)]
        assert [each[:2] for each in seen.attempts[sample]] == expected
    assert os.listdir(staging) == []


def test_what_does_not_pass_fails(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 4)
    report, _ = extract_from(dataset, staging, {2: ["wrong_length"] * 9, 3: ["http_400"]})
    assert report.outcomes == {"extracted": 2, "transient": 1, "failed": 2}
    seen = look(dataset)
    outcome, kind, text = seen.attempts[2][-1]
    assert (outcome, kind) == ("failed", "LengthMismatchError")
    assert "44 tokens came back, 60 were sent" in text
    assert "--no-enable-prefix-caching" in text
    ((outcome, kind, text),) = seen.attempts[3]
    assert (outcome, kind) == ("failed", "PermanentError")
    assert "planned fault http_400" in text


def test_a_lock_that_is_never_released_is_tried_again(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 4)
    report, _ = extract_from(
        dataset, staging, {2: ["lock_held"]}, lock_timeout_s=1.0, orphan_age_s=0.2
    )
    assert report.outcomes == {"extracted": 4, "transient": 1}
    first, second = look(dataset).attempts[2]
    assert first[1] == "LockHeldError"
    assert "http://127.0.0.1" in first[2]
    assert second[0] == "extracted"
    assert os.listdir(staging) == []


def test_requests_that_time_out(tmp_path: Path, staging: Path) -> None:
    """What hangs becomes a state; the file of a request that was given up is swept."""
    dataset = make_dataset(tmp_path / "d", [60] * 4)
    report, _ = extract_from(
        dataset,
        staging,
        {2: ["hang"] * 9, 3: ["hang_after_write"]},
        request_timeout_s=1.0,
    )
    seen = look(dataset)
    assert seen.states == {"extracted": 3, "timed_out": 1}
    assert report.outcomes["timed_out"] == 1
    assert [each[:2] for each in seen.attempts[2]] == [
        ("transient", "TimedOutError"),
        ("timed_out", "TimedOutError"),
    ]
    assert seen.attempts[3][0][:2] == ("transient", "TimedOutError")
    assert os.listdir(staging) == []


def test_orphans_of_a_dead_run_are_swept_and_others_left(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 2)
    dead = staging_module.Staging(staging, dataset.path)
    alien = staging_module.Staging(staging, tmp_path / "other")
    for name in (dead.request_id(1, 1), alien.request_id(1, 1)):
        (staging / f"cmpl-{name}-0-ff.safetensors").write_bytes(b"x")
    extract_from(dataset, staging)
    assert os.listdir(staging) == [f"cmpl-{alien.request_id(1, 1)}-0-ff.safetensors"]


# -- servers that are wrong as a whole -----------------------------------------------------------


@pytest.mark.parametrize("fault", ["zeros", "http_400"])
def test_stops_when_the_first_samples_are_all_bad(
    tmp_path: Path, staging: Path, fault: str
) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 20)
    report, _ = extract_from(
        dataset, staging, server_options={"faults": {fault: 1.0}}, stop_after_bad=5
    )
    assert report.stopped is not None
    assert "5 samples in a row were bad, the last one" in report.stopped
    assert look(dataset).states == {"generated": 20}
    assert os.listdir(staging) == []
    report, _ = extract_from(dataset, staging)
    assert report.outcomes["extracted"] == 20


def test_a_few_bad_samples_at_the_start_are_no_reason_to_stop(
    tmp_path: Path, staging: Path
) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 8)
    plans = {number: ["nan"] for number in (1, 2, 3, 8)}
    report, _ = extract_from(dataset, staging, plans, stop_after_bad=4, concurrency=1)
    assert report.stopped is None
    assert look(dataset).states == {"rejected": 4, "extracted": 4}


def test_a_generation_server_is_refused(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 4)
    report, _ = extract_from(dataset, staging, server_options={"staging": None})
    assert "answers without hidden states" in (report.stopped or "")
    assert look(dataset).states == {"generated": 4}


def test_another_staging_folder_is_noticed(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "NO_FILE_S", 0.05)
    dataset = make_dataset(tmp_path / "d", [60] * 4)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    report, _ = extract_from(
        dataset, staging, server_options={"staging": str(elsewhere)}, stop_after_bad=2, tries=2
    )
    assert "shared_storage_path" in (report.stopped or "")
    assert look(dataset).states == {"generated": 4}


def test_wrong_urls_models_and_folders_are_one_clear_line(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60])

    async def go() -> None:
        async with TargetServer(staging=str(staging)) as server:
            with pytest.raises(ConfigError, match=r"staging: .* cannot be opened"):
                await run(dataset, server.url, tmp_path / "none")
            with pytest.raises(ServerError, match="does not serve 'another'"):
                await run(dataset, server.url, staging, model="another")
            with pytest.raises(UsageError, match="no server to ask"):
                await run(dataset, [], staging)
            url = server.url
        with pytest.raises(ServerError, match=f"no server answers at {url}"):
            await run(dataset, url, staging)

    asyncio.run(go())
    assert look(dataset).states == {"generated": 1}


def test_other_settings_are_refused(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 2)
    extract_from(dataset, staging)
    with pytest.raises(SettingsMismatch, match="max_seq_len is 8192 in the dataset and 99"):
        extract_from(dataset, staging, max_seq_len=99)
    extract_from(dataset, staging, concurrency=3, codec="raw")


def test_a_sample_longer_than_the_server_takes(tmp_path: Path, staging: Path) -> None:
    """One that just fills the context loses a token, because the server generates one."""
    dataset = make_dataset(tmp_path / "d", [99, 100, 101])
    report, server = extract_from(dataset, staging, server_options={"max_model_len": 100})
    assert report.outcomes == {"extracted": 2, "failed": 1}
    assert report.truncated == 1
    assert sorted(len(body["prompt"]) for body in server.bodies) == [99, 99]
    assert "larger --max-model-len" in look(dataset, max_seq_len=99).attempts[3][0][2]


def test_an_outage_costs_no_attempt(
    tmp_path: Path, staging: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="draftmill")
    dataset = make_dataset(tmp_path / "d", [60] * 30)

    async def go() -> StageReport:
        async with TargetServer(staging=str(staging), latency_s=0.02) as server:
            running = asyncio.create_task(run(dataset, server.url, staging, concurrency=4))
            await until(lambda: server.answered.total() > 4)
            await server.go_down()
            await until(lambda: "waiting for the server" in caplog.text)
            await server.come_up()
            return await running

    assert asyncio.run(go()).outcomes == {"extracted": 30}
    seen = look(dataset)
    assert seen.states == {"extracted": 30}
    assert all(len(tries) == 1 for tries in seen.attempts.values())


def test_several_servers_share_the_work_and_one_may_be_away(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 24)

    async def go() -> None:
        options: dict[str, Any] = {"staging": str(staging), "latency_s": 0.02}
        async with TargetServer(**options) as one, TargetServer(**options) as two:
            gone = "http://127.0.0.1:1/v1"
            report = await run(dataset, [one.url, gone, two.url], staging, concurrency=2)
            assert report.outcomes == {"extracted": 24}
            assert min(sum(one.answered.values()), sum(two.answered.values())) > 3
            assert max(one.peak_in_flight, two.peak_in_flight) <= 2
            other = TargetServer(model="fake/other", staging=str(staging))
            async with other:
                with pytest.raises(ServerError, match="does not serve"):
                    await run(dataset, [one.url, other.url], staging)

    asyncio.run(go())
    assert look(dataset).extracted == 24


def test_tokens_in_flight_are_capped(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [100] * 12 + [500])

    async def go() -> int:
        async with TargetServer(staging=str(staging)) as server:
            server.stuck = True  # until as many are there as may be
            running = asyncio.create_task(
                run(dataset, server.url, staging, max_in_flight_tokens=300)
            )
            await until(lambda: server.in_flight >= 3)
            server.stuck = False
            assert (await running).outcomes == {"extracted": 13}
            return server.peak_in_flight

    assert asyncio.run(go()) == 3


# -- room ----------------------------------------------------------------------------------------


def watched(dataset: Dataset, staging: Path, peaks: list[int]) -> Any:
    def look(_: Progress) -> None:
        peaks.append(folder_bytes(dataset.path) + folder_bytes(staging))

    return look


def test_stops_at_the_budget_with_a_dataset_that_trains(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [300] * 30)
    limit = folder_bytes(dataset.path) + (4 << 20)
    peaks: list[int] = []
    report, _ = extract_from(
        dataset,
        staging,
        limit_bytes=limit,
        headroom_bytes=3 << 20,
        on_progress=watched(dataset, staging, peaks),
    )
    assert report.over_budget
    assert "The disk budget of" in (report.stopped or "")
    done = report.outcomes["extracted"]
    assert 2 < done < 30
    assert look(dataset).states == {"extracted": done, "generated": 30 - done}
    assert max(peaks) <= limit
    assert os.listdir(staging) == []
    more, _ = extract_from(dataset, staging)
    assert more.outcomes["extracted"] == 30 - done


def test_staging_that_fills_makes_sending_wait(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [300] * 12)
    report, server = extract_from(dataset, staging, staging_size="300KB")
    assert report.outcomes == {"extracted": 12}
    assert server.peak_in_flight <= 2


def test_a_full_disk_is_handled_like_the_budget(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [200] * 24)
    files.arm("write.hidden_states.before@8=enospc")
    report, _ = extract_from(dataset, staging, concurrency=4)
    files.arm("")
    assert report.over_budget
    seen = look(dataset)
    done = seen.extracted
    assert 0 < done < 24
    assert seen.states == {"extracted": done, "generated": 24 - done}
    assert os.listdir(staging) == []
    extract_from(dataset, staging)
    assert look(dataset).extracted == 24


# -- stopping ------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_arrived(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 120)

    interrupted: list[int] = []

    def interrupt(progress: Progress) -> None:
        if progress.done >= 20 and not interrupted:
            interrupted.append(progress.done)
            os.kill(os.getpid(), signal.SIGINT)

    report, server = extract_from(
        dataset, staging, server_options={"latency_s": 0.01}, on_progress=interrupt
    )
    assert report.interrupted
    seen = look(dataset)
    done = seen.extracted
    assert 20 <= done < 120
    assert seen.states == {"extracted": done, "generated": 120 - done}
    assert os.listdir(staging) == []
    assert len(server.requests) - done <= 8


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 30)
    ids = IDS[dataset.path]

    async def go() -> StageReport:
        async with TargetServer(staging=str(staging)) as server:
            for sample in range(10, 31):
                server.plan(ids[sample], ["hang"])
            running = asyncio.create_task(run(dataset, server.url, staging, stop_grace_s=300.0))
            await until(lambda: server.in_flight >= 8 and server.requests.total() >= 17)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
            return await running

    report = asyncio.run(go())
    assert report.interrupted
    assert look(dataset).extracted <= 9
    extract_from(dataset, staging)
    assert look(dataset).extracted == 30


# -- all at once ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_mixed_faults_end_in_the_right_states(tmp_path: Path, staging: Path) -> None:
    """A tenth of all requests go wrong in each way; a second run asks only for what is left."""
    dataset = make_dataset(tmp_path / "d", [40 + n % 90 for n in range(60)])
    faults = dict.fromkeys(
        ("nan", "wrong_ids", "no_file", "http_500", "drop", "wrong_length", "truncated_file"), 0.06
    )
    report, _ = extract_from(
        dataset, staging, server_options={"faults": faults, "seed": 3}, stop_after_bad=0
    )
    found = look(dataset).states
    assert found["extracted"] == report.outcomes["extracted"] > 25
    assert sum(found.values()) == 60
    assert found["rejected"] == report.outcomes["rejected"] > 2
    assert found["failed"] == report.outcomes["failed"] > 0
    assert set(found) <= {"extracted", "rejected", "failed"}
    assert os.listdir(staging) == []
    again, server = extract_from(dataset, staging)
    assert not server.requests
    assert again.outcomes == {}


@pytest.mark.slow
def test_budget_holds_under_random_faults(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    dataset = make_dataset(tmp_path / "d", [rng.randrange(20, 900) for _ in range(30)])
    limit = folder_bytes(dataset.path) + (5 << 20)
    peaks: list[int] = []

    def measure(*_: object) -> None:
        peaks.append(folder_bytes(dataset.path) + folder_bytes(staging))

    monkeypatch.setattr(files, "observer", measure)  # after each of our own writes

    async def go() -> None:
        faults = dict.fromkeys(("no_file", "truncated_file", "drop", "wrong_length"), 0.1)
        async with TargetServer(staging=str(staging), faults=faults) as server:
            running = asyncio.create_task(
                run(
                    dataset,
                    server.url,
                    staging,
                    limit_bytes=limit,
                    headroom_bytes=3 << 20,
                    lock_timeout_s=0.2,
                    stop_after_bad=0,
                )
            )
            while not running.done():  # and in between, for those of the server
                measure()
                await asyncio.sleep(0.002)
            await running

    asyncio.run(go())
    assert len(peaks) > 10
    assert max(peaks) <= limit
    assert look(dataset).extracted > 0
