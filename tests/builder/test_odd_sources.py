"""Sources with text that is no Unicode and folders that lie: named, and the rest is added."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.builder.sources.conversations import BadRow, prompts_of
from draftmill.builder.sources.read import SourceError, read_source, source_name
from draftmill.builder.sources.settings import SourceSettings
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import SourceFileError
from draftmill.manifests.types import Prompt

half = st.text(max_size=4) | st.text(st.characters(categories=["Cs"]), min_size=1, max_size=2)


def of(row: dict[str, Any], **options: Any) -> list[Prompt]:
    try:
        return list(prompts_of(row, source="s", number=1, **options))
    except BadRow:
        return []


@given(half, half, half, st.sampled_from(["id", "uuid", "conversation_id"]), st.booleans())
def test_half_surrogates_anywhere_make_a_bad_row_or_a_prompt_that_can_be_stored(
    asked: str, answer: str, identity: str, key: str, prefill: bool
) -> None:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    for row in (
        {"messages": messages, key: identity},
        {"prompt": asked, "answer": answer, key: identity},
        {"messages": messages[:1], "tools": [{"name": answer}], key: identity},
    ):
        for prompt in of(row, mode="prefill" if prefill else "regenerate"):
            for text in (prompt.conversation, prompt.conversation_id, prompt.reference or ""):
                text.encode()


def test_such_rows_go_through_add(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = ['{"prompt": "a", "answer": "\\ud83d"}', '{"prompt": "b", "id": "\\udc00"}']
    path.write_text("\n".join([*lines, '{"prompt": "\\ud83d"}', '{"prompt": "c"}']))
    found = list(read_source(path))
    assert [type(each) for each in found] == [Prompt, Prompt, SourceError, Prompt]
    with Dataset.create(tmp_path / "d", "").writer() as writer:
        report = writer.add_prompts(each for each in found if isinstance(each, Prompt))
    assert report.added == 3


def strings(values: list[bytes]) -> pa.Array:
    """A column of strings whose bytes nobody checked."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_row_that_is_not_utf8_costs_only_itself(tmp_path: Path, kind: str) -> None:
    values = [f"prompt {n}".encode() for n in range(1200)]
    for number in (3, 700):
        values[number] = b"\xff\xfe"
    table = pa.table({"prompt": strings(values)})
    path = tmp_path / f"p.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    found = list(read_source(path))
    bad = [each for each in found if isinstance(each, SourceError)]
    assert [each.line for each in bad] == [4, 701]
    assert all("utf-8" in each.reason for each in bad)
    assert len(found) == 1200


@pytest.mark.parametrize("split", ["", ".", "..", "/", "a/.."])
def test_a_folder_that_names_itself_as_its_split_is_refused(tmp_path: Path, split: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [split]}))
    with pytest.raises(SourceFileError, match="is no split"):
        read_source(tmp_path)


@pytest.mark.parametrize("state", [{"_data_files": [1, None, {"filename": 3}]}, "[" * 100_000])
def test_a_state_that_is_none_is_refused(tmp_path: Path, state: Any) -> None:
    text = state if isinstance(state, str) else json.dumps(state)
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(SourceFileError):
        read_source(tmp_path)


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/p\xff.jsonl"))
    path.write_text('{"prompt": "a"}\n')
    assert source_name(path) == "p?"
    assert [each.source for each in read_source(path) if isinstance(each, Prompt)] == ["p?"]
    with pytest.raises(ValueError, match="name: holds bytes"):
        SourceSettings(path="x", name="n\udcff")
