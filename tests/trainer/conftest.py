"""The tiny target model, made once for all tests of the trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftmill.manifests.target.target import TargetModel
from tests.trainer import tiny


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more cores; programs started by tests inherit it."""
    import torch

    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(before[0])
    if before[1] is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before[1]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tiny.save_target(tmp_path_factory.mktemp("target"))
    return TargetModel.from_folder(folder, name="tests/tiny-llama")


@pytest.fixture(scope="session")
def dataset(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 greedy answers of the tiny target."""
    path = tmp_path_factory.mktemp("dataset") / "d"
    return tiny.build_dataset(path, list(tiny.answers(target.folder, 40))).path
