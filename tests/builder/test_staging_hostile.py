"""A staging folder that others write: whatever lies there, the error is one of ours."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.extraction.leftovers import Leftovers
from draftmill.builder.extraction.staging import Staging
from draftmill.manifests.errors import ConfigError, RejectedError, TransientError
from tests.builder.extraction import look, make_dataset
from tests.builder.test_extract import extract_from
from tests.builder.test_staging import put, staging, take, wait  # noqa: F401  a fixture
from tests.fakes import toy_model as toy

_RIGHT = toy.hidden_states_file(list(range(40, 640)), 4, 32, None)
_HEADER: dict[str, Any] = json.loads(_RIGHT[8 : 8 + int.from_bytes(_RIGHT[:8], "little")])
_VALUES: list[Any] = [
    None,
    True,
    -1,
    1 << 70,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e400,
    "",
    "x",
    "[Infinity]",
    "[" * 20_000,
    "[1e999]",
    "\ud800",
    [],
    [[]],
    [None],
    [float("inf"), float("inf")],
    [0, 1 << 70],
    [-5, 5],
    {},
    {"a": {}},
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from _places(value[key], (*path, key))


def _changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _changed(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=150)
@given(st.data())
def test_any_value_anywhere_in_a_header(staging: Staging, data: st.DataObject) -> None:  # noqa: F811
    header = {**_HEADER, "__metadata__": {"target_layer_ids": "[1, 2, 3, 4]"}}
    header["more"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    path = data.draw(st.sampled_from(list(_places(header))))
    text = json.dumps(_changed(header, path, data.draw(st.sampled_from(_VALUES)))).encode()
    name = put(staging)
    body = _RIGHT[8 + int.from_bytes(_RIGHT[:8], "little") :]
    (staging.folder / name).write_bytes(struct.pack("<Q", len(text)) + text + body)
    try:
        wait(staging, name)
        take(staging, name)
    except (RejectedError, TransientError):
        pass


@pytest.mark.parametrize(
    "path", ["\ud800.safetensors", "/a/\udfff\ud800.safetensors", "x\ud800x.safetensors"]
)
def test_names_that_are_no_names(staging: Staging, path: str) -> None:  # noqa: F811
    with pytest.raises(RejectedError, match="no hidden-states file"):
        staging.name_of(path)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


THINGS = {
    "folder": _folder,
    "fifo": os.mkfifo,
    "socket": _socket,
    "link": lambda path: path.symlink_to("/etc/passwd"),
}


@pytest.mark.parametrize("companion", ["", ".lock", ".error", ".part"])
@pytest.mark.parametrize("thing", list(THINGS))
def test_things_in_the_place_of_files(staging: Staging, thing: str, companion: str) -> None:  # noqa: F811
    name = put(staging)
    path = staging.folder / f"{name}{companion}"
    path.unlink(missing_ok=True)
    THINGS[thing](path)
    if companion == ".error":
        (staging.folder / name).unlink()
    try:
        wait(staging, name, 0.1)
        take(staging, name)
    except (RejectedError, TransientError):
        pass
    leftovers = Leftovers(staging, max_age_s=0.0, forget_s=0.0)
    for _ in range(2):
        leftovers.sweep()
    assert os.listdir(staging.folder) == ([path.name] if thing == "folder" else [])


@contextmanager
def nobody() -> Iterator[None]:
    try:
        os.seteuid(65534)
    except OSError as error:  # not root, or a root of containers that may do little
        pytest.skip(f"cannot become somebody else: {error.strerror}")
    try:
        yield
    finally:
        os.seteuid(0)


def test_files_of_another_user_are_told_as_what_they_are(staging: Staging) -> None:  # noqa: F811
    staging.folder.chmod(0o755)
    name = put(staging)
    path = staging.folder / name
    path.chmod(0o600)
    with nobody(), pytest.raises(ConfigError, match="must run as the same user"):
        take(staging, name)
    path.chmod(0o644)
    lock = staging.folder / f"{name}.lock"
    lock.chmod(0o644)
    with nobody():
        take(staging, name)
        with pytest.raises(ConfigError, match=r"cannot be deleted.*must run as the same user"):
            staging.remove(name)
        with pytest.raises(ConfigError, match="cannot be deleted"):
            staging.sweep((), max_age_s=0.0)
    lock.chmod(0o600)
    with nobody(), pytest.raises(ConfigError, match="cannot be read"):
        wait(staging, name)


def test_a_run_goes_on_beside_other_peoples_files(tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    folder.mkdir()
    dataset = make_dataset(tmp_path / "d", [40] * 6)
    mine = Staging(folder, dataset.path)
    name = f"cmpl-{mine.request_id(3, 1)}-0-a.safetensors"
    mine.close()
    _folder(folder / name)
    (folder / "theirs.safetensors").write_bytes(b"x" * 1000)
    (folder / "link").symlink_to("/")
    report, _ = extract_from(dataset, folder)
    assert report.outcomes == {"extracted": 6}
    assert look(dataset).extracted == 6
    assert set(os.listdir(folder)) == {name, "theirs.safetensors", "link"}


def test_a_sweep_that_fails_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "staging"
    folder.mkdir()
    dataset = make_dataset(tmp_path / "d", [40] * 6)

    async def watch(self: Leftovers) -> None:
        raise ConfigError("staging: it is gone")

    monkeypatch.setattr(Leftovers, "watch", watch)
    with pytest.raises(ConfigError, match="it is gone"):
        extract_from(dataset, folder, {n: ["hang"] for n in range(1, 7)})
