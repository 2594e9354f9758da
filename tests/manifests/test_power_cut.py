"""A power cut after every file operation, with unsynced bytes and names dropped, kept or torn.

One job runs and logs its operations. Every prefix of the log is then turned into the folder that a
disk could hold after a cut at that moment, and recovery has to keep its promises in each.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from draftmill.manifests import files
from tests.manifests import workload


@dataclass
class Inode:
    durable: bytes = b""
    volatile: bytearray = field(default_factory=bytearray)


@dataclass
class Step:
    kind: str
    path: Path
    details: dict[str, Any]
    journal: int  # journal lines written before this operation


class Disk:
    """Replays logged operations as a file system that keeps only what was synced."""

    def __init__(self) -> None:
        self.names: dict[Path, Inode] = {}
        self.durable_names: dict[Path, Inode] = {}
        self.manifest: dict[str, bytes] = {}

    def apply(self, step: Step) -> None:
        details = step.details
        if step.kind == "create":
            self.names[step.path] = Inode()
        elif step.kind == "write":
            data = self.names[step.path].volatile
            end = details["offset"] + len(details["data"])
            data.extend(b"\0" * (end - len(data)))
            data[details["offset"] : end] = details["data"]
        elif step.kind == "truncate":
            del self.names[step.path].volatile[details["size"] :]
        elif step.kind == "sync":
            inode = self.names.setdefault(step.path, Inode())
            if "content" in details:  # written by a library, published by us
                inode.volatile = bytearray(details["content"])
            inode.durable = bytes(inode.volatile)
        elif step.kind == "rename":
            if step.path in self.names:
                self.names[details["target"]] = self.names.pop(step.path)
        elif step.kind == "unlink":
            self.names.pop(step.path, None)
        elif step.kind == "syncdir":
            for names in (self.durable_names, self.names):
                for path in list(names):
                    if path.parent == step.path:
                        if path in self.names:
                            self.durable_names[path] = self.names[path]
                        else:
                            self.durable_names.pop(path, None)
        elif step.kind == "commit":
            self.manifest = details["database"]

    def write_to(self, root: Path, origin: Path, unsynced: str) -> None:
        """The folder after a cut now; `unsynced` bytes and names: dropped, kept or torn."""
        names = self.names if unsynced == "kept" else self.durable_names
        for folder in ("prompts", "completions", "hidden_states"):
            (root / folder).mkdir(parents=True)
        (root / "config.toml").write_text("")
        for path, inode in names.items():
            if unsynced == "kept":
                content = bytes(inode.volatile)
            else:
                content = inode.durable
                extra = bytes(inode.volatile[len(content) :])
                if unsynced == "torn":
                    content += extra[: len(extra) // 2]
            (root / path.relative_to(origin)).write_bytes(content)
        for name, content in self.manifest.items():
            (root / name).write_bytes(content)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step], list[str]]:
    folder = tmp_path_factory.mktemp("job") / "dataset"
    journal_path = Path(f"{folder}.journal")
    steps: list[Step] = []
    created: set[Path] = set()

    def observe(kind: str, path: Path, details: dict[str, Any]) -> None:
        kept = {k: bytes(v) if k == "data" else v for k, v in details.items()}
        if kind == "create":
            created.add(path)
        if kind == "sync" and path not in created:
            kept["content"] = path.read_bytes()
        if kind == "commit":
            kept["database"] = {p.name: p.read_bytes() for p in folder.glob("manifest.duckdb*")}
        lines = journal_path.read_text().count("\n") if journal_path.exists() else 0
        steps.append(Step(kind, path, kept, lines))

    files.observer = observe
    try:
        workload.run(folder, workload.Journal(journal_path))
    finally:
        files.observer = None
    return folder, steps, journal_path.read_text().splitlines()


@pytest.mark.parametrize(
    ("unsynced", "every"),
    [
        ("torn", 40),
        pytest.param("dropped", 1, marks=pytest.mark.slow),
        pytest.param("kept", 1, marks=pytest.mark.slow),
        pytest.param("torn", 1, marks=pytest.mark.slow),
    ],
)
def test_every_prefix_recovers(
    log: tuple[Path, list[Step], list[str]], tmp_path: Path, unsynced: str, every: int
) -> None:
    origin, steps, journal = log
    disk = Disk()
    seen: set[tuple[Any, ...]] = set()
    for number, step in enumerate(steps):
        disk.apply(step)
        if number % every:
            continue
        root = tmp_path / str(number)
        disk.write_to(root, origin, unsynced)
        state = tuple(
            (p.relative_to(root), hash(p.read_bytes())) for p in sorted(root.rglob("*.*"))
        )
        if hash(state) in seen:  # nothing that survives has changed
            shutil.rmtree(root)
            continue
        seen.add(hash(state))
        acknowledged = journal[: step.journal]
        with workload.Dataset(root).writer(**workload.SIZES) as writer:
            assert not writer.recovery.damaged, f"step {number} {step.kind} {step.path.name}"
        if disk.manifest:
            workload.check(root, acknowledged, complete=False)
        on_disk = workload.records_on_disk(root)
        assert len(on_disk) == len(set(on_disk))
        shutil.rmtree(root)
