"""The sections of `config.toml` put together, and the sections that belong to no other room."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftmill.builder.budget import check_budget, parse_budget, parse_share
from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.serving.command import ServeSettings
from draftmill.builder.sources.settings import SourceSettings
from draftmill.manifests import config
from draftmill.manifests.config import setting
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError, UsageError
from draftmill.manifests.sizes import parse_size
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """Sizes on disk. Free to change between runs."""

    disk_budget: str = setting(
        "", 'The most bytes that dataset and staging may take, e.g. "500GB", "2TiB", "80%".'
    )
    shard_size: str = setting("1GiB", "Size of a hidden-states shard.")
    completion_shard_size: str = setting("64MiB", "Size of a completions shard.")
    max_prompts: int | None = setting(
        None, "The most prompts that all [[sources]] give together, by their weights. Unset: all."
    )

    def __post_init__(self) -> None:
        for key in ("shard_size", "completion_shard_size"):
            try:
                size = parse_size(getattr(self, key))
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
            if size < 64 << 10:
                raise ValueError(f"{key}: at least 64KiB, not {getattr(self, key)}")
        if self.max_prompts is not None and self.max_prompts < 1:
            raise ValueError(f"max_prompts: at least 1, not {self.max_prompts}")
        if self.disk_budget:
            try:
                # What a share comes to is known where the dataset lies: `budget_of` checks it.
                if parse_share(self.disk_budget) is None:
                    check_budget(parse_budget(self.disk_budget, Path()))
            except ValueError as error:
                raise ValueError(f"disk_budget: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The target model. Fixed once completions exist."""

    model: str = setting("", "The target model's name, as the server and the checkpoint call it.")
    path: str = setting("", "Folder with its config and weights, if it is on this machine.")
    hidden_size: int = setting(0, "Width of the residual stream.")
    num_layers: int = setting(0, "Number of decoder layers, n.")
    vocab_size: int = setting(0, "Size of its vocabulary.")
    target_layer_ids: tuple[int, ...] = setting(
        (), "Layers whose input the draft sees: id k is the residual stream after k layers."
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model: the target model's name is missing")
        for key in ("hidden_size", "num_layers", "vocab_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: at least 1, not {getattr(self, key)}")
        ids = self.target_layer_ids
        if len(ids) != 3:
            raise ValueError(
                f"target_layer_ids: EAGLE-3 takes exactly 3 layers, not {len(ids)}; vLLM loads no "
                "draft with another number (vllm#54526)"
            )
        if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > self.num_layers:
            raise ValueError(
                f"target_layer_ids: ascending numbers from 0 to {self.num_layers}, not {list(ids)}"
            )

    @property
    def extraction_layer_ids(self) -> tuple[int, ...]:
        """The auxiliary layers, then the last one."""
        return (*self.target_layer_ids, self.num_layers)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything in one config file."""

    dataset: DatasetSettings
    target: TargetSettings
    generate: GenerateSettings
    extract: ExtractSettings
    serve: ServeSettings
    train: TrainSettings
    sources: tuple[SourceSettings, ...] = ()


SECTIONS: dict[str, type] = {
    "dataset": DatasetSettings,
    "target": TargetSettings,
    "generate": GenerateSettings,
    "extract": ExtractSettings,
    "serve": ServeSettings,
    "train": TrainSettings,
}
# Those that may come several times, as [[name]].
LISTS: dict[str, type] = {"sources": SourceSettings}


# Options of commands that go before a setting, for one run.
OPTIONS = {
    ("dataset", "disk_budget"): "extract --disk-budget",
    ("dataset", "max_prompts"): "add --limit",
    ("target", "path"): "extract --weights",
    ("generate", "concurrency"): "generate --concurrency",
    ("generate", "timeout_s"): "generate --timeout",
    ("generate", "reasoning"): "generate --reasoning",
    ("extract", "staging"): "extract --staging",
    ("extract", "concurrency"): "extract --concurrency",
    ("extract", "codec"): "extract --codec",
    **{
        ("train", key): f"train --{key.replace('_', '-')}"
        for key in (
            "steps",
            "epochs",
            "lr",
            "max_seq_len",
            "draft_vocab_size",
            "seed",
            "device",
            "checkpoint_format",
            "fsdp",
            "tensorboard",
        )
    },
}


def load(dataset: Dataset, /, **overrides: dict[str, Any]) -> Settings:
    """The settings of a dataset; `overrides`: command-line values by section, None if unset."""
    sections = config.read(dataset.config_path, SECTIONS, LISTS)
    _check_names(dataset, sections["sources"])
    for name, values in overrides.items():
        given = {key: value for key, value in values.items() if value is not None}
        for key, value in given.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{key}: a finite number, not {value}")
        try:
            for key, value in given.items():
                config.check_number(key, value)
            sections[name] = replace(sections[name], **given)
        except ValueError as error:
            raise UsageError(str(error)) from error
    return Settings(**sections)


def _check_names(dataset: Dataset, sources: tuple[SourceSettings, ...]) -> None:
    """Limits and weights are kept by name: two sources of one name and mode would share them."""
    keys = [source.key for source in sources]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            field = "name" if sources[number].name else "path"
            where = config.where(dataset.config_path, "sources", field, number)
            raise ConfigError(
                f"{where}: another of [[sources]] is called {key[0]!r} too; set a `name`"
            )


def writer_options(dataset: Dataset, settings: Settings) -> dict[str, Any]:
    """Arguments for `Dataset.writer` that follow from the settings."""
    return {
        "shard_bytes": parse_size(settings.dataset.shard_size),
        "completion_shard_bytes": parse_size(settings.dataset.completion_shard_size),
        "budget_bytes": budget_of(settings.dataset, dataset.path),
        "staging": staging_folder(dataset, settings),
    }


def budget_of(settings: DatasetSettings, folder: Path) -> int | None:
    """Bytes that a dataset in `folder` may take; ConfigError where that is no room for samples."""
    if not settings.disk_budget:
        return None
    try:
        size = parse_budget(settings.disk_budget, folder)
        check_budget(size)
    except ValueError as error:
        raise ConfigError(f"disk_budget = {settings.disk_budget!r}: {error}") from error
    return size


def staging_folder(dataset: Dataset, settings: Settings) -> Path:
    """Where the extraction server leaves its files."""
    given = settings.extract.staging
    return Path(given) if given else dataset.path / "staging"


def target_weights(settings: Settings) -> TargetModel | None:
    """The target where its folder is here: `target.path`, else its name in the local Hugging Face
    cache. None where it is in neither place."""
    for place in filter(None, (settings.target.path, settings.target.model)):
        try:
            return TargetModel.from_folder(place, name=settings.target.model)
        except ConfigError:
            continue
    return None
