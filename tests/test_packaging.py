"""Packaging: all folders are listed, a wheel keeps to its namespace, imports name it in full."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.sources import CLONE, ROOMS, all_files, imports, room_files

LOCK = CLONE / "requirements/cpu.lock"
BENCH_LOCK = CLONE / "requirements/bench.lock"
# Loads with a GPU stack instead of the CPU's, so it has no pin.
UNPINNED = {"vllm"}
# What is imported only in the environment of the bench's lock, and the distributions' names.
PEERS = {"streaming": "mosaicml-streaming", "zipnn": "zipnn"}
PEERS_FILE = "tools/bench/peers.py"


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(CLONE / "setup.cfg", encoding="utf-8")
    return parser


def requirements(text: str) -> list[Requirement]:
    lines = (line.strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def declared() -> list[Requirement]:
    """The base requirements and those of all extras."""
    config = setup_cfg()
    extras = config["options.extras_require"].values()
    return requirements("\n".join([config["options"]["install_requires"], *extras]))


def pins(lock: Path = LOCK) -> dict[str, Version]:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    return {
        canonicalize_name(name): Version(version)
        for name, _, version in (line.partition("==") for line in lines)
    }


def test_every_package_folder_is_listed() -> None:
    options = setup_cfg()["options"]
    listed = set(options["packages"].split())
    mapped = {
        name.strip(): folder.strip()
        for name, _, folder in (line.partition("=") for line in options["package_dir"].split("\n"))
        if name.strip()
    }
    folders = {str(path.parent) for path in room_files()}
    assert listed == {f"draftmill.{folder.replace('/', '.')}" for folder in folders}
    assert mapped == {f"draftmill.{room}": room for room in ROOMS}


def test_what_is_imported_is_declared() -> None:
    names = {canonicalize_name(requirement.name) for requirement in declared()}
    distributions = packages_distributions()
    undeclared = {
        (str(path), root)
        for path in room_files()
        for root in {name.partition(".")[0] for name in imports(path)}
        if root not in sys.stdlib_module_names
        and root != "draftmill"
        and not names & {canonicalize_name(name) for name in distributions.get(root, [root])}
    }
    assert undeclared == {(PEERS_FILE, root) for root in PEERS}


def test_the_peers_are_pinned_in_the_lock_of_the_bench_only() -> None:
    assert set(PEERS.values()) <= set(pins(BENCH_LOCK))
    assert not set(PEERS.values()) & set(pins())
    assert pins(BENCH_LOCK)["torch"] == pins()["torch"], "it would be downloaded again"


@pytest.mark.parametrize("lock", [LOCK, BENCH_LOCK], ids=lambda lock: lock.name)
def test_the_locks_pin_names_and_versions_only(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    odd = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)]
    assert odd == []


def test_the_lock_satisfies_the_declared_ranges() -> None:
    pinned = pins()
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        if name not in UNPINNED:
            assert pinned[name] in requirement.specifier, requirement


def test_the_lock_leaves_out_what_breaks_transformers() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(pins())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that nothing of the build stays in the clone."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(CLONE / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (CLONE / name).exists():
            shutil.copy(CLONE / name, source)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(output)], cwd=source, check=True, capture_output=True
    )
    (built,) = output.glob("*.whl")
    return built


def test_a_wheel_puts_only_draftmill_into_site_packages(wheel: Path) -> None:
    version = setup_cfg()["metadata"]["version"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "draftmill",
        f"draftmill-{version}.dist-info",
    }
    sources = {f"draftmill/{path}" for path in room_files()}
    assert {name for name in names if name.endswith(".py")} == sources
    assert {f"draftmill/{room}/py.typed" for room in ROOMS} <= set(names)


def test_an_installed_wheel_works_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import importlib.metadata, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import draftmill.manifests.errors as module\n"
        "print(importlib.metadata.version('draftmill'), module.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    version = setup_cfg()["metadata"]["version"]
    assert done.stdout.split() == [version, str(tmp_path / "draftmill/manifests/errors.py")]


def test_no_file_imports_a_room_by_its_bare_name() -> None:
    bare = {
        (str(path), name)
        for path in all_files()
        for name in imports(path)
        if name.partition(".")[0] in ROOMS
    }
    assert bare == set()


@pytest.mark.parametrize("where", ["clone", "elsewhere"])
def test_bare_room_names_do_not_import(where: str, tmp_path: Path) -> None:
    script = "import importlib.util as u, sys; print([r for r in sys.argv[1:] if u.find_spec(r)])"
    # -P: without it Python itself puts the current folder, and with it the rooms, on the path.
    safe_path = ["-P"] if where == "clone" else []
    done = subprocess.run(
        [sys.executable, *safe_path, "-c", script, *ROOMS],
        capture_output=True,
        text=True,
        check=True,
        cwd=CLONE if where == "clone" else tmp_path,
    )
    assert done.stdout.strip() == "[]"


def test_the_development_links_lead_to_the_rooms() -> None:
    package = Path(sys.prefix) / "dev" / "draftmill"
    if not package.exists():
        pytest.skip("draftmill is installed from a wheel here")
    assert {entry.name: entry.resolve() for entry in package.iterdir()} == {
        room: CLONE / room for room in ROOMS
    }
