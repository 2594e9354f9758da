"""Questions with answers that people wrote: the docstrings of installed packages.

Owns which docstrings are taken and how they are asked for. They are read from source files as text:
no package is imported, and nothing of them is kept in this repository. Same versions, same pairs.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from draftmill.manifests import files
from draftmill.manifests.errors import UsageError

# Packages that come with torch and transformers anyway, and say much about themselves.
PACKAGES = ("numpy", "torch", "transformers", "sympy", "networkx")
PYTHON = "python"
SOURCE = "docstrings"

# Characters: about 60 to 500 tokens.
_SHORTEST, _LONGEST = 240, 2000
# Classes of one family share the beginnings of their docstrings.
_ALIKE = 120
_MAX_SIGNATURE = 80
_NO_DOCS = frozenset(
    ("test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "_vendor", "vendor")
)
# Filled in when the module is imported: what stands in the source is not what people read.
_TEMPLATE = re.compile(r"\{\w+\}|%\(\w+\)s|%s")
# A lone list of parameters answers no question.
_SENTENCE = re.compile(r"[A-Z]\w*[ ,][^\n]{12,}")
_FORMS = (
    "What does `{call}` from the {package} do?",
    "Explain what `{call}` in the {package} does and how it is used.",
    "How do I use `{call}` from the {package}?",
    "Describe `{call}` from the {package}: what it takes and what it gives back.",
)
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One question and its answer; `file` is the source file, relative to its package's parent."""

    package: str
    file: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where answers came from, and under which licence, as the package itself says."""

    package: str
    version: str
    licence: str
    pairs: int


def collect(roots: dict[str, Path]) -> Iterator[Pair]:
    """All pairs of the packages whose folders are `roots`, file by file.

    Files come in the order of a hash of their names, so every package has its share in any part of
    the pairs. A question that was there before is left out, and an answer that begins like one.
    """
    found = (
        (hashlib.sha256(name.encode()).digest(), package, name, path)
        for package, root in roots.items()
        for path in root.rglob("*.py")
        if not _NO_DOCS & set(path.relative_to(root).parts)
        for name in (f"{package}/{path.relative_to(root).as_posix()}",)
    )
    seen: set[str] = set()
    for _, package, name, path in sorted(found):
        for pair in _pairs_of(package, name, path):
            keys = {pair.question, pair.answer[:_ALIKE]}
            if not seen & keys:
                seen |= keys
                yield pair


def write_pairs(
    folder: Path, *, train: int, held_out: int, packages: Sequence[str] = PACKAGES
) -> list[Origin]:
    """Write `held_out.jsonl`, `train.jsonl` and `origins.json`; the same for the same versions.

    The held-out pairs come first and from files of their own. Raises UsageError where the packages
    have too few docstrings.
    """
    roots = package_folders(packages)
    pairs = collect(roots)
    kept = list(itertools.islice(pairs, held_out))
    last = kept[-1].file if kept else None
    rest = itertools.dropwhile(lambda pair: pair.file == last, pairs)
    trained = list(itertools.islice(rest, train))
    if len(trained) < train:
        raise UsageError(
            f"{', '.join(roots)} have {len(trained):,} docstrings to train on where {train:,} are "
            f"wanted: lower --prompts, or install packages with more of them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    counts = Counter(pair.package for pair in (*kept, *trained))
    origins = [_origin(package, counts[package]) for package in roots]
    # What says that all is there is written last.
    for name, part in (("held_out", kept), ("train", trained)):
        text = "".join(f"{json.dumps(_row(pair))}\n" for pair in part)
        files.write_atomic(folder / f"{name}.jsonl", text, "pairs")
    text = json.dumps([asdict(origin) for origin in origins], indent=1)
    files.write_atomic(folder / "origins.json", text, "pairs")
    return origins


def read_origins(folder: Path) -> list[Origin]:
    """What `write_pairs` said about a folder; empty where it has not been there."""
    path = folder / "origins.json"
    if not path.exists():
        return []
    return [Origin(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def package_folders(packages: Sequence[str] = PACKAGES) -> dict[str, Path]:
    """Folders of Python's library and of those packages that are installed, by name."""
    folders = {PYTHON: Path(sysconfig.get_paths()["stdlib"])}
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders[name] = Path(next(iter(spec.submodule_search_locations)))
    return folders


def _row(pair: Pair) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": pair.question},
            {"role": "assistant", "content": pair.answer},
        ]
    }


def _pairs_of(package: str, name: str, path: Path) -> Iterator[Pair]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's strings
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node, qualified in _public(tree.body, ""):
        text = (ast.get_docstring(node) or "").strip()
        if not _SHORTEST <= len(text) <= _LONGEST or _TEMPLATE.search(text):
            continue
        if _SENTENCE.match(text):
            yield Pair(
                package=package,
                file=name,
                question=_question(package, qualified, node),
                answer=text,
            )


def _public(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[Documented, str]]:
    for node in body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield node, prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{prefix}{node.name}.")


def _question(package: str, qualified: str, node: Documented) -> str:
    call = qualified
    if not isinstance(node, ast.ClassDef):
        arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        if "." in qualified and arguments[:1] in (["self"], ["cls"]):
            arguments = arguments[1:]
        signature = f"{qualified}({', '.join(arguments)})"
        call = signature if len(signature) <= _MAX_SIGNATURE else f"{qualified}(…)"
    form = _FORMS[hashlib.sha256(qualified.encode()).digest()[0] % len(_FORMS)]
    about = "Python standard library" if package == PYTHON else f"Python package {package}"
    return form.format(call=call, package=about)


def _origin(package: str, pairs: int) -> Origin:
    if package == PYTHON:
        version, licence = platform.python_version(), "PSF-2.0"
    else:
        about = importlib.metadata.metadata(package)
        version = str(about["Version"])
        classifiers = [
            line.rpartition("::")[2].strip()
            for line in about.get_all("Classifier") or []
            if line.startswith("License ::")
        ]
        # Older packages put the whole text of the licence into one of these.
        stated = [about.get("License-Expression"), *classifiers, about.get("License")]
        lines = [line.strip().splitlines()[0] for line in stated if line and line.strip()]
        licence = lines[0] if lines else "not stated"
    return Origin(package=package, version=version, licence=licence, pairs=pairs)
