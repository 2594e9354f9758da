"""`draftmill convert`: a draft model in the form that another server or trainer wants."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from draftmill.manifests.target.target import TargetModel
from draftmill.tools.render import say
from draftmill.tools.terminal import echo
from draftmill.trainer.settings import DraftForm


@click.command("convert")
@click.argument("draft")
@click.argument("output")
@click.option(
    "--format",
    "form",
    required=True,
    type=click.Choice(get_args(DraftForm)),
    help="speculators' form, or the flat one of class LlamaForCausalLMEagle3.",
)
@click.option("--target", metavar="DIR", help="Folder of the target model, whose context it gets.")
@click.option("--name", help="The target's name (default: the folder's).")
def convert_command(
    draft: str, output: str, form: DraftForm, target: str | None, name: str | None
) -> None:
    """Write DRAFT into the new folder OUTPUT in another form; vLLM loads both.

    Without --target nothing but names changes. With it, the draft is made out to that target and
    its context, and embeddings that are the target's own are left out of the flat form.

    \b
    draftmill convert draft draft-flat --format flat --target ./Kimi-K2.5
    """
    from draftmill.trainer.convert import convert_draft  # brings torch

    facts = TargetModel.from_folder(target, name=name) if target else None
    done = convert_draft(draft, Path(output), form, target=facts, note=say)
    echo(f"draft: {done}")
