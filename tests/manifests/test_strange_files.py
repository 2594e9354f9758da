"""What somebody else put into a dataset's folder, took away or damaged: nothing good is lost."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests import maintenance
from draftmill.manifests.dataset import Dataset, DatasetReader
from draftmill.manifests.errors import DatasetError
from draftmill.manifests.shards.shard import data_start, first_record, is_open, list_shards
from draftmill.manifests.verify import VerifyReport, verify
from tests.manifests import workload

KINDS = ("completions", "hidden_states")


def made(folder: Path, name: str = "d") -> Dataset:
    dataset = Dataset.create(folder / name, "")
    workload.run(dataset.path, workload.Journal(folder / f"{name}.journal"))
    return dataset


def content(dataset: Dataset) -> dict[int, tuple[bytes, ...]]:
    """Every stored byte that a trainer would see, by prompt id."""
    with dataset.reader() as reader:
        return {row["id"]: _sample(reader, row) for row in reader.extracted().to_pylist()}


def _sample(reader: DatasetReader, row: dict[str, int]) -> tuple[bytes, ...]:
    generate, extract = (
        workload.Location(*(row[f"{stage}_{part}"] for part in ("shard", "offset", "length")))
        for stage in ("generate", "extract")
    )
    completion = reader.shards.completion(generate)
    return completion.token_ids.tobytes(), reader.shards.states(extract).tobytes()


def repaired(dataset: Dataset) -> VerifyReport:
    with dataset.writer(**workload.SIZES) as writer:
        report = verify(dataset.path, writer.manifest)
        maintenance.repair(writer, report)
    return report


# -- the length of a header ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return made(tmp_path_factory.mktemp("whole"))


@settings(max_examples=20)
@given(st.data())
def test_a_wrong_header_length_costs_no_sample(
    whole: Dataset, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any value of those 8 bytes, in any shard, sealed or open: noticed, mended, nothing lost."""
    dataset = Dataset(tmp_path_factory.mktemp("copy") / "d")
    shutil.copytree(whole.path, dataset.path)
    before = content(dataset)
    assert before
    paths = [path for kind in KINDS for path in list_shards(dataset.path / kind).values()]
    path = data.draw(st.sampled_from(paths))
    right = path.read_bytes()[:8]
    wrong = data.draw(
        st.one_of(
            st.integers(0, 63).map(lambda bit: int.from_bytes(right, "little") ^ 1 << bit),
            st.integers(0, 2 * path.stat().st_size),
            st.integers(0, 2**64 - 1),
        )
    )
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", wrong))
    if data.draw(st.booleans(), label="the manifest is lost, too"):
        for each in dataset.path.glob("manifest.*"):
            each.unlink()
    elif not is_open(path) and path.read_bytes()[:8] != right:
        with dataset.reader() as reader:
            report = verify(dataset.path, reader.manifest)
        assert [(each.sample, each.offset) for each in report.damaged] == [(None, 0)]
    assert repaired(dataset).ok
    assert content(dataset) == before
    for kind in KINDS:
        for number, each in list_shards(dataset.path / kind).items():
            if not is_open(each):
                raw = each.read_bytes()
                assert data_start(raw[:8], len(raw)) == first_record(each, number)


# -- strange files -------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["prompts", *KINDS])
def test_files_that_are_not_ours_change_nothing(tmp_path: Path, folder: str) -> None:
    dataset = made(tmp_path)
    before = content(dataset)
    place = dataset.path / folder
    for suffix in (".parquet", ".safetensors", ".safetensors.open"):
        for stem in ("notes", "1", "0", "000000 (copy)", "²", "٠٠٠٠٠١", "-00001", "0000001", ""):
            (place / f"{stem}{suffix}").write_bytes(b"rubbish")
        (place / f"000077{suffix}").mkdir()
        os.mkfifo(place / f"000078{suffix}")
        (place / f"000079{suffix}").symlink_to("/nowhere")
    names = set(os.listdir(place))
    for _ in range(2):
        with dataset.writer(**workload.SIZES) as writer:
            assert not writer.recovery.lines()
            assert verify(dataset.path, writer.manifest).ok
            writer.add_prompts(workload.prompts(20))
    with dataset.writer(**workload.SIZES) as writer:
        assert [row.id for row in writer.pending(0, 100)][-6:] == list(range(15, 21))
    assert content(dataset) == before
    assert names <= set(os.listdir(place)), "what is not ours is left alone"


def test_a_copied_shard_is_damage_and_not_twice_the_samples(tmp_path: Path) -> None:
    dataset = made(tmp_path)
    before = content(dataset)
    for kind in KINDS:
        folder = dataset.path / kind
        shutil.copy(folder / "000000.safetensors", folder / "000050.safetensors")
    with dataset.writer(**workload.SIZES) as writer:
        assert len(writer.recovery.damaged) >= 2
        report = verify(dataset.path, writer.manifest)
        assert not report.damaged
        assert report.unused
    assert content(dataset) == before


