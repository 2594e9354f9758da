"""The demo's prompts: questions about Python's standard library, with its docstrings as answers."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path

# Modules that import quickly everywhere and document what they export.
_MODULES = (
    "abc",
    "argparse",
    "array",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fileinput",
    "fnmatch",
    "fractions",
    "functools",
    "glob",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "html",
    "inspect",
    "io",
    "itertools",
    "json",
    "keyword",
    "linecache",
    "locale",
    "logging",
    "math",
    "mimetypes",
    "operator",
    "os.path",
    "pathlib",
    "pickle",
    "pprint",
    "queue",
    "random",
    "re",
    "sched",
    "secrets",
    "shelve",
    "shlex",
    "shutil",
    "signal",
    "smtplib",
    "socket",
    "sqlite3",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "timeit",
    "token",
    "tokenize",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "urllib.parse",
    "uuid",
    "warnings",
    "weakref",
    "xml.etree.ElementTree",
    "zipfile",
    "zlib",
)
_FORMS = (
    "What does Python's `{name}` do?",
    "Explain `{name}` from Python's standard library with a short example.",
    "When would I use `{name}` in Python?",
    "How do I use Python's `{name}`?",
)
SOURCE = "python-docs"


def _documented() -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of every public function and class, in a fixed order."""
    for module_name in _MODULES:
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None) or [n for n in dir(module) if n[0] != "_"]
        for name in sorted(public):
            found = getattr(module, name, None)
            own = getattr(found, "__module__", None) or ""
            if not (inspect.isroutine(found) or inspect.isclass(found)):
                continue
            text = inspect.getdoc(found)
            if text and len(text) >= 40 and (not own or own.strip("_").startswith(module_name[:4])):
                yield f"{module_name}.{name}", text


def write_questions(folder: Path, count: int) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl` (every tenth) of `count` questions in all.

    The same questions on every machine with the same Python version.
    """
    entries = list(_documented())
    random.Random(0).shuffle(entries)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    rows: dict[Path, list[str]] = {train: [], held_out: []}
    for number, (name, text) in enumerate(entries[:count]):
        form = _FORMS[int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(_FORMS)]
        row = {
            "messages": [
                {"role": "user", "content": form.format(name=name)},
                {"role": "assistant", "content": text},
            ]
        }
        rows[held_out if number % 10 == 9 else train].append(json.dumps(row))
    folder.mkdir(parents=True, exist_ok=True)
    for path, lines in rows.items():
        path.write_text("\n".join(lines) + "\n")
    return train, held_out
