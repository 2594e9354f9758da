"""The model card, README.md beside a draft: what it was made of, how good it is, how to serve it.

Everything comes from the run and its dataset; what they do not know is said to be not given.
Accepted tokens are put in later, when they have been measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.drafts.vocab import VocabMapping
from draftmill.trainer.loading.plan import Plan
from draftmill.trainer.settings import TrainSettings

CARD_FILE = "README.md"
TRAINING_PLOT = "training.png"
ACCEPTANCE_PLOT = "acceptance.png"
_BEGIN, _END = "<!-- accepted tokens: begin -->", "<!-- accepted tokens: end -->"
_NOT_MEASURED = "Not measured yet: `draftmill eval` fills this in."
_PACKAGES = ("draftmill", "torch", "transformers", "speculators")
_NOT_GIVEN = "not given"
# Settings whose outcome stands in the card's own words.
_SAID_ABOVE = ("draft_vocab_size", "epochs", "steps")


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one source of prompts contributed to training."""

    name: str
    license: str | None
    samples: int
    tokens: int
    off_policy: int


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training samples by source, and what they were generated and extracted with."""

    sources: Sequence[Source]
    settings: Mapping[str, Mapping[str, Any]]
    fingerprints: Mapping[str, str]


def describe_data(dataset: Path, plan: Plan) -> Data:
    """What the dataset says of the samples that `plan` trains on."""
    with Dataset.open(dataset).reader() as reader:
        table = reader.extracted()
        stages = ("generate", "extract")
        settings = {name: reader.settings_of(name) for name in stages}
        prints = {name: reader.meta(f"fingerprint.{name}") or _NOT_GIVEN for name in stages}
        used = table.filter(np.isin(table.column("id").to_numpy(), plan.train.id))
        names = used.column("source").to_numpy(zero_copy_only=False)
        tokens = used.column("tokens").to_numpy()
        foreign = used.column("off_policy").to_numpy(zero_copy_only=False).astype(bool)
        sources = [
            Source(
                name=str(name),
                license=reader.meta(f"license.{name}"),
                samples=int((names == name).sum()),
                tokens=int(tokens[names == name].sum()),
                off_policy=int(foreign[names == name].sum()),
            )
            for name in sorted(set(names))
        ]
    return Data(sources=sources, settings=settings, fingerprints=prints)


def model_card(
    *,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    settings: TrainSettings,
    plan: Plan,
    vocab: VocabMapping,
    data: Data,
    steps: int,
    tokens: int,
    best_step: int | None,
    validation: Mapping[str, float],
    finetuned_from: str | None,
) -> str:
    """The text of the card; counts are of samples, `tokens` of all steps together."""
    flat = settings.checkpoint_format == "flat"
    serving = json.dumps({"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3})
    parts = [
        _front_matter(target, flat),
        f"# EAGLE-3 draft for {target.name}",
        f"A draft model for speculative decoding of `{target.name}`, trained by draftmill. It "
        "proposes tokens; the target checks them, so answers stay the target's.",
        "## Serve it",
        "`DIR` is this folder:",
        f"    vllm serve {target.name} --speculative-config '{serving}'",
        "## Accepted tokens",
        f"{_BEGIN}\n{_NOT_MEASURED}\n{_END}",
        "## Validation",
        _table(
            ("figure", "value"),
            [(name, f"{value:.4f}") for name, value in sorted(validation.items())],
        )
        if validation
        else "No samples were kept for validation.",
        f"Measured on {len(plan.validation):,} samples of conversations that were not trained on, "
        f"at step {best_step if best_step is not None else steps}, within the draft vocabulary. "
        "`full_acc_i`: draft tokens 0 to i are all the target's first choice; "
        "`accepted_per_step`: what greedy decoding would have accepted along the completions.",
        f"![Loss and accuracy]({TRAINING_PLOT})",
        "## Data",
        _table(
            ("source", "licence", "samples", "tokens", "off-policy samples"),
            [
                (
                    _plain(part.name),
                    _plain(part.license or _NOT_GIVEN),
                    f"{part.samples:,}",
                    f"{part.tokens:,}",
                    f"{part.off_policy:,}",
                )
                for part in data.sources
            ],
        ),
        "Completions are the target's own, but for those of off-policy samples.",
        f"{plan.cut:,} samples were cut at {settings.max_seq_len:,} tokens; "
        f"{plan.nothing_supervised:,} were left out because they supervise nothing.",
        *_stages(data),
        "## Training",
        _table(
            ("what", "value"),
            [
                ("form", "flat, LlamaForCausalLMEagle3" if flat else "speculators"),
                (
                    "auxiliary layers (id k is the input of decoder layer k)",
                    _plain(target_layer_ids),
                ),
                ("draft vocabulary", f"{vocab.size:,} tokens"),
                ("supervised tokens that it covers", f"{100 * vocab.coverage:.2f} %"),
                ("context", f"{target.max_position_embeddings:,} tokens"),
                ("finetuned from", _plain(finetuned_from or "nothing: trained from scratch")),
                ("steps", f"{steps:,}"),
                ("tokens seen", f"{tokens:,}"),
                *(
                    (name, _plain(value))
                    for name, value in sorted(settings.binding().items())
                    if name not in _SAID_ABOVE
                ),
            ],
        ),
        "## Fingerprints and versions",
        _table(
            ("what", "value"),
            [
                ("training data", plan.fingerprint),
                ("generated with", data.fingerprints["generate"]),
                ("extracted with", data.fingerprints["extract"]),
                ("target's sizes", target.fingerprint()),
                *_versions(),
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(target: TargetModel, flat: bool) -> str:
    lines = [
        "---",
        f"base_model: {json.dumps(target.name)}",
        "pipeline_tag: text-generation",
        *([] if flat else ["library_name: speculators"]),
        "tags:",
        *(f"- {tag}" for tag in ("eagle3", "speculative-decoding", "draft-model", "vllm")),
        "---",
    ]
    return "\n".join(lines)


def _stages(data: Data) -> list[str]:
    lines = []
    for stage, word in (("generate", "Generated"), ("extract", "Hidden states extracted")):
        if values := data.settings[stage]:
            listed = ", ".join(
                f"{name} {_plain(value)}"
                for name, value in sorted(values.items())
                if value is not None  # left to the server
            )
            lines.append(f"{word} with {listed}.")
    return lines


def _versions() -> list[tuple[str, str]]:
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(value: object) -> str:
    """A value on one line of a table; a source's name may hold anything."""
    text = str(list(value) if isinstance(value, tuple) else value)
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def put_evaluation(folder: Path, document: Mapping[str, Any], prompts: str) -> bool:
    """Put the figures of `eval --json` into the card in `folder`, in place of older ones.

    False when there is no card of draftmill's: somebody else's README is left alone.
    """
    path = folder / CARD_FILE
    try:
        before, begin, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    except (OSError, UnicodeDecodeError):
        return False
    _, end, after = rest.partition(_END)
    if not begin or not end:
        return False
    rows = [
        (
            _plain(name),
            f"{part['accepted_per_step']:.3f}",
            " / ".join(f"{share:.3f}" for share in part["accepted_by_position"]),
            f"{part['drafts']:,}",
        )
        for name, part in (("all", document), *document["by_source"].items())
    ]
    speed = document["tokens_per_s"]
    plain = speed["without_draft"]
    lines = [
        _table(("prompts", "accepted per step", "by draft token", "drafts"), rows),
        "",
        f"Accepted draft tokens per draft, the target's own token not counted; "
        f"{document['prompts']:,} prompts of {_plain(prompts)}, temperature "
        f"{document['temperature']}. {speed['with_draft']:,.1f} tokens/s with the draft, "
        + (f"{plain:,.1f} without." if plain else "not measured without."),
        "",
        f"![Accepted by draft token]({ACCEPTANCE_PLOT})",
    ]
    text = f"{before}{_BEGIN}\n" + "\n".join(lines) + f"\n{_END}{after}"
    files.write_atomic(path, text, "card")
    return True
