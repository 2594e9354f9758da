"""The project's own source files and what they import, for the tests that read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent
ROOMS = ("builder", "manifests", "tools", "trainer")


def room_files() -> list[Path]:
    """Every Python file of the four packages, relative to the clone."""
    return sorted(
        path.relative_to(CLONE) for room in ROOMS for path in (CLONE / room).rglob("*.py")
    )


def all_files() -> list[Path]:
    """The rooms, the tests, and the scripts beside them."""
    beside = [
        path for folder in ("tests", "requirements") for path in (CLONE / folder).rglob("*.py")
    ]
    return room_files() + sorted(path.relative_to(CLONE) for path in beside)


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of all modules that a file imports, wherever in the file."""
    return tuple(_imports(ast.parse((CLONE / path).read_text(encoding="utf-8"), str(path))))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module
