"""The tiny target model, made once for all tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill.manifests.target import TargetModel
from tests.trainer import tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tiny.save_target(tmp_path_factory.mktemp("target"))
    return TargetModel.from_folder(folder, name="tests/tiny-llama")


@pytest.fixture(scope="session")
def dataset(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 greedy answers of the tiny target."""
    path = tmp_path_factory.mktemp("dataset") / "d"
    return tiny.build_dataset(path, list(tiny.answers(target.folder, 40))).path
