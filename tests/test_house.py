"""The house rules that no linter knows: one door per library, light start, small files."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.sources import CLONE, imports, room_files

# draftmill's own, and the bare one that `bench generate` measures beside it.
CLIENTS = ("builder/requests/client.py", "tools/bench/bare_client.py")
# Who may import a library. Everybody else goes through what that module offers.
DOORS: dict[str, str | tuple[str, ...]] = {
    "click": "tools/*",
    "duckdb": "manifests/manifest.py",
    "httpx2": CLIENTS,  # openai's transport
    "matplotlib": ("tools/report/plots.py", "trainer/plots.py"),
    "openai": CLIENTS,
    "hs_connectors": "trainer/speculators_store.py",
    "speculators": ("trainer/drafts/model.py", "trainer/speculators_store.py"),
    "tenacity": "builder/requests/retry_policy.py",
    "vllm": "builder/serving/connector.py",
    "zstandard": "manifests/codec/frames.py",
}
# It runs inside the server's environment, where draftmill is not installed.
CONNECTOR = Path("builder/serving/connector.py")
MAX_LINES = 350

HEAVY = ("torch", "transformers", "speculators", "vllm", "matplotlib")
LIGHT_START = f"""
import sys
from draftmill.tools.cli import main

code = None
try:
    code = main()
except SystemExit as stop:
    code = stop.code
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else code)
"""


@pytest.mark.parametrize("library", DOORS)
def test_one_door_per_library(library: str) -> None:
    doors = DOORS[library]
    patterns = (doors,) if isinstance(doors, str) else doors
    outside = [
        str(path)
        for path in room_files()
        if not any(fnmatch.fnmatch(str(path), pattern) for pattern in patterns)
        and any(name.partition(".")[0] == library for name in imports(path))
    ]
    assert outside == [], f"{library} is imported only in {doors}"


def test_what_is_said_goes_through_one_door() -> None:
    """There, what others wrote loses its power over the terminal."""
    door = "tools/terminal.py"
    for path in map(str, room_files()):
        text = (CLONE / path).read_text()
        assert path == door or "click.echo" not in text, f"{path}: echo of {door}"
        assert path == "tools/render.py" or " Console(" not in text, f"{path}: console of render"


def test_the_connector_stands_alone() -> None:
    roots = {name.partition(".")[0] for name in imports(CONNECTOR)}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "vllm"}


def test_no_file_holds_two_ideas() -> None:
    lines = {str(path): len((CLONE / path).read_bytes().splitlines()) for path in room_files()}
    long = [f"{path}: {count} lines" for path, count in lines.items() if count > MAX_LINES]
    assert not long, "\n".join(long)


def run_light(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as a process of its own and fails where it imports what is heavy."""
    return subprocess.run(
        [sys.executable, "-P", "-c", LIGHT_START, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_imports_nothing_heavy() -> None:
    done = run_light("--help")
    assert done.returncode == 0, done.stderr
    assert "status" in done.stdout


def test_version_says_the_package_version() -> None:
    done = run_light("--version")
    assert done.returncode == 0, done.stderr
    assert version("draftmill") in done.stdout


def test_status_imports_nothing_heavy(tmp_path: Path) -> None:
    dataset, prompts = tmp_path / "dataset", tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "What is a shard?"}]}\n')
    sizes = ["--hidden-size", "64", "--layers", "4", "--vocab-size", "256"]
    for command in (
        ["init", str(dataset), "--target", "some/model", *sizes],
        ["add", str(dataset), str(prompts)],
        ["status", str(dataset), "--json"],
    ):
        done = run_light(*command)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompts"]["total"] == 1
