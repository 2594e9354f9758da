"""How the connector writes a file. Needs vLLM to be imported, so not among the fast tests."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def connector() -> Any:
    from draftmill.builder.serving import connector

    return connector


class Copy:
    """A copy that ends when it is waited for, or fails then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True
        if self.error is not None:
            raise self.error


def locked(path: Path) -> int:
    lock_fd = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    return lock_fd


def is_locked(path: Path) -> bool:
    with Path(f"{path}.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_written_file_is_what_safetensors_reads(
    connector: Any, tmp_path: Path, num_tokens: int, dtype: torch.dtype
) -> None:
    path = tmp_path / "cmpl-1.safetensors"
    states_TLH = torch.randn(num_tokens, 3, 5).to(dtype)
    if num_tokens:
        states_TLH[0, 0, 0] = float("nan")
    token_ids_T = torch.arange(num_tokens)
    copy, lock_fd = Copy(), locked(path)
    assert is_locked(path)
    connector.write_states(str(path), states_TLH, token_ids_T, [1, 2, 4], copy, lock_fd)
    assert copy.waited
    assert not is_locked(path)
    with safe_open(str(path), "pt") as file:
        read_TLH = file.get_tensor("hidden_states")
        assert (read_TLH.shape, read_TLH.dtype) == (states_TLH.shape, dtype)
        assert torch.equal(read_TLH.view(torch.uint8), states_TLH.view(torch.uint8))
        assert torch.equal(file.get_tensor("token_ids"), token_ids_T)
        assert file.metadata() == {"format": "pt", "target_layer_ids": "[1, 2, 4]"}
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "cmpl-1.safetensors",
        "cmpl-1.safetensors.lock",
    ]


def test_a_failed_write_says_why_and_lets_go_of_the_lock(connector: Any, tmp_path: Path) -> None:
    path = tmp_path / "cmpl-1.safetensors"
    lock_fd = locked(path)
    copy = Copy(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        connector.write_states(str(path), torch.zeros(2, 3, 4), torch.arange(2), [1], copy, lock_fd)
    assert not is_locked(path)
    assert "No space left on device" in Path(f"{path}.error").read_text()
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".error", ".lock"]


def test_nothing_has_its_final_name_before_it_is_whole(connector: Any, tmp_path: Path) -> None:
    path = tmp_path / "cmpl-1.safetensors"
    Path(f"{path}.part").mkdir()
    with pytest.raises(IsADirectoryError):
        connector.write_states(
            str(path), torch.zeros(2, 3, 4), torch.arange(2), [1], Copy(), locked(path)
        )
    assert not path.exists()
    assert "IsADirectoryError" in Path(f"{path}.error").read_text()


@pytest.mark.parametrize(
    ("request_id", "stem"),
    [
        ("cmpl-a-0-1f", "cmpl-a-0-1f"),
        ("cmpl-../../x-0-1f", "cmpl-.._.._x-0-1f"),
        ("../x", "_x"),
        ("a\0b", "a_b"),
    ],
)
def test_a_request_id_is_one_path_component(connector: Any, request_id: str, stem: str) -> None:
    assert connector.file_stem(request_id) == stem
