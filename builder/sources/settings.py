"""Settings of one prompt source: a section [[sources]] of config.toml.

What they do to the rows of a file is left to `conversations`, how many are taken to `mix`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from draftmill.builder.sources.conversations import Format, Mode, Turns
from draftmill.builder.sources.read import source_name
from draftmill.manifests.config import setting


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One of the sources that `draftmill add DATASET` takes. Free to change between runs."""

    path: str = setting(
        "", "File or folder with prompts. A relative path starts at the dataset's folder."
    )
    name: str = setting("", "Name of the source in the dataset. Empty: the file's name.")
    license: str = setting("", "Licence of its texts, as its owner gives it; model cards show it.")
    format: Format = field(
        default="auto",
        metadata={"help": 'Form of the rows: "auto", "messages", "sharegpt" or "prompt".'},
    )
    turns: Turns = field(
        default="last",
        metadata={
            "help": 'Which turns of a conversation become prompts: "first", "last" or "all".'
        },
    )
    mode: Mode = field(
        default="regenerate",
        metadata={
            "help": '"regenerate": the target model answers. "prefill": the answers in the source '
            "are kept and only their hidden states are extracted (off-policy)."
        },
    )
    limit: int | None = setting(
        None, "The most prompts to take, chosen by their content. Unset: all."
    )
    weight: float = setting(
        1.0, "Share among all [[sources]] where max_prompts under [dataset] limits them."
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: the file or folder of this source is missing")
        if self.name != self.name.encode(errors="replace").decode():
            raise ValueError("name: holds bytes that are no UTF-8")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: at least 1, not {self.limit}")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight: must be above 0, not {self.weight}")

    @property
    def label(self) -> str:
        """Its name in the dataset."""
        return self.name or source_name(Path(self.path))

    @property
    def key(self) -> tuple[str, bool]:
        """What its prompts are counted by: name, and whether their answers were given."""
        return self.label, self.mode == "prefill"
