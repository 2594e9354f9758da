"""Sources: every format gives the same prompts, and every kind of bad line is named and skipped."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.sources.conversations import prompts_of
from draftmill.builder.sources.read import SourceError, read_source, source_name
from draftmill.manifests.errors import SourceFileError, UsageError
from draftmill.manifests.types import Prompt

USER = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "Rayleigh scattering."}
MORE = {"role": "user", "content": "And at sunset?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read(path: Path, **options: Any) -> tuple[list[Prompt], list[SourceError]]:
    found = list(read_source(path, **options))
    return (
        [item for item in found if isinstance(item, Prompt)],
        [item for item in found if isinstance(item, SourceError)],
    )


def of(row: dict[str, Any], **options: Any) -> list[Prompt]:
    return list(prompts_of(row, source="s", number=1, **options))


def messages(prompt: Prompt) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(prompt.conversation)["messages"]
    return found


def test_all_row_formats_give_the_same_prompt() -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": USER["content"]}]},
        {"conversations": [{"role": "user", "content": USER["content"]}]},
        {"prompt": USER["content"]},
        {"question": USER["content"], "answer": "x"},
        {"instruction": USER["content"], "input": ""},
        {"prompt": [USER]},
        {"messages": json.dumps([USER])},
    ]
    found = [prompt for row in rows for prompt in of(row)]
    assert len(found) == len(rows)
    assert {prompt.hash for prompt in found} == {found[0].hash}
    assert {prompt.conversation for prompt in found} == {found[0].conversation}
    assert len(found[0].hash) == 32


def test_open_perfectblend_parquet(tmp_path: Path) -> None:
    talk = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Why is the sky blue?"},
        {"from": "gpt", "value": "Rayleigh scattering."},
        {"from": "human", "value": "And at sunset?"},
        {"from": "gpt", "value": "Longer path."},
    ]
    table = pa.table({"conversations": [talk, talk[1:3]], "source": ["a", "b"]})
    path = tmp_path / "train-00000-of-00002.parquet"
    pq.write_table(table, path)
    prompts, errors = read(path)
    assert not errors
    assert messages(prompts[0]) == [SYSTEM, USER, ANSWER, MORE]
    assert prompts[0].reference == "Longer path."
    assert messages(prompts[1]) == [USER]
    assert [prompt.row for prompt in prompts] == [1, 2]
    assert prompts[0].source == "train"


def test_turns() -> None:
    row = {"messages": [SYSTEM, USER, ANSWER, MORE, {"role": "assistant", "content": "Red."}]}
    first, last, every = (of(row, turns=turns) for turns in ("first", "last", "all"))
    assert [messages(p) for p in first] == [[SYSTEM, USER]]
    assert [messages(p) for p in last] == [[SYSTEM, USER, ANSWER, MORE]]
    assert [p.hash for p in every] == [first[0].hash, last[0].hash]
    assert [p.reference for p in every] == ["Rayleigh scattering.", "Red."]
    assert {p.conversation_id for p in first + last + every} == {first[0].conversation_id}


def test_user_messages_in_a_row_are_one_turn() -> None:
    row = {"messages": [USER, MORE, ANSWER]}
    assert [messages(p) for p in of(row, turns="first")] == [[USER, MORE]]


def test_a_tool_result_at_the_end_asks_for_an_answer() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {}}]}
    result = {"role": "tool", "content": "", "tool_call_id": "1"}
    row = {"messages": [USER, call, result]}
    assert messages(of(row)[0]) == [USER, call, result]
    assert len(of(row, turns="all")) == 2


def test_unknown_fields_and_key_order_survive() -> None:
    message = {"weight": 0, "role": "user", "content": "hi", "cache": {"b": 1, "a": [None, 2]}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]
    row = {"messages": [message], "tools": tools, "chat_template_kwargs": {"thinking": False}}
    (prompt,) = of(row)
    conversation = json.loads(prompt.conversation)
    assert conversation["messages"] == [message]
    assert json.dumps(conversation["tools"]) == json.dumps(tools)
    assert conversation["chat_template_kwargs"] == {"thinking": False}
    reordered = row | {"messages": [dict(reversed(message.items()))]}
    assert of(reordered)[0].hash == prompt.hash


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1, 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=4), json_values),
    st.dictionaries(st.text(max_size=4), json_values),
    st.sampled_from(["regenerate", "prefill"]),
)
def test_the_hash_is_what_the_format_page_says(
    more: dict[str, Any], arguments: dict[str, Any], mode: Any
) -> None:
    message = {**more, "role": "user", "content": "Wie? 素数 \u2028"}
    row = {"messages": [message, ANSWER], "chat_template_kwargs": arguments, "tools": []}
    (prompt,) = of(row, mode=mode)
    canonical = json.loads(prompt.conversation)
    if prompt.off_policy:
        canonical["mode"] = "prefill"
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert prompt.hash == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_tools_and_template_arguments_are_part_of_the_identity() -> None:
    base: dict[str, Any] = {"messages": [USER]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    variants = [
        base,
        base | {"tools": tools},
        base | {"chat_template_kwargs": {"thinking": True}},
        base | {"chat_template_kwargs": {"thinking": False}},
    ]
    found = [of(row)[0] for row in variants]
    assert len({prompt.hash for prompt in found}) == 4
    assert len({prompt.conversation_id for prompt in found}) == 1
    assert of(base | {"tools": json.dumps(tools)})[0].hash == found[1].hash
    assert of(base | {"tools": [], "chat_template_kwargs": None})[0].hash == found[0].hash


def test_messages_of_different_schemas_in_one_table(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}, "id": "1"}
    rows = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi", "name": "bob"}]},
        {
            "messages": [
                {"role": "user", "content": "call"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "1", "tool_call_id": "1"},
            ]
        },
    ]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    from_table, errors = read(path)
    from_lines, _ = read(jsonl(tmp_path / "t.jsonl", rows))
    assert not errors
    assert [p.hash for p in from_table] == [p.hash for p in from_lines]


def test_own_ids_group_conversations_within_their_source() -> None:
    row = {"id": 7, "messages": [USER, ANSWER, MORE]}
    assert [p.conversation_id for p in of(row, turns="all")] == ["s:7", "s:7"]


def test_system_beside_the_conversation() -> None:
    row = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Why?"}]}
    assert messages(of(row)[0])[0] == SYSTEM
    assert len(messages(of(row | {"system": ""})[0])) == 1
    assert messages(of({"prompt": "Why?", "system": "Be brief."})[0])[0] == SYSTEM


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "json": (b'{"messages": [', "not JSON"),
    "array": (b"[1, 2]", "a list, not an object"),
    "text": (b'"hello"', "a str, not an object"),
    "no keys": (b'{"text": "x"}', "none of `messages`"),
    "empty list": (b'{"messages": []}', "is empty"),
    "not objects": (b'{"messages": ["hi"]}', "message 1 is a str"),
    "starts with assistant": (
        b'{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}',
        "wrong order: message 1 (assistant)",
    ),
    "tool first": (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]}',
        "wrong order: message 2 (tool)",
    ),
    "no user": (b'{"messages": [{"role": "system", "content": "x"}]}', "no user message"),
    "role": (b'{"messages": [{"role": "wizard", "content": "x"}]}', "unknown role 'wizard'"),
    "no role": (b'{"messages": [{"content": "x"}]}', "unknown role None"),
    "empty": (b'{"messages": [{"role": "user", "content": " \\n"}]}', "message 1 (user) is empty"),
    "null": (b'{"messages": [{"role": "user", "content": null}]}', "message 1 (user) is empty"),
    "number": (b'{"messages": [{"role": "user", "content": 3}]}', "is a int, not text"),
    "empty prompt": (b'{"prompt": ""}', "message 1 (user) is empty"),
    "two prompts": (b'{"prompt": "a", "question": "b"}', "which one is the prompt?"),
    "input": (b'{"instruction": "a", "input": "b"}', "join them"),
    "speaker": (b'{"conversations": [{"from": "wizard", "value": "x"}]}', "unknown speaker"),
    "not utf-8": (b'{"prompt": "\xff"}', "not UTF-8 (byte 13"),
    "surrogate": (b'{"prompt": "\\ud800"}', "not Unicode"),
    "nan": (b'{"messages": [{"role": "user", "content": "x", "w": NaN}]}', "what JSON cannot"),
    "tools": (b'{"prompt": "x", "tools": "{"}', "`tools` is text that is not JSON"),
    "tools kind": (b'{"prompt": "x", "tools": {"a": 1}}', "`tools` is a dict, not a list"),
    "deep": (b'{"messages": ' + b"[" * 100_000, "nested too deeply"),
    "digits": (b'{"messages": [{"role": "user", "content": ' + b"9" * 5000 + b"}]}", "not JSON"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_and_the_rest_is_read(tmp_path: Path, kind: str) -> None:
    line, reason = BAD_LINES[kind]
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n\n' + line + b'\n{"prompt": "two"}\n')
    prompts, errors = read(path)
    assert [messages(p)[0]["content"] for p in prompts] == ["one", "two"]
    assert [p.row for p in prompts] == [1, 4]
    assert len(errors) == 1
    assert (errors[0].file, errors[0].line) == (str(path), 3)
    assert reason in errors[0].reason
    assert str(errors[0]).startswith(f"{path}:3: ")


def test_a_bad_later_turn_does_not_cost_the_turns_before(tmp_path: Path) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": ""}, MORE]}
    assert len(of(row, turns="first")) == 1
    prompts, errors = read(jsonl(tmp_path / "p.jsonl", [row, row]), turns="all")
    assert [p.row for p in prompts] == [1, 2]
    assert [e.line for e in errors] == [1, 2]
    assert "message 2 (assistant) is empty" in errors[0].reason


def test_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n{"prompt": "tw')
    prompts, errors = read(path)
    assert len(prompts) == 1
    assert errors[0].line == 2
    assert "incomplete last line" in errors[0].reason
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n{"prompt": "two"}')
    assert len(read(path)[0]) == 2


def test_an_endless_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftmill.builder.sources.read.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "' + b"x" * (3 << 20) + b'"}\n{"prompt": "two"}\n')
    prompts, errors = read(path)
    assert len(prompts) == 1
    assert "longer than 1 MiB" in errors[0].reason


def test_compressed_lines(tmp_path: Path) -> None:
    data = b'{"prompt": "one"}\n{"prompt": "two"}\n'
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress(data) + gzip.compress(data))
    assert len(read(packed)[0]) == 4
    packed.write_bytes(gzip.compress(data * 5000)[:-20])
    prompts, errors = read(packed)
    assert prompts
    assert "cannot be read beyond" in errors[-1].reason
    frame = tmp_path / "p.jsonl.zst"
    with pa.CompressedOutputStream(str(frame), "zstd") as file:
        file.write(data)
    assert len(read(frame)[0]) == 2
    packed.write_bytes(b"no gzip at all")
    with pytest.raises(SourceFileError, match="cannot be read"):
        read_source(packed)


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def test_dataset_saved_to_disk(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for index in range(2):
        table = pa.table({"prompt": [f"{index} {i}" for i in range(1500)], "extra": range(1500)})
        write_arrow(folder / f"data-0000{index}-of-00002.arrow", table)
    write_arrow(folder / "cache-1.arrow", pa.table({"prompt": ["stale"]}))
    names = [{"filename": f"data-0000{index}-of-00002.arrow"} for index in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    (folder / "dataset_info.json").write_text("{}")
    prompts, errors = read(folder)
    assert not errors
    assert len(prompts) == 3000
    assert [p.row for p in prompts] == list(range(1, 3001))
    assert prompts[0].source == "mine"

    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["mine"]}))
    assert len(read(tmp_path)[0]) == 3000
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["mine", "test"]}))
    with pytest.raises(SourceFileError, match="has splits mine, test"):
        read_source(tmp_path)


def test_folder_of_parquet(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "README.md").write_text("# a data set")
    for index in range(2):
        table = pa.table({"messages": [[USER | {"content": f"{index} {i}"}] for i in range(3)]})
        pq.write_table(table, data / f"train-0000{index}-of-00002.parquet")
    prompts, errors = read(tmp_path)
    assert not errors
    assert [p.row for p in prompts] == [1, 2, 3, 4, 5, 6]
    pq.write_table(table, data / "test-00000-of-00001.parquet")
    with pytest.raises(SourceFileError, match="has splits test, train"):
        read_source(tmp_path)


def test_damaged_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    texts = [f"prompt {i} " + "x" * (i % 91) for i in range(20_000)]
    pq.write_table(pa.table({"prompt": texts}), path, row_group_size=2000, compression="none")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 65_536] = b"\xff" * 65_536
    path.write_bytes(raw)
    prompts, errors = read(path)
    assert prompts
    assert "cannot be read beyond" in errors[-1].reason or len(prompts) + len(errors) == 20_000
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(SourceFileError, match="not a readable parquet file"):
        read_source(path)


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(SourceFileError, match="no such file"):
        read_source(tmp_path / "none.jsonl")
    with pytest.raises(SourceFileError, match="nothing to read"):
        read_source(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    with pytest.raises(SourceFileError, match="unknown format"):
        read_source(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text('[\n{"prompt": "x"}]')
    with pytest.raises(SourceFileError, match=r"jq -c .* > .*-lines\.jsonl"):
        read_source(tmp_path / "a.json")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(SourceFileError, match=r"no column that holds prompts\. It has text"):
        read_source(tmp_path / "a.parquet")
    with pytest.raises(UsageError):
        read_source(tmp_path, format="csv")  # type: ignore[arg-type]


def test_format_by_name_and_sniffing(tmp_path: Path) -> None:
    row = {"prompt": "p", "messages": [USER]}
    path = jsonl(tmp_path / "rows", [row])
    assert messages(read(path)[0][0]) == [USER]
    assert messages(read(path, format="prompt")[0][0])[0]["content"] == "p"
    assert "none of `conversations" in read(path, format="sharegpt")[1][0].reason


def test_names(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "my.prompts.jsonl", [{"prompt": str(i)} for i in range(9)])
    assert source_name(path) == "my.prompts"
    assert source_name(Path("x/train-00000-of-00003.parquet")) == "train"
    assert read(path, name="n")[0][0].source == "n"


words = st.text(alphabet=st.characters(exclude_categories=("Cs",)), min_size=1).filter(str.strip)
values = st.recursive(st.none() | st.booleans() | st.integers() | words, lambda v: st.lists(v))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(words, words), min_size=1, max_size=3),
    st.dictionaries(words.filter(lambda k: k not in ("role", "content")), values, max_size=2),
)
def test_whatever_is_said_is_kept(pairs: list[tuple[str, str]], extra: dict[str, Any]) -> None:
    talk: list[dict[str, Any]] = []
    for question, answer in pairs:
        talk += [{"role": "user", "content": question, **extra}]
        talk += [{"content": answer, "role": "assistant"}]
    found = of(json.loads(json.dumps({"messages": talk})), turns="all")
    assert [messages(p) for p in found] == [talk[: 2 * i + 1] for i in range(len(pairs))]
    assert [p.reference for p in found] == [answer for _, answer in pairs]
