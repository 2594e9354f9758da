"""`draftmill init`: a new dataset folder with its settings."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.serving.command import ServeSettings
from draftmill.manifests import config
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError, UsageError
from draftmill.manifests.target.target import TargetModel, default_target_layer_ids
from draftmill.tools.settings import LISTS, DatasetSettings, TargetSettings, budget_of
from draftmill.tools.terminal import echo
from draftmill.trainer.settings import TrainSettings


def target_settings(
    target: str,
    *,
    name: str | None = None,
    model_config: str | None = None,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    vocab_size: int | None = None,
    layer_ids: tuple[int, ...] = (),
) -> TargetSettings:
    """The section [target] from a model folder, or from numbers when the folder is elsewhere."""
    folder = Path(model_config) if model_config else Path(target)
    local = folder.is_dir() or folder.is_file()
    if local:
        facts = TargetModel.from_folder(folder, name=name or target)
        hidden_size, num_layers, vocab_size = (
            facts.hidden_size,
            facts.num_layers,
            facts.vocab_size,
        )
    elif model_config:
        raise UsageError(f"--model-config {model_config}: there is no such folder")
    elif not (hidden_size and num_layers and vocab_size):
        raise UsageError(
            f"{target} is no folder on this machine, so its sizes are not known. Give a folder "
            "with its config.json (--model-config DIR), or --hidden-size, --layers and "
            "--vocab-size."
        )
    if not layer_ids:
        assert num_layers is not None
        layer_ids = default_target_layer_ids(num_layers)
    try:
        return TargetSettings(
            model=name or (Path(os.path.abspath(target)).name if Path(target).is_dir() else target),
            # A folder with only the config gives facts, but no server can load it.
            path=str(folder.resolve()) if any(folder.glob("*.safetensors")) else "",
            hidden_size=hidden_size or 0,
            num_layers=num_layers or 0,
            vocab_size=vocab_size or 0,
            target_layer_ids=layer_ids,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def layer_list(text: str | None) -> tuple[int, ...]:
    """Layer ids from "2,15,27"."""
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.replace(" ", ",").split(",") if part)
    except ValueError as error:
        raise UsageError(f"layer ids are numbers like 2,15,27, not {text!r}") from error


@click.command("init")
@click.argument("dataset")
@click.option("--target", required=True, help="The target model: its folder, or its name.")
@click.option("--name", help="The name under which servers and checkpoints know the target model.")
@click.option("--model-config", metavar="DIR", help="Folder with the target's config.json.")
@click.option("--hidden-size", type=int, help="If there is no config.json at hand.")
@click.option("--layers", "num_layers", type=int, help="If there is no config.json at hand.")
@click.option("--vocab-size", type=int, help="If there is no config.json at hand.")
@click.option("--target-layer-ids", help="Three auxiliary layers, e.g. 2,15,27 (the default rule).")
@click.option("--disk-budget", default="", help='e.g. "3TB" or "80%" of the volume.')
@click.option("--max-completion-tokens", type=int, help="Longest completion.")
@click.option("--max-seq-len", type=int, help="Longest sample that is extracted.")
def init_command(
    dataset: str,
    target: str,
    name: str | None,
    model_config: str | None,
    hidden_size: int | None,
    num_layers: int | None,
    vocab_size: int | None,
    target_layer_ids: str | None,
    disk_budget: str,
    max_completion_tokens: int | None,
    max_seq_len: int | None,
) -> None:
    """Make a new DATASET folder and write its config.toml.

    \b
    draftmill init kimi --target moonshotai/Kimi-K2.5 --model-config ./Kimi-K2.5 --disk-budget 2TB
    """
    facts = target_settings(
        target,
        name=name,
        model_config=model_config,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        layer_ids=layer_list(target_layer_ids),
    )
    created = create(
        Path(dataset),
        facts,
        disk_budget=disk_budget,
        generate={"max_completion_tokens": max_completion_tokens},
        extract={"max_seq_len": max_seq_len},
    )
    layers = len(facts.target_layer_ids) + 1
    echo(f"{created.config_path}: settings; edit them before the first build")
    echo(
        f"target {facts.model}: {facts.num_layers} layers of {facts.hidden_size}, hidden states of "
        f"layers {', '.join(map(str, facts.extraction_layer_ids))}: "
        f"{layers * facts.hidden_size * 2:,} bytes a token before compression"
    )
    echo(f"next: draftmill add {shlex.quote(dataset)} PROMPTS.jsonl")


def create(
    path: Path,
    target: TargetSettings,
    *,
    disk_budget: str = "",
    generate: dict[str, Any] | None = None,
    extract: dict[str, Any] | None = None,
    serve: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
) -> Dataset:
    """A new dataset with these settings; None values mean the default."""
    try:
        sections: dict[str, Any] = {
            "dataset": DatasetSettings(disk_budget=disk_budget, **(sizes or {})),
            "target": target,
            "generate": GenerateSettings(**_given(generate)),
            "extract": ExtractSettings(**_given(extract)),
            "serve": ServeSettings(**_given(serve)),
            "train": TrainSettings(**_given(train)),
        }
    except ValueError as error:
        raise ConfigError(str(error)) from error
    budget_of(sections["dataset"], path)
    return Dataset.create(path, config.render(sections, LISTS))


def _given(values: dict[str, Any] | None) -> dict[str, Any]:
    given = {key: value for key, value in (values or {}).items() if value is not None}
    for key, value in given.items():
        config.check_number(key, value)
    return given
