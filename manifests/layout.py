"""Where things lie in a dataset folder. Opens nothing."""

from __future__ import annotations

from pathlib import Path

from draftmill.manifests import files


class Layout:
    """Paths of a dataset folder; the meaning of each is specified in docs/format.md."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.toml"
        self.prompts_dir = self.path / "prompts"
        self.completions_dir = self.path / "completions"
        self.hidden_states_dir = self.path / "hidden_states"
        self.vocab_dir = self.path / "vocab"
        self.manifest_path = self.path / "manifest.duckdb"
        self.snapshot_path = self.path / "manifest.parquet"
        self.status_path = self.path / "status.json"
        self.lock_path = self.path / ".lock"

    def prompt_files(self) -> dict[int, Path]:
        """The prompt files that are there, by number."""
        return files.numbered(self.prompts_dir, ".parquet")

    def prompt_file(self, number: int) -> Path:
        """The prompt file `number`."""
        return self.prompts_dir / f"{number:06d}.parquet"
