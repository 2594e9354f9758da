"""`draftmill vocab` and `draftmill train`: from a dataset to a checkpoint that vLLM serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from draftmill.builder.progress import Progress
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import UsageError
from draftmill.manifests.target import TargetModel
from draftmill.tools.render import Display, duration
from draftmill.tools.settings import Settings, load
from draftmill.trainer.settings import TrainSettings


def target_facts(settings: Settings, path: str | None) -> TargetModel:
    """The target model's facts and weights, which training needs: embeddings, norm and head."""
    folder = path or settings.target.path
    if not folder:
        raise UsageError(
            f"this needs the folder of {settings.target.model} (its config, embeddings and head): "
            "--target DIR, or `path` under [target] in config.toml"
        )
    return TargetModel.from_folder(Path(folder), name=settings.target.model)


@click.command("vocab")
@click.argument("dataset")
@click.option("--draft-vocab-size", type=click.IntRange(min=2), help="Size of the draft's.")
@click.option("--target", metavar="DIR", help="Folder of the target model.")
def vocab_command(dataset: str, draft_vocab_size: int | None, target: str | None) -> None:
    """Choose the draft's vocabulary: the tokens that DATASET's completions use most.

    \b
    draftmill vocab DATASET --draft-vocab-size 32000
    """
    opened = Dataset.open(dataset)
    settings = load(opened, train={"draft_vocab_size": draft_vocab_size})
    make_vocab(opened.path, settings, target)


def make_vocab(path: Path, settings: Settings, target: str | None = None) -> None:
    """Make the mapping of the configured size and say what it covers."""
    from draftmill.trainer import vocab  # torch loads only for commands that need it

    found = vocab.make_vocab(
        path, settings.train.draft_vocab_size, target=target_facts(settings, target)
    )
    click.echo(
        f"vocab: {found.size:,} tokens cover {100 * found.coverage:.2f} % of the supervised tokens"
    )


@click.command("train")
@click.argument("dataset")
@click.option("--output", required=True, metavar="DIR", help="Folder of the draft model.")
@click.option("--target", metavar="DIR", help="Folder of the target model (config and weights).")
@click.option("--steps", type=int, help="Optimizer steps, instead of epochs.")
@click.option("--epochs", type=float, help="Passes over the samples.")
@click.option("--lr", type=float, help="Highest learning rate.")
@click.option("--max-seq-len", type=int, help="Tokens in one packed row.")
@click.option("--draft-vocab-size", type=int, help="Tokens that the draft can propose.")
@click.option("--seed", type=int, help="Seed of weights and order.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where to train.")
@click.pass_context
def train_command(
    ctx: click.Context, /, dataset: str, output: str, target: str | None, **overrides: Any
) -> None:
    """Train an EAGLE-3 draft on DATASET. Started again, it goes on from its last checkpoint.

    \b
    draftmill train DATASET --output draft
    """
    opened = Dataset.open(dataset)
    settings = load(opened, train=overrides)
    report = run_train(opened.path, settings, settings.train, Path(output), target)
    if report.interrupted:
        click.echo(f"stopped at step {report.step} of {report.steps}; the same command goes on")
        ctx.exit(130)


def run_train(
    path: Path,
    settings: Settings,
    train_settings: TrainSettings,
    output: Path,
    target: str | None = None,
) -> Any:
    """Train and show it; returns the trainer's report."""
    from draftmill.trainer.train import train

    with Display("train") as show:

        def on_progress(step: Any) -> None:
            rate = step.tokens_per_s
            parts = [f"loss {step.loss:.3f}", f"lr {step.lr:.1e}"]
            parts += [
                f"{name} {value:.3f}"
                for name, value in step.validation.items()
                if name == "accepted_per_step"
            ]
            show(
                Progress(
                    stage="train",
                    done=step.step,
                    total=step.steps,
                    tokens=step.tokens,
                    tokens_per_s=rate,
                    samples_per_s=step.step * rate / step.tokens if step.tokens else 0.0,
                    note=", ".join(parts),
                )
            )

        report = train(
            path,
            train_settings,
            target=target_facts(settings, target),
            target_layer_ids=settings.target.target_layer_ids,
            output=output,
            on_progress=on_progress,
        )
    figures = ", ".join(f"{name} {value:.3f}" for name, value in report.validation.items())
    click.echo(
        f"train: {report.step} of {report.steps} steps, {report.samples:,} samples, "
        f"{report.tokens:,} tokens in {duration(report.seconds)}; draft vocabulary "
        f"{report.draft_vocab_size:,} covers {100 * report.coverage:.1f} %"
    )
    if figures:
        click.echo(f"validation ({report.validation_samples:,} samples): {figures}")
    if not report.interrupted:
        click.echo(f"draft: {report.output}")
    return report
