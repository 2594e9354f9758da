"""The staging folder: waiting for a server's file, opening it without trust, sweeping."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.extraction import staging as staging_module
from draftmill.builder.extraction.intake import Layers, LengthMismatchError, Rooms, take_in
from draftmill.builder.extraction.staging import IncompleteFileError, LockHeldError, Staging
from draftmill.builder.requests.client import PROBE_ID
from draftmill.builder.requests.failures import GarbledReplyError
from draftmill.manifests.codec.codec import CODECS, decode_states, is_lossless
from draftmill.manifests.errors import ConfigError, RejectedError, TransientError
from tests.fakes import toy_model as toy

LAYERS = Layers(layer_ids=(1, 2, 3, 4), hidden_size=32)
IDS = np.arange(40, 640, dtype=np.int32)


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    folder = tmp_path / "staging"
    folder.mkdir()
    opened = Staging(folder, tmp_path / "dataset")
    yield opened
    opened.close()


def put(staging: Staging, fault: str | None = None, *, number: int = 1, lock: bool = True) -> str:
    name = f"cmpl-{staging.request_id(7, number)}-0-abc.safetensors"
    data = toy.hidden_states_file(IDS.tolist(), 4, 32, fault)
    (staging.folder / name).write_bytes(data)
    if lock:
        (staging.folder / f"{name}.lock").touch()
    return name


def wait(staging: Staging, name: str, timeout_s: float = 5.0) -> None:
    asyncio.run(staging.wait(name, timeout_s, "http://server/v1"))


def take(staging: Staging, name: str) -> str | None:
    return take_in(staging, name, IDS, LAYERS, "em-zfast", "digest").warning


def test_states_arrive_bit_for_bit(staging: Staging) -> None:
    name = put(staging)
    wait(staging, name)
    taken = take_in(staging, name, IDS, LAYERS, "em-zfast", "digest")
    assert taken.warning is None
    payload = taken.payload
    assert payload.shape == (600, 4, 32)
    out = np.empty(payload.shape, np.uint16)
    decode_states("em-zfast", payload.blocks, out)
    np.testing.assert_array_equal(out, toy.states_of(IDS, 4, 32))
    staging.remove(name)
    assert os.listdir(staging.folder) == []


def test_parts_give_the_same_payload_as_the_whole(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(staging)
    whole = take_in(staging, name, IDS, LAYERS, "em-zfast", "digest").payload
    monkeypatch.setattr("draftmill.builder.extraction.intake._PART_BYTES", 1)
    parts = take_in(staging, name, IDS, LAYERS, "em-zfast", "digest").payload
    assert list(parts.blocks) == list(whole.blocks)


@pytest.mark.parametrize("codec", CODECS)
def test_memory_is_used_again_once_it_is_given_back(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr("draftmill.builder.extraction.intake._PART_BYTES", 1)
    name, rooms = put(staging), Rooms(most=3)
    first = take_in(staging, name, IDS, LAYERS, codec, "digest", rooms)
    kept = [bytes(block) for block in first.payload.blocks]
    second = take_in(staging, name, IDS, LAYERS, codec, "digest", rooms)
    assert [bytes(block) for block in first.payload.blocks] == kept
    assert [bytes(block) for block in second.payload.blocks] == kept
    rooms.give_back(first.rooms)
    third = take_in(staging, name, IDS, LAYERS, codec, "digest", rooms)
    assert third.rooms[0] is first.rooms[-1]
    assert [bytes(block) for block in third.payload.blocks] == kept
    assert [bytes(block) for block in second.payload.blocks] == kept


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("nan", RejectedError, r"NaN state \(layer 4, position 300\)"),
        ("inf", RejectedError, r"infinite state \(layer 1, position 300\)"),
        ("zeros", RejectedError, "zero"),
        ("zero_layer", RejectedError, r"zero \(layer 4, position 0\)"),
        ("constant", RejectedError, "same in all channels"),
        ("wrong_ids", RejectedError, "other tokens: id .* at position 300"),
        ("wrong_layers", RejectedError, "5 layers in the file, not 4"),
        ("wrong_hidden", RejectedError, "hidden size 16"),
        ("wrong_dtype", RejectedError, "F16, not BF16"),
        ("wrong_length", LengthMismatchError, "584 tokens .* --no-enable-prefix-caching"),
        ("truncated_file", IncompleteFileError, "has .* of .* bytes"),
    ],
)
def test_faults_are_named(staging: Staging, fault: str, kind: type[Exception], reason: str) -> None:
    name = put(staging, fault)
    with pytest.raises(kind, match=reason):
        take(staging, name)


@settings(max_examples=60)
@given(
    st.integers(0, 0xFFFF),
    st.integers(0, 599),
    st.integers(0, 3),
    st.integers(0, 31),
    st.sampled_from(CODECS),
)
def test_any_number_anywhere_is_stored_or_rejected_by_its_place(
    staging: Staging, word: int, position: int, layer: int, channel: int, codec: str
) -> None:
    """Whatever a state is, the sample is stored, or rejected with the place of that state."""
    states = toy.states_of(IDS, 4, 32)
    states[position, layer, channel] = word
    tensors = {
        "hidden_states": ("BF16", states.shape, states.tobytes()),
        "token_ids": ("I64", IDS.shape, IDS.astype(np.int64).tobytes()),
    }
    name = f"cmpl-{staging.request_id(7, 1)}-0-abc.safetensors"
    (staging.folder / name).write_bytes(toy.safetensors_bytes(tensors))
    magnitude = word & 0x7FFF
    if magnitude >= 0x7F80 or (codec == "rot4" and magnitude >= 0x7B80):
        place = rf"\(layer {LAYERS.layer_ids[layer]}, position {position}\)"
        with pytest.raises(RejectedError, match=place):
            take_in(staging, name, IDS, LAYERS, codec, "digest")
        return
    payload = take_in(staging, name, IDS, LAYERS, codec, "digest").payload
    out = np.empty(payload.shape, np.uint16)
    decode_states(codec, payload.blocks, out)
    if is_lossless(codec):
        np.testing.assert_array_equal(out, states)


def test_layers_that_the_server_names_are_compared(staging: Staging) -> None:
    states = toy.states_of(IDS, 4, 32)
    tensors = {
        "hidden_states": ("BF16", states.shape, states.tobytes()),
        "token_ids": ("I64", IDS.shape, IDS.astype(np.int64).tobytes()),
    }
    raw = toy.safetensors_bytes(tensors)
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = put(staging)
    for ids in ([1, 2, 3, 4], [0, 2, 3, 4]):
        header["__metadata__"] = {"target_layer_ids": json.dumps(ids)}
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + raw[8 + length :]
        (staging.folder / name).write_bytes(data)
        if ids == [1, 2, 3, 4]:
            take(staging, name)
        else:
            with pytest.raises(RejectedError, match=r"extracts layers \[0, 2, 3, 4\]"):
                take(staging, name)


# -- waiting -------------------------------------------------------------------------------------


def test_waits_for_the_lock(staging: Staging) -> None:
    name = put(staging)
    held = os.open(staging.folder / f"{name}.lock", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)

    async def run() -> None:
        waiting = asyncio.create_task(staging.wait(name, 30.0, "server"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        os.close(held)
        await waiting

    asyncio.run(run())


def test_a_lock_that_is_never_released(staging: Staging) -> None:
    name = put(staging)
    held = os.open(staging.folder / f"{name}.lock", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(LockHeldError, match=r"http://server/v1 held .* for more than 0.05 s"):
        wait(staging, name, 0.05)
    os.close(held)


def test_a_failed_write_is_told_with_the_servers_words(staging: Staging) -> None:
    name = f"cmpl-{staging.request_id(7, 1)}-0.safetensors"
    (staging.folder / f"{name}.lock").touch()
    with pytest.raises(TransientError, match=r"wrote no file: its disk may be full"):
        wait(staging, name)
    (staging.folder / f"{name}.error").write_text("OSError: No space left on device\n")
    with pytest.raises(TransientError, match="No space left"):
        wait(staging, name)
    staging.remove(name)
    assert os.listdir(staging.folder) == []


def test_without_a_lock_only_a_whole_file_counts(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(staging, lock=False)
    path = staging.folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])

    async def run() -> None:
        waiting = asyncio.create_task(staging.wait(name, 30.0, "server"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        path.write_bytes(whole)
        await waiting

    asyncio.run(run())
    monkeypatch.setattr(staging_module, "NO_FILE_S", 0.05)
    path.unlink()
    with pytest.raises(TransientError, match="shared_storage_path"):
        wait(staging, name)


# -- trust ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["", "/", "/etc/passwd", "..", "a/..", "/x/.safetensors", "../..safetensors", "a\0.safetensors"]
    + ["x" * 300 + ".safetensors"],
)
def test_names_that_are_refused(staging: Staging, path: str) -> None:
    with pytest.raises(RejectedError, match="no hidden-states file"):
        staging.name_of(path)


def test_only_the_base_name_counts(staging: Staging) -> None:
    assert staging.name_of("/etc/../elsewhere/a.safetensors") == "a.safetensors"
    assert staging.name_of("a.safetensors") == "a.safetensors"


def test_links_and_other_things_are_refused(staging: Staging, tmp_path: Path) -> None:
    name = put(staging)
    outside = tmp_path / "outside.safetensors"
    path = staging.folder / name
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(RejectedError, match="is a link"):
        take(staging, name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RejectedError, match="not a regular file"):
        take(staging, name)
    path.unlink()
    (staging.folder / f"{name}.lock").unlink()
    (staging.folder / f"{name}.lock").symlink_to(outside)
    with pytest.raises(RejectedError, match="is a link"):
        wait(staging, name)
    staging.sweep((), max_age_s=1e9)
    assert os.listdir(staging.folder) == []
    assert outside.exists()


def header_bytes(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00" * 4096,
        struct.pack("<Q", 1 << 62) + b"{}",
        header_bytes([]),
        header_bytes({"hidden_states": 3, "token_ids": 4}),
        header_bytes(
            {
                "hidden_states": {"dtype": "BF16", "shape": [-1, 4, 32], "data_offsets": [0, 8]},
                "token_ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
            }
        ),
        header_bytes(
            {
                "hidden_states": {
                    "dtype": "BF16",
                    "shape": [1 << 40, 4, 32],
                    "data_offsets": [0, 1 << 48],
                },
                "token_ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
            }
        ),
        header_bytes({"x": {"dtype": "BF16", "shape": [], "data_offsets": ["0", None]}}),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_hostile_headers(staging: Staging, raw: bytes) -> None:
    name = put(staging)
    (staging.folder / name).write_bytes(raw)
    with pytest.raises((GarbledReplyError, IncompleteFileError)):
        take(staging, name)


@settings(max_examples=40)
@given(st.data())
def test_damage_anywhere_in_the_header_is_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("staging")
    staging = Staging(folder, folder)
    raw = bytearray(toy.hidden_states_file(IDS.tolist(), 4, 32, None))
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    (folder / "x.safetensors").write_bytes(raw)
    try:
        take(staging, "x.safetensors")
    except (TransientError, RejectedError):
        pass
    finally:
        staging.close()


# -- sweeping ------------------------------------------------------------------------------------


def test_sweeps_what_nobody_waits_for(staging: Staging, tmp_path: Path) -> None:
    live, dead = put(staging, number=1), put(staging, number=2)
    (staging.folder / f"{dead}.part").touch()
    (staging.folder / f"{dead}.error").touch()
    other = Staging(staging.folder, tmp_path / "another dataset")
    foreign = put(other)
    (staging.folder / "notes.txt").touch()
    deleted, left = staging.sweep({staging.request_id(7, 1)}, max_age_s=1e9)
    assert (deleted, left) == ({staging.request_id(7, 2)}, set())
    names = {live, f"{live}.lock", foreign, f"{foreign}.lock", "notes.txt"}
    assert set(os.listdir(staging.folder)) == names
    other.close()


def test_what_a_probe_for_its_tokens_left_is_anybodys(staging: Staging, tmp_path: Path) -> None:
    """An extraction server writes a file for it, too; nobody reads that."""
    probe = staging.folder / f"chatcmpl-{PROBE_ID}-8150f85a.safetensors"
    probe.touch()
    Path(f"{probe}.lock").touch()
    other = Staging(staging.folder, tmp_path / "another dataset")
    assert other.sweep((), max_age_s=1e9)[1] == set()
    assert os.listdir(staging.folder) == []
    other.close()


def test_a_later_run_knows_the_files_of_an_earlier_one(staging: Staging, tmp_path: Path) -> None:
    put(staging)
    later = Staging(staging.folder, tmp_path / "dataset")
    assert later.request_id(7, 1) != staging.request_id(7, 1)
    assert later.sweep((), max_age_s=1e9)[0] == {staging.request_id(7, 1)}
    assert os.listdir(staging.folder) == []
    later.close()


def test_what_is_being_written_is_left_until_it_is_old(staging: Staging) -> None:
    name = put(staging)
    held = os.open(staging.folder / f"{name}.lock", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    request_id = staging.request_id(7, 1)
    assert staging.sweep((), max_age_s=1e9) == (set(), {request_id})
    for each in staging.folder.iterdir():
        os.utime(each, (time.time() - 100, time.time() - 100))
    assert staging.sweep((), max_age_s=60.0) == ({request_id}, set())
    assert os.listdir(staging.folder) == []
    os.close(held)


def test_ids_are_no_beginnings_of_each_other(staging: Staging) -> None:
    short, long = staging.request_id(7, 1), staging.request_id(7, 12)
    assert short not in f"cmpl-{long}-0.safetensors"
    assert staging.owner_of(f"cmpl-{long}-0.safetensors") == long
    assert staging.owner_of("cmpl-someone-else.safetensors") is None


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        Staging(tmp_path / "none", tmp_path)
