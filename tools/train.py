"""`draftmill vocab` and `draftmill train`: from a dataset to a checkpoint that vLLM serves."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import click

from draftmill.builder.progress import Progress
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError, UsageError
from draftmill.manifests.target.target import TargetModel
from draftmill.tools.render import Display, duration, say
from draftmill.tools.settings import Settings, load
from draftmill.tools.terminal import echo
from draftmill.trainer.settings import DraftForm, Finetune, TrainSettings, is_leader


def target_facts(settings: Settings, path: str | None) -> TargetModel:
    """The target model's facts and weights, which training needs: embeddings, norm and head."""
    folder = path or settings.target.path
    if not folder:
        raise UsageError(
            f"this needs the folder of {settings.target.model} (its config, embeddings and head): "
            "--target DIR, or `path` under [target] in config.toml"
        )
    facts = TargetModel.from_folder(Path(folder), name=settings.target.model)
    for key in ("hidden_size", "num_layers", "vocab_size"):
        mine, theirs = getattr(settings.target, key), getattr(facts, key)
        if mine != theirs:
            raise ConfigError(
                f"{folder} is not the target of this dataset: {key} is {theirs} there and {mine} "
                "under [target] in config.toml"
            )
    return facts


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
    from draftmill.trainer.drafts import vocab  # torch loads only for commands that need it

    found = vocab.make_vocab(
        path, settings.train.draft_vocab_size, target=target_facts(settings, target)
    )
    echo(
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
@click.option(
    "--checkpoint-format",
    type=click.Choice(get_args(DraftForm)),
    help="Form of the written draft; vLLM loads both.",
)
@click.option("--fsdp", is_flag=True, default=None, help="Shard weights over GPUs (torchrun).")
@click.option("--grow", is_flag=True, help="Take in samples added since, from the next epoch on.")
@click.option("--tensorboard", is_flag=True, default=None, help="Also write for TensorBoard.")
@click.option(
    "--finetune-from",
    metavar="CKPT",
    help="Start from this EAGLE-3 draft, in speculators', AQ-MedAI's or SGLang's form.",
)
@click.option(
    "--finetune-layers",
    metavar="IDS",
    help="Layers that it was trained on, as 2,30,58, where its config counts otherwise.",
)
@click.option("--other-target", is_flag=True, help="It may be of a target with another name.")
@click.pass_context
def train_command(
    ctx: click.Context,
    /,
    dataset: str,
    output: str,
    target: str | None,
    finetune_from: str | None,
    finetune_layers: str | None,
    other_target: bool,
    grow: bool,
    **overrides: Any,
) -> None:
    """Train an EAGLE-3 draft on DATASET. Started again, it goes on from its last checkpoint.

    With --finetune-from, the draft's own vocabulary is kept unless --draft-vocab-size asks for
    one of DATASET's; then the rows of its head follow their tokens.

    \b
    draftmill train DATASET --output draft
    torchrun --nproc-per-node 8 --no-python draftmill train DATASET --output draft
    draftmill train DATASET --output draft --finetune-from AQ-MedAI/Kimi-K2-Instruct-eagle3
    """
    opened = Dataset.open(dataset)
    settings = load(opened, train=overrides)
    finetune = None
    if finetune_from is not None:
        finetune = Finetune(
            checkpoint=finetune_from,
            new_vocab=overrides["draft_vocab_size"] is not None,
            layer_ids=_layers(finetune_layers),
            other_target=other_target,
        )
    elif finetune_layers or other_target:
        raise UsageError("--finetune-layers and --other-target go with --finetune-from")
    report = run_train(
        opened.path, settings, settings.train, Path(output), target, finetune=finetune, grow=grow
    )
    if is_leader() and not report.interrupted:
        model = shlex.quote(target or settings.target.path or settings.target.model)
        draft = shlex.quote(output)
        echo(f"next: draftmill eval {draft} --target {model} --prompts HELD_OUT.jsonl")
    if report.interrupted and is_leader():
        echo(f"stopped at step {report.step} of {report.steps}; the same command goes on")
    if report.interrupted:
        ctx.exit(130)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--finetune-layers {text}: numbers with commas, as 2,30,58") from error


def run_train(
    path: Path,
    settings: Settings,
    train_settings: TrainSettings,
    output: Path,
    target: str | None = None,
    *,
    finetune: Finetune | None = None,
    grow: bool = False,
) -> Any:
    """Train and show it; returns the trainer's report.

    Of several processes that `torchrun` started, the leading one shows it.
    """
    from draftmill.trainer.train import train

    with Display("train") if is_leader() else nullcontext(_unseen) as show:

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
            finetune=finetune,
            grow=grow,
            on_progress=on_progress,
            note=say if is_leader() else lambda text: None,
        )
    if is_leader():
        _show_report(report)
    return report


def _unseen(progress: Progress) -> None:
    """Processes that do not lead show nothing."""


def _show_report(report: Any) -> None:
    echo(
        f"train: {report.step} of {report.steps} steps, {report.samples:,} samples, "
        f"{report.tokens:,} tokens in {duration(report.seconds)}; draft vocabulary "
        f"{report.draft_vocab_size:,} covers {100 * report.coverage:.1f} %"
    )
    if report.validation:
        echo(_validation(report.validation, report.validation_samples))
    echo(
        f"samples: {report.cut:,} cut at max_seq_len, {report.nothing_supervised:,} left out "
        f"because nothing in them is supervised; {100 * report.waste:.1f} % of places empty"
    )
    if not report.interrupted:
        echo(f"draft: {report.output}")


def _validation(figures: Mapping[str, float], samples: int) -> str:
    """What a person asks first; log.jsonl and the model card have all of it."""
    count = sum(name.startswith("full_acc_") for name in figures)
    # Not there where no answer is long enough to draw a draft.
    accepted = figures.get("accepted_per_step", 0.0)
    places = " / ".join(f"{figures[f'full_acc_{place}']:.3f}" for place in range(count))
    return (
        f"validation ({samples:,} samples): {accepted:.3f} accepted per step, "
        f"accuracy by position {places}, loss {figures['loss']:.3f}"
    )
