"""Export to speculators' form and import from it: exact round trips, read by speculators itself."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.exchange import folder as form
from draftmill.builder.exchange.export import export
from draftmill.builder.exchange.imports import ImportReport, import_folder
from draftmill.builder.extraction.intake import Layers
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import BudgetError, DatasetError, LockedError, SourceFileError
from draftmill.manifests.types import Location
from tests.trainer.tiny import HIDDEN, LAYER_IDS, LAYERS, build_dataset, random_samples

pytestmark = pytest.mark.slow

SHAPE = Layers(layer_ids=(*LAYER_IDS, LAYERS), hidden_size=HIDDEN)


def export_all(dataset: Dataset, output: Path, **options: Any) -> Any:
    return export(dataset, output, num_layers=4, hidden_size=HIDDEN, **options)


def import_all(dataset: Dataset, folder: Path, **options: Any) -> ImportReport:
    given = {"codec": "em-zfast", "max_seq_len": 4096} | options
    with dataset.writer() as writer:
        return import_folder(writer, folder, source="elsewhere", layers=SHAPE, **given)


def content(dataset: Dataset) -> dict[str, tuple[Any, ...]]:
    """Everything about the extracted samples that a trainer could see, by prompt hash."""
    found = {}
    with dataset.reader() as reader:
        for row in reader.extracted().to_pylist():
            at = {
                stage: Location(*(row[f"{stage}_{part}"] for part in ("shard", "offset", "length")))
                for stage in ("generate", "extract")
            }
            completion = reader.shards.completion(at["generate"])
            found[row["hash"]] = (
                row["conversation"],
                row["tokens"],
                completion.prompt_token_ids.tolist(),
                completion.completion_token_ids.tolist(),
                completion.content,
                completion.finish_reason,
                reader.shards.states(at["extract"]).tobytes(),
            )
    return found


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return build_dataset(tmp_path / "d", random_samples(12))


def test_there_and_back_is_exact(dataset: Dataset, tmp_path: Path) -> None:
    report = export_all(dataset, tmp_path / "out")
    assert (report.written, report.kept) == (12, 0)
    back = Dataset.create(tmp_path / "back", "# test\n")
    first = import_all(back, tmp_path / "out")
    assert (first.new, first.completions, first.states, first.rejected) == (12, 12, 12, 0)
    assert content(back) == content(dataset)
    again = import_all(back, tmp_path / "out")
    assert (again.new, again.completions, again.states) == (0, 0, 0)
    assert content(back) == content(dataset)


@pytest.mark.parametrize("fp8", [False, True])
def test_speculators_reads_it(dataset: Dataset, tmp_path: Path, fp8: bool) -> None:
    from hs_connectors.transfer import FileTransfer, FP8Transfer
    from speculators.train.data import ArrowDataset

    out = tmp_path / "out"
    export_all(dataset, out, fp8=fp8)
    transfer = (FP8Transfer if fp8 else FileTransfer)(out / "hidden_states")
    theirs = ArrowDataset(4096, out, transfer=transfer, on_missing="raise")
    ours = list(content(dataset).values())
    assert len(theirs) == len(ours)
    for index, (_, tokens, prompt, completion, _, _, states) in enumerate(ours):
        sample = theirs[index]
        assert sample["input_ids"].tolist() == (prompt + completion)[:tokens]
        assert sample["loss_mask"].tolist() == [0] * len(prompt) + [1] * (tokens - len(prompt))
        exact = torch.frombuffer(bytearray(states), dtype=torch.bfloat16).reshape(tokens, 4, HIDDEN)
        found = torch.cat(
            [
                sample["hidden_states"].reshape(tokens, 3, HIDDEN),
                sample["verifier_last_hidden_states"][:, None],
            ],
            dim=1,
        )
        if fp8:
            error = (found.float() - exact.float()).abs().amax()
            assert 0 < error <= exact.float().abs().amax() / 16
        else:
            assert torch.equal(found, exact)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), scale=st.integers(-20, 20))
def test_fp8_is_theirs_to_the_bit(seed: int, scale: int) -> None:
    from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.standard_cauchy((5, 3, 32)) * 2.0**scale).to(torch.bfloat16)
    words = values.view(torch.int16).numpy().view(np.uint16)
    codes, scales = form.to_fp8(words)
    wanted, wanted_scales = quantize_tensor_to_fp8(values)
    assert torch.equal(torch.from_numpy(scales), wanted_scales)
    np.testing.assert_array_equal(codes, wanted.view(torch.uint8).numpy())
    back = dequantize_fp8_tensor(wanted, wanted_scales)
    np.testing.assert_array_equal(
        form.from_fp8(codes, scales), back.view(torch.int16).numpy().view(np.uint16)
    )


def test_an_export_goes_on_where_it_was(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(dataset, out)
    before = {path.name: path.read_bytes() for path in (out / form.STATES).iterdir()}
    (out / form.STATES / "hs_3.safetensors").unlink()
    damaged = out / form.STATES / "hs_5.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    report = export_all(dataset, out)
    assert (report.written, report.kept) == (2, 10)
    assert before == {path.name: path.read_bytes() for path in (out / form.STATES).iterdir()}
    # What is extracted later comes behind, whatever its place in the dataset.
    build_dataset(dataset.path, random_samples(3, seed=9))
    report = export_all(dataset, out)
    assert (report.written, report.kept) == (3, 12)
    assert (
        before.items()
        <= {path.name: path.read_bytes() for path in (out / form.STATES).iterdir()}.items()
    )
    assert len(form.Table(out)) == 15


def test_two_exports_into_one_folder_do_not_meet(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    met = []

    def second(done: int, total: int) -> None:
        with pytest.raises(LockedError, match="being written by process"):
            export_all(dataset, out)
        met.append(done)

    assert export_all(dataset, out, on_sample=second).written == 12
    assert met == list(range(1, 13))
    back = Dataset.create(tmp_path / "back", "# test\n")
    import_all(back, out)
    assert content(back) == content(dataset)


@pytest.mark.parametrize("fp8", [False, True])
def test_an_export_in_the_other_form_replaces_nothing(
    dataset: Dataset, tmp_path: Path, fp8: bool
) -> None:
    out = tmp_path / "out"
    export_all(dataset, out, fp8=fp8)
    before = {path.name: path.read_bytes() for path in (out / form.STATES).iterdir()}
    with pytest.raises(DatasetError, match="holds states as " + ("fp8" if fp8 else "bf16")):
        export_all(dataset, out, fp8=not fp8)
    assert before == {path.name: path.read_bytes() for path in (out / form.STATES).iterdir()}
    assert export_all(dataset, out, fp8=fp8).written == 0


def test_nothing_extracted_is_nothing_to_export(tmp_path: Path) -> None:
    empty = Dataset.create(tmp_path / "d", "")
    with empty.writer():
        pass
    with pytest.raises(DatasetError, match="no sample with hidden states yet"):
        export_all(empty, tmp_path / "out")


def test_an_export_keeps_out_of_other_folders(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(DatasetError, match="holds something else"):
        export_all(dataset, tmp_path / "full")
    export_all(dataset, tmp_path / "out")
    other = build_dataset(tmp_path / "e", random_samples(30, seed=4))
    with pytest.raises(DatasetError, match="does not have now"):
        export_all(other, tmp_path / "out")


def test_room_is_checked_before_anything_is_written(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = os.statvfs(tmp_path)
    values = list(small)
    values[4] = 1  # f_bavail, in blocks
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(BudgetError, match=r"tokens × 4 layers × 64 × 2 bytes = .*are free"):
        export_all(dataset, tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == [".lock"]


def foreign(folder: Path, rows: list[tuple[list[int], list[int]]], seed: int = 0) -> Path:
    """A folder that speculators would have prepared: no column of ours."""
    import datasets

    table = datasets.Dataset.from_dict(
        {
            "input_ids": [ids for ids, _ in rows],
            "loss_mask": [mask for _, mask in rows],
            "seq_len": [len(ids) for ids, _ in rows],
        }
    )
    table.set_format(type="torch")
    table.save_to_disk(folder)
    (folder / form.STATES).mkdir()
    rng = np.random.default_rng(seed)
    for row, (ids, _) in enumerate(rows):
        states = rng.normal(size=(len(ids), 4, HIDDEN)).astype("<f4").view("<u4") >> 16
        form.write_states(
            form.states_file(folder, row), states.astype(np.uint16), ids, fp8=False, digest=""
        )
    return folder


def test_what_speculators_made_comes_in(tmp_path: Path) -> None:
    rows = [
        ([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]),
        ([1, 2, 3, 4, 6], [0, 0, 1, 1, 1]),
        ([9, 8, 7, 6, 5, 4, 3], [0, 1, 1, 0, 0, 1, 0]),  # two turns, and a tail
        ([5, 5, 5], [0, 0, 0]),
        ([7, 8, 9], [1, 1, 1]),
    ]
    folder = foreign(tmp_path / "f", rows)
    dataset = Dataset.create(tmp_path / "d", "# test\n")
    report = import_all(dataset, folder)
    assert (report.new, report.useless, report.narrowed, report.states) == (4, 1, 1, 4)
    found = [value[1:4] for value in content(dataset).values()]
    assert found == [
        (5, [1, 2], [3, 4, 5]),
        (5, [1, 2], [3, 4, 6]),
        (6, [9, 8, 7, 6, 5], [4]),
        (3, [], [7, 8, 9]),
    ]
    assert import_all(dataset, folder).states == 0


def test_bad_states_are_rejected_with_their_reason(tmp_path: Path) -> None:
    rows = [([number, 2, 3, 4], [0, 0, 1, 1]) for number in range(10, 17)]
    folder = foreign(tmp_path / "f", rows)

    def change(row: int, **tensors: Any) -> None:
        from safetensors.torch import load_file, save_file

        path = form.states_file(folder, row)
        save_file(load_file(path) | tensors, path)

    nan = torch.full((4, 4, HIDDEN), torch.nan, dtype=torch.bfloat16)
    change(0, hidden_states=nan)
    change(1, token_ids=torch.tensor([1, 2, 3, 4]))
    change(2, hidden_states=torch.zeros(4, 3, HIDDEN, dtype=torch.bfloat16))
    change(3, hidden_states=torch.ones(4, 4, HIDDEN))
    form.states_file(folder, 4).write_bytes(b"\xff" * 64)
    form.states_file(folder, 5).unlink()
    dataset = Dataset.create(tmp_path / "d", "# test\n")
    report = import_all(dataset, folder)
    assert (report.states, report.rejected, report.without_states) == (1, 5, 1)
    text = " ".join(report.reasons)
    for wanted in ("NaN", "other tokens", "3 layers", "F32", "header"):
        assert wanted in text
    with dataset.writer() as writer:
        assert (writer.count("rejected"), writer.count("generated")) == (5, 1)


def test_an_import_that_was_killed_goes_on(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(dataset, out)
    half = tmp_path / "half"
    shutil.copytree(out, half)
    for row in range(6, 12):
        form.states_file(half, row).unlink()
    back = Dataset.create(tmp_path / "back", "# test\n")
    assert import_all(back, half).states == 6
    report = import_all(back, out)
    assert (report.new, report.completions, report.states) == (0, 0, 6)
    assert content(back) == content(dataset)


def test_another_completion_of_the_same_prompt_is_left_alone(
    dataset: Dataset, tmp_path: Path
) -> None:
    export_all(dataset, tmp_path / "out")
    other = build_dataset(tmp_path / "e", random_samples(12, seed=5))
    before = content(other)
    report = import_all(other, tmp_path / "out")
    assert (report.new, report.completions, report.states) == (0, 0, 0)
    assert content(other) == before


@pytest.mark.parametrize("text", ["{}", "[", json.dumps({"_data_files": [{"filename": "no"}]})])
def test_what_is_no_such_folder_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "state.json").write_text(text)
    with pytest.raises(SourceFileError):
        import_all(Dataset.create(tmp_path / "d", "# test\n"), tmp_path / "f")


def test_an_import_stops_at_the_budget_and_goes_on(dataset: Dataset, tmp_path: Path) -> None:
    export_all(dataset, tmp_path / "out")
    back = Dataset.create(tmp_path / "back", "# test\n")
    given: Any = {"source": "s", "layers": SHAPE, "codec": "raw", "max_seq_len": 4096}
    with (
        back.writer(budget_bytes=1 << 20) as writer,
        pytest.raises(BudgetError, match="it goes on from here"),
    ):
        import_folder(writer, tmp_path / "out", **given)
    assert import_all(back, tmp_path / "out").states == 12
    assert content(back) == content(dataset)
