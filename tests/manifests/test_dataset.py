"""The writer and readers of a dataset: adding, committing, retrying, evicting, verifying."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftmill.manifests import maintenance
from draftmill.manifests import writer as writer_module
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DatasetError, LockedError, SettingsMismatch
from draftmill.manifests.maintenance import RowFilter
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.shards.shard import list_shards
from draftmill.manifests.snapshot import load_snapshot, write_snapshot
from draftmill.manifests.verify import verify
from tests.manifests import workload


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset.create(tmp_path / "dataset", "")


@pytest.fixture
def full(dataset: Dataset, tmp_path: Path) -> Dataset:
    workload.run(dataset.path, workload.Journal(tmp_path / "journal"))
    return dataset


def states_of(dataset: Dataset) -> dict[str, int]:
    with dataset.reader() as reader:
        return {k: v for k, v in reader.summary()["prompts"].items() if v}


def test_adding_twice_adds_nothing_and_longer_files_add_the_difference(dataset: Dataset) -> None:
    with dataset.writer() as writer:
        assert writer.add_prompts(workload.prompts(5)).added == 5
        report = writer.add_prompts(workload.prompts(5) + workload.prompts(7))
        assert (report.added, report.known) == (2, 10)
        rows = writer.pending(0, 100)
    assert [row.id for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert json.loads(rows[6].conversation)["messages"][0]["content"] == "question 6"


def test_create_refuses_folders_with_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatasetError, match="not empty"):
        Dataset.create(tmp_path, "")
    with pytest.raises(DatasetError, match="draftmill init"):
        Dataset.open(tmp_path)


def test_pending_rows_come_in_pages(dataset: Dataset) -> None:
    with dataset.writer() as writer:
        writer.add_prompts(workload.prompts(10))
        assert [row.id for row in writer.pending(4, 3)] == [5, 6, 7]
        assert writer.pending(10, 3) == []


def test_summary_counts_rows_tokens_and_bytes(full: Dataset) -> None:
    with full.reader() as reader:
        found = reader.summary()
        rows = reader.extracted().to_pylist()
    assert found["prompts"] == {
        "total": 14,
        "pending": 0,
        "generated": 0,
        "timed_out": 1,
        "failed": 0,
        "rejected": 1,
        "extracted": 12,
    }
    wanted = [workload.completion_of(n) for n in range(1, 15) if n not in (5, 9)]
    assert found["tokens"]["prompt"] == sum(len(c.prompt_token_ids) for c in wanted)
    assert found["tokens"]["completion"] == sum(len(c.completion_token_ids) for c in wanted)
    assert found["tokens"]["extracted"] == sum(len(c.token_ids) for c in wanted)
    assert found["truncated"] == sum(c.finish_reason == "length" for c in wanted)
    files = [p for p in full.path.rglob("*") if p.is_file()]
    assert found["disk"]["used_bytes"] == sum(p.stat().st_size for p in files)
    assert [row["id"] for row in rows] == [n for n in range(1, 15) if n not in (5, 9)]


def test_a_second_writer_is_refused_with_the_pid_of_the_first(full: Dataset) -> None:
    with full.writer(), pytest.raises(LockedError, match=str(os.getpid())) as caught:
        with full.writer():
            raise AssertionError("a second writer got in")
    assert caught.value.pid == os.getpid()


def _hold(path: Path, ready, done) -> None:  # runs in a process of its own
    with Dataset(path).writer(**workload.SIZES) as writer:
        writer.publish(snapshot=True, running={"stage": "test"})
        ready.set()
        done.wait(240)


def test_readers_work_while_another_process_writes(full: Dataset) -> None:
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(full.path, ready, done))
    process.start()
    try:
        assert ready.wait(240)
        with full.reader() as reader:
            assert reader.writer_pid == process.pid
            assert reader.summary()["running"] == {"stage": "test"}
            assert reader.extracted().num_rows == 12
            assert reader.sql("SELECT count(*) AS n FROM attempts").to_pylist()[0]["n"] == 26
            states = reader.sql("SELECT DISTINCT state FROM samples").num_rows
        assert states == 3
    finally:
        done.set()
        process.join(240)


def test_settings_that_changed_are_named(dataset: Dataset) -> None:
    with dataset.writer() as writer:
        writer.check_fingerprint("generate", {"model": "a", "limit": 10}, growable=("limit",))
        writer.check_fingerprint("generate", {"model": "a", "limit": 20}, growable=("limit",))
        with pytest.raises(SettingsMismatch, match="model is 'a' in the dataset and 'b'"):
            writer.check_fingerprint("generate", {"model": "b", "limit": 20}, growable=("limit",))
        with pytest.raises(SettingsMismatch, match=r"limit is 20 .* and 10"):
            writer.check_fingerprint("generate", {"model": "a", "limit": 10}, growable=("limit",))


def test_retry_keeps_history_and_the_old_completion(full: Dataset) -> None:
    with full.writer(**workload.SIZES) as writer:
        ids = maintenance.select(writer, RowFilter(states=["timed_out", "rejected"]))
        assert ids == [5, 9]
        assert maintenance.retry(writer, ids) == 2
        truncated = maintenance.select(writer, RowFilter(truncated=True))
        assert truncated == [4, 8, 12]
        maintenance.retry(writer, truncated)
    assert states_of(full) == {"total": 14, "pending": 5, "extracted": 9}
    with full.reader() as reader:
        old = reader.sql("SELECT generate_payload FROM samples WHERE id = 4").to_pylist()
        history = reader.sql("SELECT outcome FROM attempts WHERE id = 5 ORDER BY started_at")
    assert old == [{"generate_payload": 1}]
    assert history.column("outcome").to_pylist() == ["timed_out", "retried"]


def test_a_new_completion_makes_old_hidden_states_worthless(full: Dataset) -> None:
    with full.writer(**workload.SIZES) as writer:
        maintenance.retry(writer, [4])
        [prompt] = writer.pending(0, 10)
        writer.commit([workload.generate_result(prompt)])
        [sample] = writer.generated(0, 10)
        assert sample.id == 4
    full.manifest_path.unlink()
    with full.writer(**workload.SIZES) as writer:
        assert [sample.id for sample in writer.generated(0, 10)] == [4]


def test_evict_frees_whole_shards_and_keeps_completions(full: Dataset) -> None:
    with full.writer(**workload.SIZES) as writer:
        shards, rows, freed = maintenance.evict(writer, 1)
        assert shards == 1
        assert freed > 1
        assert rows >= 1
    assert states_of(full)["generated"] == rows
    full.manifest_path.unlink()
    with full.writer(**workload.SIZES) as writer:  # not adopted, not missed, not numbered again
        assert not writer.recovery.reverted
        workload.extract(writer, workload.Journal(full.path.parent / "journal2"))
    assert states_of(full)["extracted"] == 12
    with full.writer(**workload.SIZES) as writer:
        maintenance.evict(writer, None)
    assert list(full.hidden_states_dir.iterdir()) == []
    assert states_of(full) == {"total": 14, "generated": 12, "timed_out": 1, "rejected": 1}


def sharded(path: Path, plan: list[tuple[str, int]]) -> tuple[Dataset, dict[int, int]]:
    """Samples with these sources and lengths, two a shard; and the shard of each id."""
    dataset = Dataset.create(path, "")
    with dataset.writer(**workload.SIZES) as writer:
        writer.add_prompts(
            replace(prompt, source=source)
            for prompt, (source, _) in zip(workload.prompts(len(plan)), plan, strict=True)
        )
        writer.commit([workload.generate_result(row) for row in writer.pending(0, len(plan))])
        samples = writer.generated(0, len(plan))
        for first in range(0, len(plan), 2):
            pair = samples[first : first + 2]
            states = [workload.states_of(each.id, plan[each.id - 1][1]) for each in pair]
            writer.commit(list(map(workload.extract_result, pair, states)))
            writer.seal("hidden_states")
        rows = writer.manifest.rows("SELECT id, shard FROM payloads WHERE stage = 'extract'")
        return dataset, dict(rows)


# (source, tokens), two a shard: on average 20, 35, 30 and 35 tokens
PLAN = [("a", 30), ("a", 10), ("b", 35), ("a", 35), ("b", 40), ("b", 20), ("c", 60), ("c", 10)]


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, [0, 1, 2, 3]),
        ({"policy": "longest"}, [1, 3, 2, 0]),
        ({"source": "a"}, [0, 1]),
        ({"source": "b"}, [1, 2]),
        ({"source": "b", "policy": "longest"}, [1, 2]),
        ({"source": "a", "policy": "longest"}, [1, 0]),
        ({"source": "nobody's"}, []),
    ],
)
def test_evict_by_age_length_and_source(
    tmp_path: Path, options: dict[str, str], order: list[int]
) -> None:
    """One more shard each time, until there is none left that is meant."""
    dataset, shard_of = sharded(tmp_path / "d", PLAN)
    sizes = {number: path.stat().st_size for number, path in shards_of(dataset).items()}
    with dataset.writer(**workload.SIZES) as writer:
        for count in range(1, len(order) + 1):
            assert maintenance.evict(writer, 1, **options) == (1, 2, sizes[order[count - 1]])
            assert set(sizes) - set(shards_of(dataset)) == set(order[:count])
            gone = sorted(id for id, shard in shard_of.items() if shard in order[:count])
            assert [sample.id for sample in writer.generated(0, 100)] == gone
        assert maintenance.evict(writer, 1, **options) == (0, 0, 0)
        assert verify(dataset.path, writer.manifest).ok


def test_evict_frees_shards_that_no_row_refers_to_first(tmp_path: Path) -> None:
    """Superseded by a retry, put back by a repair, or known to nobody at all."""
    dataset, _ = sharded(tmp_path / "d", PLAN)
    with dataset.writer(**workload.SIZES) as writer:
        maintenance.revert(writer, [3, 4], "damaged", "test", "extract")  # shard 1
        copy = dataset.hidden_states_dir / "000099.safetensors"
        copy.write_bytes((dataset.hidden_states_dir / "000000.safetensors").read_bytes())
    with dataset.writer(**workload.SIZES) as writer:
        sizes = {number: path.stat().st_size for number, path in shards_of(dataset).items()}
        assert maintenance.evict(writer, None, source="nobody's") == (0, 0, 0)
        first = maintenance.evict(writer, sizes[1] + 1)
        assert first == (2, 0, sizes[1] + sizes[99])
        assert set(shards_of(dataset)) == {0, 2, 3}
        assert maintenance.evict(writer, None)[:2] == (3, 6)
        assert verify(dataset.path, writer.manifest).ok
        # what was freed is asked for again, and numbers are not used twice
        workload.extract(writer, workload.Journal(tmp_path / "journal"))
        assert min(shards_of(dataset)) > 99
    assert states_of(dataset)["extracted"] == len(PLAN)


def test_evict_takes_as_many_shards_as_the_size_needs(tmp_path: Path) -> None:
    dataset, _ = sharded(tmp_path / "d", PLAN)
    sizes = [path.stat().st_size for _, path in sorted(shards_of(dataset).items())]
    with dataset.writer(**workload.SIZES) as writer:
        wanted = sizes[1] + 1
        found = maintenance.evict(writer, wanted, policy="longest")
        assert found == (2, 4, sizes[1] + sizes[3])
        assert set(shards_of(dataset)) == {0, 2}
        assert maintenance.evict(writer, None, source="b") == (1, 2, sizes[2])
        assert maintenance.evict(writer, 10**12) == (1, 2, sizes[0])
    assert states_of(dataset) == {"total": len(PLAN), "generated": len(PLAN)}


def shards_of(dataset: Dataset) -> dict[int, Path]:
    return list_shards(dataset.hidden_states_dir)


def test_lost_payloads_put_rows_back(full: Dataset) -> None:
    first = sorted(full.completions_dir.glob("*.safetensors"))[0]
    first.unlink()
    with full.writer(**workload.SIZES) as writer:
        assert writer.recovery.reverted >= 1
        count = len(writer.pending(0, 100))
        assert count == writer.recovery.reverted
        workload.generate(writer, workload.Journal(full.path.parent / "journal2"))
        workload.extract(writer, workload.Journal(full.path.parent / "journal2"))
    assert states_of(full)["extracted"] == 12


@pytest.mark.parametrize("what", ["garbage", "empty", "wal"])
def test_a_damaged_manifest_is_moved_aside_and_rebuilt(full: Dataset, what: str) -> None:
    if what == "wal":
        full.manifest_path.with_name("manifest.duckdb.wal").write_bytes(b"\x07" * 4096)
    else:
        full.manifest_path.write_bytes(b"" if what == "empty" else b"junk" * 5000)
    with full.writer(**workload.SIZES) as writer:
        assert writer.summary()["prompts"]["extracted"] == 12
        assert writer.pending(0, 100) == []
    assert states_of(full)["extracted"] == 12


def test_a_moved_dataset_still_works(full: Dataset, tmp_path: Path) -> None:
    moved = full.path.rename(tmp_path / "elsewhere")
    assert states_of(Dataset.open(moved))["extracted"] == 12


@pytest.mark.parametrize("window_ids", [1, 3, 14, 5000])
def test_the_snapshot_holds_what_the_database_holds(
    full: Dataset, tmp_path: Path, window_ids: int
) -> None:
    """Also when it is written in several windows of ids, none of which ends with the rows."""
    query = "SELECT * FROM {} ORDER BY ALL"
    live = Manifest(full.manifest_path, read_only=True)
    restored = Manifest(None)
    write_snapshot(live, tmp_path / "snapshot", window_ids=window_ids)
    load_snapshot(restored, tmp_path / "snapshot")
    for table in ("prompts", "state", "attempts", "payloads", "shards", "meta"):
        assert live.rows(query.format(table)) == restored.rows(query.format(table)), table


def test_verify_finds_what_is_damaged_and_repair_puts_it_back(full: Dataset) -> None:
    with full.reader() as reader:
        clean = verify(full.path, reader.manifest, deep=False)
    assert clean.ok
    assert clean.samples_checked == 24
    victim = sorted(full.hidden_states_dir.glob("*.safetensors"))[1]
    content = bytearray(victim.read_bytes())
    content[-10] ^= 4
    victim.write_bytes(content)
    header = sorted(full.completions_dir.glob("*.safetensors"))[0]
    content = bytearray(header.read_bytes())
    content[40] ^= 1
    header.write_bytes(content)
    with full.writer(**workload.SIZES) as writer:
        report = verify(full.path, writer.manifest)
        assert sorted(f.shard.split("/")[0] for f in report.damaged) == [
            "completions",
            "hidden_states",
        ]
        damaged = next(f for f in report.damaged if f.stage == "extract")
        assert damaged.sample is not None
        assert maintenance.repair(writer, report) == 2
        assert [sample.id for sample in writer.generated(0, 9)] == [damaged.sample]
        again = verify(full.path, writer.manifest)
    assert again.damaged == []
    assert [fault.shard for fault in again.unused] == [damaged.shard]


def test_publish_is_rate_limited_and_forced_when_asked(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset.writer() as writer:
        writer.add_prompts(workload.prompts(3))
        writer.publish()
        first = json.loads(dataset.status_path.read_text())["time"]
        monkeypatch.setattr(writer_module, "_STATUS_EVERY_S", 3600.0)
        writer.publish()
        assert json.loads(dataset.status_path.read_text())["time"] == first
        time.sleep(0.01)
        writer.publish(snapshot=True)
        assert json.loads(dataset.status_path.read_text())["time"] > first


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_rebuild_without_a_prompt_file_loses_nothing_for_good(
    full: Dataset, snapshot: bool
) -> None:
    """The snapshot knows its prompts; without one they are strangers until the file is back."""
    before = states_of(full)
    away = {path: full.path.parent / path.name for path in sorted(full.prompts_dir.iterdir())}
    for path, kept in away.items():
        path.rename(kept)
    full.manifest_path.unlink()
    if not snapshot:
        full.snapshot_path.unlink()
    with full.writer(**workload.SIZES) as writer:
        report = verify(full.path, writer.manifest)
        said = "\n".join(writer.recovery.lines())
    if snapshot:
        assert states_of(full) == before
        assert [fault.shard for fault in report.damaged] == [f"prompts/{p.name}" for p in away]
    else:
        assert not states_of(full)
        assert "if a file of prompts/ is missing, put it back" in said
    for path, kept in away.items():
        kept.rename(path)
    with full.writer(**workload.SIZES) as writer:
        assert verify(full.path, writer.manifest).ok
    assert states_of(full)["extracted"] == before["extracted"]
