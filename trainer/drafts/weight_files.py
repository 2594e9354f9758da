"""Reads the weights of a foreign checkpoint, safetensors or torch's own form, whole or in parts.

What the tensors mean is left to `forms`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftmill.manifests.errors import NOT_UNDERSTOOD, ConfigError, DamagedError

WEIGHTS_FILE = "model.safetensors"
_Load: TypeAlias = Callable[[Path], dict[str, Tensor]]
_UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of the model in `folder`: safetensors where there are any.

    Raises ConfigError when there are none.
    """
    for index_name, pattern in (
        ("model.safetensors.index.json", "*.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
    ):
        index = folder / index_name
        if index.is_file():
            return _indexed(index)
        if found := sorted(folder.glob(pattern)):
            return found
    raise ConfigError(
        f"{folder} has no weights: no *.safetensors and no pytorch_model*.bin. Is it downloaded?"
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the model in `folder`, on the CPU, in the types that they are stored in.

    Raises DamagedError for files that cannot be read or hold anything but tensors.
    """
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        load: _Load = load_file if path.suffix == ".safetensors" else _load_torch
        try:
            found = load(path)
        except _UNREADABLE as error:
            raise DamagedError(f"{path} cannot be read as weights: {error}") from error
        if twice := sorted(weights.keys() & found.keys()):
            raise DamagedError(f"{path} holds tensors that another file holds too: {twice}")
        weights.update(found)
    return weights


def digest(folder: Path) -> str:
    """32 hex digits of the config and all weights: names a checkpoint by what is in it."""
    hasher = xxhash.xxh3_128()
    for path in [folder / "config.json", *weight_files(folder)]:
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                hasher.update(block)
    return hasher.hexdigest()


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, *NOT_UNDERSTOOD) as error:
        raise DamagedError(f"{index} cannot be read: {error}") from error
    # An index from elsewhere does not choose files outside of its folder.
    if strange := sorted(str(name) for name in names if Path(str(name)).name != name):
        raise DamagedError(f"{index} names files outside of its folder: {strange}")
    return sorted(index.parent / name for name in names)


def _load_torch(path: Path) -> dict[str, Tensor]:
    # Plain tensors only: a checkpoint from elsewhere cannot run code.
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ValueError("tensors by name were expected")
    return found
