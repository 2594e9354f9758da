"""Facts of the target model, read from its folder: sizes, layer ids, fingerprints, weight slices.

Reads config.json and safetensors headers only, so that a 1 TB model costs a few kilobytes; no torch
and no transformers. How a draft model is shaped after these facts is left to the trainer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.errors import NOT_UNDERSTOOD, ConfigError, DamagedError, why

# Where the language model's own keys sit in nested (multimodal) configs, in order of preference.
_NESTED = ("text_config", "language_config", "llm_config", "language_model")
_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions")
# transformers computes the final norm of these as x * (1 + weight) instead of x * weight.
_NORM_ADDS_ONE = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
    }
)
_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),  # bit patterns: numpy has no bfloat16
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}  # others: 1
_FLOATS = {"F32", "BF16", "F16"}
_SUFFIXES = {
    "embed_tokens": ("embed_tokens.weight", "tok_embeddings.weight", "wte.weight"),
    "norm": ("model.norm.weight", "norm.weight", "norm_f.weight"),
    "lm_head": ("lm_head.weight", "output.weight"),
}
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format


def default_target_layer_ids(num_layers: int) -> tuple[int, ...]:
    """The auxiliary layers of EAGLE-3 for a model of `num_layers`: (2, n // 2, n - 3).

    Id k is the residual stream after k decoder layers. Very shallow models, where these would
    collide, get three distinct ids from 1 to n - 1. Raises ConfigError below 4 layers.
    """
    if num_layers < 4:
        raise ConfigError(
            f"The target model has {num_layers} layers; three auxiliary layers below the last "
            "need at least 4."
        )
    ids = (2, num_layers // 2, num_layers - 3)
    if ids[0] < ids[1] < ids[2]:
        return ids
    return (1, num_layers // 2, num_layers - 1)


def check_target_layer_ids(
    ids: Sequence[int], num_layers: int, *, algorithm: str = "eagle3"
) -> None:
    """Raise ConfigError when `ids` cannot be auxiliary layers of a model of `num_layers`."""
    if list(ids) != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] > num_layers:
        raise ConfigError(
            f"target_layer_ids {list(ids)}: give distinct ids in rising order within 0 to "
            f"{num_layers} (id k is the residual stream after k decoder layers)."
        )
    if algorithm == "eagle3" and len(ids) != 3:
        # vLLM's EAGLE-3 classes size their first projection for three (vllm#54526).
        raise ConfigError(
            f"target_layer_ids {list(ids)}: EAGLE-3 drafts need exactly 3 auxiliary layers, "
            f"because vLLM does not load others; {len(ids)} were given."
        )


def extraction_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers to extract: the auxiliary layers, then the last before the final norm."""
    return (*ids, num_layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


@dataclass(frozen=True, kw_only=True)
class TargetModel:
    """What draftmill has to know of a target model.

    `name` is how the model is called wherever it is served; `folder` is where it lies here and is
    never stored. `text_config` is the language model's own part of config.json, as written there.
    """

    name: str
    folder: Path = field(compare=False)
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    tie_word_embeddings: bool
    text_config: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_folder(cls, path: str | Path, name: str | None = None) -> TargetModel:
        """Read the facts from a folder with config.json, or from a model in the local HF cache.

        Without `name` the model is called like its folder (or like its repository in the cache).
        Raises ConfigError when there is no such model here or its config lacks a fact.
        """
        folder = find_folder(path)
        config = _read_json(folder / "config.json")
        text = _text_config(config)
        context = next((text[key] for key in _CONTEXT_KEYS if text.get(key)), None)
        facts = {
            "hidden_size": text.get("hidden_size"),
            "num_hidden_layers": text.get("num_hidden_layers"),
            "vocab_size": text.get("vocab_size", config.get("vocab_size")),
            "max_position_embeddings": context,
        }
        if facts["vocab_size"] is None and (tensor := _find(_headers(folder), "embed_tokens")):
            facts["vocab_size"] = tensor.shape[0]
        for key, value in facts.items():
            if type(value) is not int or value <= 0:
                raise ConfigError(
                    f"{folder / 'config.json'}: {key} is {value!r}; a positive integer is needed "
                    "there or in its text_config."
                )
        dtype = text.get("dtype") or text.get("torch_dtype")
        dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        return cls(
            name=name or _name_of(folder, str(path)),
            folder=folder,
            model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
            architectures=tuple(config.get("architectures") or ()),
            hidden_size=facts["hidden_size"],
            num_layers=facts["num_hidden_layers"],
            vocab_size=facts["vocab_size"],
            max_position_embeddings=facts["max_position_embeddings"],
            dtype=str(dtype).removeprefix("torch."),
            tie_word_embeddings=bool(tied),
            text_config=text,
        )

    @property
    def norm_adds_one(self) -> bool:
        """Whether the final norm multiplies by 1 + weight (the Gemma convention)."""
        return self.model_type in _NORM_ADDS_ONE

    def fingerprint(self) -> str:
        """32 hex digits of the sizes that hidden states depend on; the same wherever it lies."""
        facts = [self.model_type, self.hidden_size, self.num_layers, self.vocab_size, self.dtype]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def weights_fingerprint(self) -> str | None:
        """32 hex digits of all tensors' names, types and shapes and of the final norm's bytes.

        Tells a finetuned model from its base without reading the weights; None without weights.
        """
        if not self._tensors:
            return None
        listing = sorted((n, t.dtype, t.shape) for n, t in self._tensors.items())
        digest = hashlib.sha256(json.dumps(listing).encode())
        digest.update(self.final_norm().tobytes())
        return digest.hexdigest()[:32]

    def weight_bytes(self, num_layers: int) -> int:
        """Bytes of the weights on disk up to decoder layer `num_layers`, all else included."""
        total = 0
        for name, tensor in self._tensors.items():
            layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
            if layer is None or int(layer[1]) < num_layers:
                total += math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 1)
        return total

    @property
    def float_bytes(self) -> int:
        """Bytes of one weight where layers are stored as plain floats; 0 where quantised."""
        kinds = {each.dtype for each in self._tensors.values()}
        return max((_ITEM_BYTES[each] for each in kinds), default=0) if kinds <= _FLOATS else 0

    @cached_property
    def _tensors(self) -> dict[str, _Tensor]:
        return _headers(self.folder)

    def embed_tokens(self, rows: NDArray[Any] | slice | None = None) -> NDArray[Any]:
        """Token embeddings [V, H], or only `rows`. bf16 comes as uint16 bit patterns."""
        return self._read("embed_tokens", rows)

    def lm_head(self, rows: NDArray[Any] | slice | None = None) -> NDArray[Any]:
        """Output projection [V, H], or only `rows`; the embeddings when the two are tied."""
        tied = self.tie_word_embeddings or _find(self._tensors, "lm_head") is None
        return self._read("embed_tokens" if tied else "lm_head", rows)

    def final_norm(self) -> NDArray[Any]:
        """Weight [H] of the norm before the output projection."""
        return self._read("norm", None)

    def _read(self, what: str, rows: NDArray[Any] | slice | None) -> NDArray[Any]:
        tensor = _find(self._tensors, what)
        if tensor is None:
            raise ConfigError(
                f"{self.folder}: no safetensors weight named like *{_SUFFIXES[what][0]}. "
                "Point at a folder with the target model's weights."
            )
        if tensor.dtype not in _NUMPY_TYPES:
            raise ConfigError(
                f"{tensor.file}: {what} is stored as {tensor.dtype}; only unquantised "
                "embeddings, norm and lm_head can be used."
            )
        expected = (self.hidden_size,) if what == "norm" else (self.vocab_size, self.hidden_size)
        # Some models pad the vocabulary in the weights beyond what config.json says.
        if len(tensor.shape) != len(expected) or tensor.shape[-1] != expected[-1]:
            raise ConfigError(
                f"{tensor.file}: {what} has shape {list(tensor.shape)}, expected {list(expected)}."
            )
        mapped = np.memmap(
            tensor.file,
            dtype=_NUMPY_TYPES[tensor.dtype],
            mode="r",
            offset=tensor.offset,
            shape=tensor.shape,
        )
        if what == "norm":
            return np.array(mapped)
        return np.array(mapped[: self.vocab_size] if rows is None else mapped[rows])


def find_folder(path: str | Path) -> Path:
    """The folder of a model given by path or by a name in the local Hugging Face cache."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if folder.is_dir():
        raise ConfigError(f"{path}: this folder has no config.json, so it is no model.")
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = hub / f"models--{str(path).replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
        snapshot = repository / "snapshots" / commit
        if (snapshot / "config.json").is_file():
            return snapshot
    except OSError:
        pass
    raise ConfigError(
        f"{path}: no such folder, and no such model in the Hugging Face cache {hub}. "
        "Download it first, or give the path of its folder."
    )


def _name_of(folder: Path, given: str) -> str:
    parent = folder.parent
    if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
        return parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name or given


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, dict) and "hidden_size" in inner:
            return inner
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({why(error)}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: an object was expected.")
    return value


def _find(tensors: Mapping[str, _Tensor], what: str) -> _Tensor | None:
    """The tensor whose name ends like `what`; the shortest name wins (layers have longer ones)."""
    for suffix in _SUFFIXES[what]:
        names = [n for n in tensors if n == suffix or n.endswith("." + suffix)]
        if names:
            return tensors[min(names, key=len)]
    return None


def _headers(folder: Path) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / str(n) for n in _read_json(index).get("weight_map", {}).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        tensors.update(_header(file))
    return tensors


def _header(file: Path) -> dict[str, _Tensor]:
    """What a safetensors file holds, from its header: 8 bytes of length, then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {
            name: _Tensor(
                file=file,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=8 + length + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
    except (OSError, struct.error, *NOT_UNDERSTOOD) as error:
        raise DamagedError(f"{file} is no readable safetensors file: {error}") from error