def test_a_shard_that_is_sealed_while_verify_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftmill.manifests import verify as module

    dataset = made(tmp_path)
    with dataset.reader() as reader:
        real = module.list_shards

        def early(folder: Path) -> dict[int, Path]:
            found = real(folder)
            monkeypatch.setattr(module, "list_shards", real)
            for path in found.values():
                if is_open(path):
                    path.rename(path.with_name(path.name.removesuffix(".open")))
            return found

        monkeypatch.setattr(module, "list_shards", early)
        report = verify(dataset.path, reader.manifest)
    # the header of what was only renamed is not that of a sealed shard
    assert not [each for each in report.damaged if each.sample is not None]


# -- manifests -----------------------------------------------------------------------------------


def test_the_manifest_of_another_dataset_is_refused(tmp_path: Path) -> None:
    dataset = made(tmp_path)
    before = content(dataset)
    other = Dataset.create(tmp_path / "other", "")
    with other.writer() as writer:
        writer.add_prompts(workload.prompts(40)[20:])
    mine = dataset.manifest_path.read_bytes()
    shutil.copy(other.manifest_path, dataset.manifest_path)
    with pytest.raises(DatasetError, match=r"is of another dataset: prompts/000000\.parquet"):
        with dataset.writer():
            pass
    dataset.manifest_path.write_bytes(mine)
    assert content(dataset) == before

    # moved away it is rebuilt; a snapshot of another dataset is no help and no harm
    dataset.manifest_path.unlink()
    shutil.copy(other.snapshot_path, dataset.snapshot_path)
    with dataset.writer(**workload.SIZES) as writer:
        assert writer.recovery.rebuilt
        assert writer.count("extracted") == len(before)
    assert content(dataset) == before
    assert list(dataset.path.glob("manifest.parquet.damaged-*"))


@pytest.mark.parametrize("size", [0, 1, 4096, 20_000])
def test_a_manifest_that_was_cut_is_rebuilt_with_its_history(tmp_path: Path, size: int) -> None:
    dataset = made(tmp_path)
    before = content(dataset)
    with dataset.reader() as reader:
        states = reader.sql("SELECT state, count(*) FROM samples GROUP BY ALL ORDER BY 1")
        meta = reader.sql("SELECT * FROM meta ORDER BY key")
    os.truncate(dataset.manifest_path, size)
    with pytest.raises(DatasetError, match="--repair"), dataset.reader():
        pass
    with dataset.writer(**workload.SIZES) as writer:
        assert writer.recovery.rebuilt
    with dataset.reader() as reader:
        assert reader.sql("SELECT state, count(*) FROM samples GROUP BY ALL ORDER BY 1") == states
        assert reader.sql("SELECT * FROM meta ORDER BY key") == meta, "settings are kept"
    assert content(dataset) == before


# -- prompts -------------------------------------------------------------------------------------


def test_prompt_files_are_verified_as_well(tmp_path: Path) -> None:
    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer() as writer:
        writer.add_prompts(workload.prompts(30))
    path = dataset.prompt_file(0)
    raw = path.read_bytes()
    right = pq.read_table(path)
    seen = 0
    with dataset.reader() as reader:
        for at in range(0, len(raw), max(1, len(raw) // 120)):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
            found = verify(dataset.path, reader.manifest).damaged
            seen += len(found)
            if found:
                assert [each.shard for each in found] == ["prompts/000000.parquet"]
                assert "restore it from a copy" in found[0].reason
            else:  # statistics and the like, which change no prompt
                assert pq.read_table(path).equals(right)
    assert seen > 40
    path.unlink()
    with dataset.writer() as writer:
        (fault,) = verify(dataset.path, writer.manifest).damaged
        assert "missing" in fault.reason
        with pytest.raises(DatasetError, match=r"000000\.parquet.*Restore the file from a copy"):
            writer.pending(0, 5)
    path.write_bytes(raw)
    with dataset.writer() as writer:
        assert verify(dataset.path, writer.manifest).ok
        assert len(writer.pending(0, 50)) == 30


def test_nothing_is_rebuilt_without_a_prompt_file_that_is_there(tmp_path: Path) -> None:
    """Its samples would be nobody's, and asked again once it is restored."""
    dataset = made(tmp_path)
    before = content(dataset)
    path = dataset.prompt_file(max(dataset.prompt_files()))
    raw = path.read_bytes()
    for rubbish in (b"", b"rubbish", raw[: len(raw) // 2]):
        path.write_bytes(rubbish)
        for each in dataset.path.glob("manifest.*"):
            each.unlink()
        with pytest.raises(DatasetError, match="Restore it from a copy; or move it away"):
            with dataset.writer(**workload.SIZES):
                pass
    path.write_bytes(raw)
    with dataset.writer(**workload.SIZES):
        pass
    assert content(dataset) == before
