"""Folders for import and export that are not what they seem: one error of ours, nothing stored."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.exchange import folder as form
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DatasetError, SourceFileError
from tests.builder.test_exchange import export_all, foreign, import_all
from tests.trainer.tiny import HIDDEN, build_dataset, random_samples

GOOD = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "draftmill": "{}"}
_NOTE = {
    "hash": "a" * 32,
    "digest": "d",
    "source": "s",
    "off_policy": False,
    "conversation_id": "c",
    "conversation": "{}",
    "content": "x",
    "reasoning": None,
    "finish_reason": "stop",
    "cut_token_ids": [],
}
COLUMNS: dict[str, list[Any]] = {
    "input_ids": [
        None,
        [],
        [-1, 2, 3, 4],
        [2**31, 2, 3, 4],
        [2**62, 2, 3, 4],
        [1, 2, 3],
        ["a"] * 4,
        [1.5] * 4,
        "abcd",
        3,
        [None, 1, 2, 3],
    ],
    "loss_mask": [None, [], [1], [None, 0, 1, 1], [-1, 0, 1, 1], ["a"] * 4, 3, [2**40] * 4],
    "draftmill": [
        "{",
        "[]",
        "3",
        "null",
        "\x00",
        "[" * 5000,
        b"\xff",
        7,
        *(
            json.dumps({**_NOTE, key: value})
            for key, value in [
                ("content", 3),
                ("reasoning", []),
                ("cut_token_ids", "x"),
                ("cut_token_ids", [2**40]),
                ("cut_token_ids", 3),
            ]
        ),
    ],
}
CASES = [(column, number) for column, values in COLUMNS.items() for number in range(len(values))]


@pytest.mark.parametrize(("column", "number"), CASES)
def test_rows_that_cannot_be_samples(tmp_path: Path, column: str, number: int) -> None:
    folder = foreign(tmp_path / "f", [([1, 2, 3, 4], [0, 0, 1, 1])])
    row = {**GOOD, column: COLUMNS[column][number]}
    try:
        table = pa.table({name: pa.array([value]) for name, value in row.items()})
    except (pa.ArrowException, OverflowError):
        pytest.skip("Arrow holds no such value")
    with pa.OSFile(str(folder / form.ARROW), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    dataset = Dataset.create(tmp_path / "d", "# test\n")
    with pytest.raises(SourceFileError):
        import_all(dataset, folder)
    with dataset.reader() as reader:
        assert not reader.summary()["prompts"]["total"]


def _tensor(dtype: str, shape: list[int], *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


_SIZE = 4 * 4 * HIDDEN * 2
_RIGHT = {
    "hidden_states": _tensor("BF16", [4, 4, HIDDEN], 0, _SIZE),
    "token_ids": _tensor("I64", [4], _SIZE, _SIZE + 32),
}
_ODD: list[Any] = [
    None,
    -1,
    1 << 70,
    float("inf"),
    float("nan"),
    "x",
    "F64",
    "F8_E4M3",
    [],
    [1],
    [0, 8],
    {},
    0,
    [1 << 40, 4, HIDDEN],
    [float("inf")] * 2,
    [-4, 4, HIDDEN],
]


@settings(max_examples=12)
@given(st.data())
def test_state_files_with_any_header(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tmp_path = tmp_path_factory.mktemp("states")
    folder = foreign(tmp_path / "f", [([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6, 7, 8], [0, 0, 1, 1])])
    header: dict[str, Any] = {name: dict(entry) for name, entry in _RIGHT.items()}
    header["hidden_states_scales"] = _tensor("F32", [1, 1, 1], 0, 4)
    name = data.draw(st.sampled_from(list(header)))
    odd = data.draw(st.sampled_from(_ODD))
    if data.draw(st.booleans()):
        header[name] = odd
    else:
        header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = odd
    text = json.dumps(header).encode()
    path = form.states_file(folder, 0)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(256)) * 8)
    dataset = Dataset.create(tmp_path / "d", "# test\n")
    report = import_all(dataset, folder)
    assert report.rejected + report.states == 2
    assert report.states >= 1


@pytest.mark.parametrize("thing", ["folder", "fifo", "socket", "loop"])
def test_things_in_the_place_of_state_files(tmp_path: Path, thing: str) -> None:
    folder = foreign(tmp_path / "f", [([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6, 7, 8], [0, 0, 1, 1])])
    path = form.states_file(folder, 0)
    path.unlink()
    {
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "socket": lambda: os.mknod(path, 0o140644),
        "loop": lambda: path.symlink_to(path.name),
    }[thing]()
    report = import_all(Dataset.create(tmp_path / "d", "# test\n"), folder)
    assert report.states == 1
    assert report.rejected + report.without_states == 1


def test_what_a_lossy_codec_cannot_hold_is_rejected(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "f", [([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6, 7, 8], [0, 0, 1, 1])])
    rng = np.random.default_rng(1)
    states = (rng.normal(size=(4, 4, HIDDEN)).astype("<f4").view("<u4") >> 16).astype(np.uint16)
    states[2, 1, 3] = 0x7F00  # 2 ** 127
    form.write_states(form.states_file(folder, 0), states, [1, 2, 3, 4], fp8=False, digest="")
    report = import_all(Dataset.create(tmp_path / "d", "# test\n"), folder, codec="rot4")
    assert (report.states, report.rejected) == (1, 1)
    assert "rot4 cannot hold these states" in report.reasons[0]


def test_an_export_into_what_is_no_folder(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path / "d", random_samples(2))
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DatasetError, match=r"no folder|cannot be made"):
            export_all(dataset, place)
    assert (tmp_path / "file").read_text() == "mine"
