"""Makes the clone importable as `draftmill` in its virtual environment; `make install` runs it.

Links the rooms as `.venv/dev/draftmill/ROOM`, puts `.venv/dev` on the path with a .pth file, and
lets setuptools write the package's metadata and console script from setup.cfg. Setuptools' own
editable modes will not do: the strict one misses new files, the default one blinds mypy.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent
ROOMS = ("builder", "manifests", "tools", "trainer")
SCRIPT = """\
#!{python}
import sys

from {module} import {function}

if __name__ == "__main__":  # worker processes import this file again
    sys.exit({function}())
"""


def link_rooms(dev: Path) -> None:
    """Relative links, so that they survive a move of the clone."""
    package = dev / "draftmill"
    package.mkdir(parents=True, exist_ok=True)
    for entry in package.iterdir():
        if entry.name not in ROOMS:
            entry.unlink()
    for room in ROOMS:
        link = package / room
        target = os.path.relpath(CLONE / room, package)
        if not link.is_symlink() or os.readlink(link) != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)


def write_metadata(site_packages: Path) -> str:
    """Writes draftmill-VERSION.dist-info; returns the console script's entry point."""
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(
            [sys.executable, "-c", "import setuptools; setuptools.setup()", "--quiet"]
            + ["egg_info", "--egg-base", temporary, "dist_info", "--output-dir", temporary],
            cwd=CLONE,
            check=True,
        )
        (built,) = Path(temporary).glob("*.dist-info")
        (built / "INSTALLER").write_text("draftmill make install\n")
        for old in site_packages.glob("draftmill-*.dist-info"):
            shutil.rmtree(old)
        shutil.copytree(built, site_packages / built.name)
        for line in (built / "entry_points.txt").read_text().splitlines():
            name, _, entry_point = line.partition("=")
            if name.strip() == "draftmill":
                return entry_point.strip()
    raise SystemExit("setup.cfg names no console script `draftmill`")


def write_script(path: Path, entry_point: str) -> None:
    module, _, function = entry_point.partition(":")
    path.write_text(SCRIPT.format(python=sys.executable, module=module, function=function))
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def main() -> None:
    if sys.prefix == sys.base_prefix:
        raise SystemExit("run this with the Python of the clone's .venv; `make install` does")
    site_packages = Path(sysconfig.get_path("purelib"))
    dev = Path(sys.prefix) / "dev"
    link_rooms(dev)
    (site_packages / "draftmill-dev.pth").write_text(f"{dev}\n")
    entry_point = write_metadata(site_packages)
    write_script(Path(sysconfig.get_path("scripts")) / "draftmill", entry_point)


if __name__ == "__main__":
    main()
