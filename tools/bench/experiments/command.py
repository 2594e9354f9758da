"""The commands `draftmill bench precision` and `draftmill bench on-policy`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from draftmill.manifests.errors import UsageError
from draftmill.tools.bench.experiments.size import (
    FULL,
    ON_POLICY_STEPS,
    PRECISION_STEPS,
    SMALL,
    Machine,
)
from draftmill.tools.terminal import echo

if TYPE_CHECKING:
    from draftmill.tools.bench.experiments.work import Work


class Experiment(Protocol):
    """What both have."""

    def run(self, until: str | None = None) -> None: ...
    def figures(self) -> list[dict[str, Any]]: ...
    def markdown(self) -> str: ...


def _common(steps: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    options = (
        click.option(
            "--work", default="experiments", show_default=True, help="Where it works and goes on."
        ),
        click.option("--small", is_flag=True, help="A few steps on a few samples, for a CPU."),
        click.option("--target", help="Folder of the target model (default: the embedded one)."),
        click.option("--until", type=click.Choice(steps), help="Stop after this step."),
        click.option("--prompts", type=click.IntRange(min=2), help="Questions to learn from."),
        click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps of a draft."),
        click.option("--seeds", type=click.IntRange(min=1), help="Drafts of each kind."),
        click.option(
            "--device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            show_default=True,
            help="Where drafts are trained.",
        ),
        click.option(
            "--trainers",
            default=1,
            show_default=True,
            type=click.IntRange(min=1),
            help="Drafts trained at once, on the same device.",
        ),
        click.option(
            "--servers",
            default=1,
            show_default=True,
            type=click.IntRange(min=1),
            help="Drafts served at once, on the same GPU, 4 GiB of KV cache each.",
        ),
        click.option("--server-args", default="", help="More arguments for every server."),
        click.option("--json", "as_json", is_flag=True, help="One JSON list, stable keys."),
        click.option("--markdown", is_flag=True, help="The results as a section of a page."),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command("precision")
@click.option("--codec", "codecs", multiple=True, help="A codec to compare; once per codec.")
@_common(PRECISION_STEPS)
def precision_command(codecs: tuple[str, ...], **options: Any) -> None:
    """Drafts trained from hidden states of several codecs, validated on exact ones and in vLLM.

    Stopped at any moment, the same command goes on. docs/experiments/precision.md has the method.

    \b
    draftmill bench precision --work experiments
    draftmill bench precision --work experiments --until extract
    """
    from draftmill.tools.bench.experiments.precision import CODECS, EXPERIMENT, Precision

    _run(Precision(_work(EXPERIMENT, options), codecs or CODECS), options)


@click.command("on-policy")
@_common(ON_POLICY_STEPS)
def on_policy_command(**options: Any) -> None:
    """Drafts trained on human answers against drafts trained on the target's own, in vLLM.

    Same questions, same number of supervised tokens. Stopped at any moment, the same command goes
    on. docs/experiments/on-policy.md has the method. With the --work of `bench precision` both
    share their samples.

    \b
    draftmill bench on-policy --work experiments
    """
    from draftmill.tools.bench.experiments.on_policy import EXPERIMENT, OnPolicy

    _run(OnPolicy(_work(EXPERIMENT, options)), options)


def _work(experiment: str, options: dict[str, Any]) -> Work:
    from draftmill.tools.bench.experiments.work import Work
    from draftmill.tools.demo.command import cache_folder
    from draftmill.tools.demo.embedded import ensure_model

    model = Path(options["target"]).resolve() if options["target"] else None
    if model is not None and not (model / "config.json").is_file():
        raise UsageError(f"--target {model}: no folder of a model (no config.json)")
    given = {key: options[key] for key in ("prompts", "steps", "seeds") if options[key]}
    return Work(
        Path(options["work"]).resolve(),
        experiment,
        replace(SMALL if options["small"] else FULL, **given),
        Machine(
            servers=options["servers"],
            trainers=options["trainers"],
            server_args=tuple(shlex.split(options["server_args"])),
            device=options["device"],
        ),
        model or ensure_model(cache_folder()),
    )


def _run(experiment: Experiment, options: dict[str, Any]) -> None:
    from draftmill.tools.bench.command import show

    until = options["until"]
    experiment.run(until)
    if until not in (None, "eval"):
        return
    if options["as_json"]:
        show(experiment.figures(), as_json=True)
    elif options["markdown"]:
        echo(experiment.markdown())
    else:
        show(experiment.figures(), as_json=False)
        echo("\n--markdown prints the table and the plot of docs/experiments")
