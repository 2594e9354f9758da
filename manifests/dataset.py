"""One dataset folder, opened by its single writer or by readers.

Owns the writer's lock and how a manifest is opened or rebuilt. Writing is left to `writer`, tables
to `manifest`, files of records to `shard`, crashes to `recovery`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from draftmill.manifests import files, fingerprints, lock, prompts
from draftmill.manifests.errors import DatasetError, LockedError
from draftmill.manifests.layout import Layout
from draftmill.manifests.manifest import Manifest, ManifestDamaged
from draftmill.manifests.published import published
from draftmill.manifests.recovery import recover
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.shards.shard import list_shards
from draftmill.manifests.snapshot import load_snapshot
from draftmill.manifests.summary import summarize
from draftmill.manifests.writer import DatasetWriter


class Dataset(Layout):
    """A dataset folder: creates it, and opens it for writing or reading."""

    @classmethod
    def create(cls, path: str | Path, config_text: str) -> Dataset:
        """Make a new dataset folder; refuses one that holds something else."""
        dataset = cls(path)
        dataset._check_name()
        config_text.encode()  # what cannot be written leaves no folder behind
        if dataset.config_path.exists():
            raise DatasetError(f"{path} is a dataset already. Edit {dataset.config_path} instead.")
        if dataset.path.exists() and not dataset.path.is_dir():
            raise DatasetError(f"{path} is a file. Name a new folder.")
        if dataset.path.exists() and any(dataset.path.iterdir()):
            raise DatasetError(f"{path} is not empty. Name a new folder.")
        try:
            for folder in (dataset.prompts_dir, dataset.completions_dir, dataset.hidden_states_dir):
                folder.mkdir(parents=True, exist_ok=True)
            dataset.vocab_dir.mkdir(exist_ok=True)
            files.write_atomic(dataset.config_path, config_text, "config")
        except OSError as error:
            raise DatasetError(f"{path} cannot be created: {error.strerror}") from error
        with dataset.writer():
            pass  # an empty manifest, so that readers find one
        return dataset

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """An existing dataset; raises DatasetError for anything else."""
        dataset = cls(path)
        dataset._check_name()
        if not dataset.config_path.is_file():
            raise dataset._not_open()
        return dataset

    def _check_name(self) -> None:
        try:
            str(self.path).encode()
        except UnicodeEncodeError as error:
            raise DatasetError(
                f"{str(self.path)!r}: the name is not UTF-8, as the database wants it. Rename it."
            ) from error

    def _not_open(self) -> DatasetError:
        if not self.path.is_dir():
            what = "it is a file" if self.path.exists() else "there is no such folder"
            return DatasetError(f"{self.path} is not a dataset: {what}")
        if self.manifest_path.exists() or self.prompt_files():
            return DatasetError(
                f"{self.path}: config.toml is missing. Restore it, or make one for the same model "
                "with `draftmill init OTHER …` and copy OTHER/config.toml here; a run whose "
                "settings differ from the stored ones is refused, so nothing can go wrong."
            )
        return DatasetError(
            f"{self.path} is not a dataset (no config.toml). Create one with `draftmill init`."
        )

    @contextmanager
    def writer(self, **options: Any) -> Iterator[DatasetWriter]:
        """The dataset's only writer; runs recovery first. Options are those of DatasetWriter."""
        refusal = (
            f"{self.path} is being written by process {{owner}}. Wait until it ends, or stop it."
        )
        with lock.held(self.lock_path, refusal):
            manifest, rebuilt = _open_manifest(self)
            try:
                report = recover(self.path, manifest, rebuilt=rebuilt)
                with closing(DatasetWriter(self, manifest, report, **options)) as writer:
                    yield writer
            finally:
                manifest.close()

    @contextmanager
    def reader(self) -> Iterator[DatasetReader]:
        """Read access that works while another process writes."""
        reader = DatasetReader(self)
        try:
            yield reader
        finally:
            reader.close()


def _open_manifest(dataset: Dataset) -> tuple[Manifest, bool]:
    """The manifest, rebuilt when it is missing or damaged; second value: whether it was rebuilt."""
    for folder in (dataset.prompts_dir, dataset.completions_dir, dataset.hidden_states_dir):
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DatasetError(f"{folder} must be a folder: {error.strerror}") from error
    paths = dataset.prompt_files()
    shards = map(list_shards, (dataset.completions_dir, dataset.hidden_states_dir))
    holds_something = bool(paths) or dataset.snapshot_path.exists() or any(shards)
    if dataset.manifest_path.exists() or not holds_something:
        try:
            if holds_something and not dataset.manifest_path.stat().st_size:
                raise ManifestDamaged(f"{dataset.manifest_path} is empty")
            return _own(Manifest(dataset.manifest_path), dataset), False
        except ManifestDamaged:
            stamp = f"damaged-{time.time_ns()}"
            for name in ("manifest.duckdb", "manifest.duckdb.wal"):
                source = dataset.path / name
                if source.exists():
                    files.rename(source, dataset.path / f"{name}.{stamp}", "manifest.quarantine")
    return _rebuild_manifest(dataset), True


