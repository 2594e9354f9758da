"""`draftmill speculators-train`: speculators' own trainer on shards, all its algorithms."""

from __future__ import annotations

import fcntl
from pathlib import Path

import click

from draftmill.manifests.dataset import Dataset
from draftmill.tools.render import say
from draftmill.tools.settings import load
from draftmill.tools.train import target_facts


@click.command("speculators-train", context_settings={"ignore_unknown_options": True})
@click.argument("dataset")
@click.option("--output", required=True, metavar="DIR", help="Folder for checkpoints and logs.")
@click.option("--target", metavar="DIR", help="Folder of the target model (config and weights).")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def speculators_train_command(
    dataset: str, output: str, target: str | None, arguments: tuple[str, ...]
) -> None:
    """Run `speculators train` on DATASET without exporting it. Needs a GPU.

    Options that are not draftmill's go to speculators. Hidden states are read from the shards;
    OUTPUT/data holds token ids, masks and the vocabulary.

    \b
    draftmill speculators-train DATASET --output draft --speculator-type dflash --epochs 3
    torchrun --nproc-per-node 8 --no-python draftmill speculators-train DATASET --output draft
    """
    from draftmill.trainer import speculators_store as store  # torch loads only where it is needed

    opened = Dataset.open(dataset)
    store.check_device()
    settings = load(opened)
    facts = target_facts(settings, target)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    # The first process of a group prepares the folder, the others find it.
    with (folder / ".prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepared = store.prepare(opened.path, settings.train, target=facts, folder=folder / "data")
    say(
        f"speculators: {len(prepared.plan.train):,} samples to train on, "
        f"{len(prepared.plan.validation):,} to validate on"
    )
    told = store.arguments(
        prepared,
        dataset=opened.path,
        target=facts,
        target_layer_ids=settings.target.target_layer_ids,
        settings=settings.train,
        output=folder,
    )
    store.run([*told, *arguments])