def _own(manifest: Manifest, dataset: Dataset) -> Manifest:
    """The manifest, if it is of this dataset's prompts: another's would mix up both."""
    reason = prompts.stranger(manifest, dataset.prompt_files())
    if reason is None:
        return manifest
    manifest.close()
    raise DatasetError(
        f"{manifest.path} is of another dataset: {reason}. Put this dataset's own one back, or "
        f"move it away: `draftmill verify {dataset.path} --repair` then rebuilds it."
    )


def _rebuild_manifest(dataset: Dataset) -> Manifest:
    temporary = dataset.path / ".manifest.rebuild"
    files.unlink(dataset.path / "manifest.duckdb.wal", "manifest.rebuild")
    manifest = _fresh(temporary)
    if dataset.snapshot_path.exists():
        try:
            load_snapshot(manifest, dataset.snapshot_path)
            _own(manifest, dataset)
        except DatasetError:
            # A damaged snapshot costs history, not completions: those are in the shards.
            aside = dataset.path / f"manifest.parquet.damaged-{time.time_ns()}"
            files.rename(dataset.snapshot_path, aside, "manifest.quarantine")
            manifest.close()
            manifest = _fresh(temporary)
    manifest.close()
    files.publish(temporary, dataset.manifest_path, "manifest.rebuild")
    return Manifest(dataset.manifest_path)


def _fresh(path: Path) -> Manifest:
    for each in (path, path.with_name(f"{path.name}.wal")):
        files.unlink(each, "manifest.rebuild")
    return Manifest(path)


class DatasetReader:
    """Read access to a dataset: the database itself, or its snapshot while a writer holds it."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.writer_pid: int | None = None
        if not dataset.manifest_path.exists():
            raise DatasetError(
                f"{dataset.path} has no manifest. `draftmill verify {dataset.path} --repair` "
                "rebuilds it from prompts and shards; a new dataset gets one with `draftmill add`."
            )
        try:
            self.manifest = Manifest(dataset.manifest_path, read_only=True)
        except LockedError as error:
            self.writer_pid = error.pid
            if not dataset.snapshot_path.exists():
                raise
            self.manifest = Manifest(None)
            load_snapshot(self.manifest, dataset.snapshot_path)
        self.shards = ShardReader(dataset.path)

    def close(self) -> None:
        """Close the database and shard files."""
        self.shards.close()
        self.manifest.close()

    def summary(
        self, *, budget_bytes: int | None = None, staging: Path | None = None
    ) -> dict[str, Any]:
        """The document of `status --json`: the writer's own while one runs, else measured now."""
        if self.writer_pid is not None and (found := published(self.dataset)) is not None:
            return found
        return summarize(
            self.dataset.path, self.manifest, budget_bytes=budget_bytes, staging=staging
        )

    def sql(self, query: str) -> pa.Table:
        """The result of a query over the manifest's tables."""
        return self.manifest.user_query(query)

    def meta(self, key: str) -> str | None:
        """A value of the manifest's table `meta`, None when it has none."""
        return self.manifest.meta(key)

    def settings_of(self, stage: str) -> dict[str, Any]:
        """The settings that the dataset's samples of a stage were made with; {} before any."""
        return fingerprints.stored(self.manifest, stage)

    def extracted(self) -> pa.Table:
        """Every sample that can be trained on, in id order, with where its records lie."""
        return self.manifest.table(
            "SELECT id, hash, source, conversation, off_policy, prompt_tokens, completion_tokens, "
            "tokens, digest, finish_reason, generate_shard, generate_offset, generate_length, "
            "extract_shard, extract_offset, extract_length "
            "FROM samples WHERE state = 'extracted' ORDER BY id"
        )

    def trainable(self) -> pa.Table:
        """What a training plan is made of: `extracted` without what only people read.

        In about half the time, which counts when a million samples are planned.
        """
        return self.manifest.table(
            "SELECT id, conversation, prompt_tokens, tokens, digest, "
            "generate_shard, generate_offset, generate_length, "
            "extract_shard, extract_offset, extract_length "
            "FROM samples WHERE state = 'extracted' ORDER BY id"
        )
