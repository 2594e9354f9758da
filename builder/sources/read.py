"""Prompt sources: which files a path stands for, and their rows as prompts or as errors.

Reads JSONL (plain, .gz, .zst), Parquet, and Hugging Face datasets on disk, in constant memory.
What a row means and how a prompt is identified is left to `conversations`.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import pyarrow as pa

from draftmill.builder.sources import tables
from draftmill.builder.sources.conversations import (
    FORMATS,
    MODES,
    TURNS,
    BadRow,
    Format,
    Mode,
    Turns,
    prompts_of,
)
from draftmill.manifests.errors import SourceFileError, UsageError, why
from draftmill.manifests.types import Prompt

# A line longer than this is an error, not a reason to fill the memory.
MAX_LINE_BYTES = 64 << 20

Kind = Literal["jsonl", "parquet", "arrow"]
_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_PACKED = (".gz", ".zst")
_READABLE = ".jsonl (also .gz, .zst), .parquet or a Hugging Face dataset folder"
_SHARD = re.compile(r"(?:^|-)\d{5}-of-\d{5}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceError:
    """One line (or row, from 1) of a source file that gives no prompt, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def read_source(
    path: Path | str,
    *,
    format: Format = "auto",
    name: str | None = None,
    turns: Turns = "last",
    mode: Mode = "regenerate",
) -> Iterator[Prompt | SourceError]:
    """The prompts of one source in order, with an error in the place of each row that gives none.

    `name` is the source's name in the dataset (default: from the path). Raises SourceFileError at
    once when the source as a whole cannot be read.
    """
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}: use one of {', '.join(MODES)}.")
    if format not in FORMATS:
        raise UsageError(f"unknown format {format!r}: use one of {', '.join(FORMATS)}.")
    if turns not in TURNS:
        raise UsageError(f"unknown turns {turns!r}: use one of {', '.join(TURNS)}.")
    files = _find_files(Path(path))
    for file, kind in files:
        _check_file(file, kind)
    source = name or source_name(Path(path))
    return _prompts(files, source, format, turns, mode)


def source_name(path: Path) -> str:
    """What a source is called if nobody says: its file or folder name without suffixes."""
    # a name of bytes that are no UTF-8 cannot be stored as it is
    stem = path.resolve().name.encode(errors="replace").decode()
    for suffix in (*_PACKED, *_SUFFIXES):
        stem = stem.removesuffix(suffix)
    return _SHARD.sub("", stem) or stem


def _prompts(
    files: list[tuple[Path, Kind]], source: str, format: Format, turns: Turns, mode: Mode
) -> Iterator[Prompt | SourceError]:
    before = 0
    for path, kind in files:
        file, line = str(path), 0
        for line, row in _jsonl_rows(path) if kind == "jsonl" else _table_rows(path, kind):
            if isinstance(row, SourceError):
                yield row
                continue
            try:
                number = before + line
                yield from prompts_of(
                    row, source=source, number=number, format=format, turns=turns, mode=mode
                )
            except BadRow as error:
                yield SourceError(file=file, line=line, reason=str(error))
        before += line


def _jsonl_rows(path: Path) -> Iterator[tuple[int, object]]:
    """(line number, parsed line or SourceError); blank lines are passed over."""
    file, number = str(path), 0
    with _open_text(path) as stream:
        while True:
            try:
                raw = stream.readline(MAX_LINE_BYTES + 1)
                number += 1
                torn = not raw.endswith(b"\n")
                if torn and len(raw) > MAX_LINE_BYTES:
                    _skip_line(stream)
                    reason = f"longer than {MAX_LINE_BYTES >> 20} MiB"
                    yield number, SourceError(file=file, line=number, reason=reason)
                    continue
            except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
                reason = f"the file cannot be read beyond this line ({why(error)})"
                yield number, SourceError(file=file, line=number, reason=reason)
                return
            if not raw:
                return
            if raw.isspace():
                continue
            parsed = _parse_line(raw, file, number, torn)
            yield number, parsed


def _parse_line(raw: bytes, file: str, number: int, torn: bool) -> object:
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        return json.loads(text)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start + 1} of the line)"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = f"not JSON ({error})"
    if torn:
        reason = f"incomplete last line, {reason}"
    return SourceError(file=file, line=number, reason=reason)


def _skip_line(stream: BinaryIO) -> None:
    while True:
        rest = stream.readline(1 << 20)
        if not rest or rest.endswith(b"\n"):
            return


def _table_rows(path: Path, kind: Kind) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        for row in tables.table_rows(path, kind):
            number += 1
            if isinstance(row, BadRow):
                yield number, SourceError(file=str(path), line=number, reason=str(row))
            else:
                yield number, row
    except (OSError, pa.ArrowException) as error:
        number += 1
        reason = f"the file cannot be read beyond this row ({why(error)})"
        yield number, SourceError(file=str(path), line=number, reason=reason)


def _open_text(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.name.endswith(".zst"):
        stream = pa.input_stream(str(path), compression="zstd")
        return cast(BinaryIO, io.BufferedReader(stream, 1 << 18))
    return open(path, "rb", buffering=1 << 18)


def _check_file(path: Path, kind: Kind) -> None:
    """Raises SourceFileError when no row of this file could be read."""
    if kind != "jsonl":
        tables.check_table(path, kind)
        return
    try:
        with _open_text(path) as stream:
            head = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise SourceFileError(f"{path}: cannot be read ({why(error)}).") from error
    if head.startswith(b"["):
        raise SourceFileError(
            f"{path}: one JSON array, not one object per line. Convert it with "
            f"`jq -c '.[]' {path.name} > {path.stem}-lines.jsonl`."
        )


def _find_files(path: Path) -> list[tuple[Path, Kind]]:
    """The files that a source path stands for, in reading order."""
    if path.is_dir():
        return _folder_files(path)
    if not path.exists():
        raise SourceFileError(f"{path}: no such file or folder.")
    kind = _kind(path) or _sniffed_kind(path)
    if kind is None:
        raise SourceFileError(f"{path}: unknown format; {_READABLE} can be read.")
    return [(path, kind)]


def _kind(path: Path) -> Kind | None:
    name = path.name
    for packed in _PACKED:
        if name.endswith(packed):
            return "jsonl" if _kind(Path(name.removesuffix(packed))) == "jsonl" else None
    return _SUFFIXES.get(path.suffix)


def _sniffed_kind(path: Path) -> Kind | None:
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise SourceFileError(f"{path}: cannot be read ({error.strerror}).") from error
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"[")):
        return "jsonl"
    return None


def _folder_files(folder: Path) -> list[tuple[Path, Kind]]:
    splits = _json(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        if len(splits) != 1:
            listing = ", ".join(map(str, splits))
            raise SourceFileError(f"{folder}: has splits {listing}; give one, as {folder}/NAME.")
        inner = Path(str(splits[0])).name
        if inner in ("", ".."):
            raise SourceFileError(f"{folder}/dataset_dict.json: {splits[0]!r} is no split.")
        return _folder_files(folder / inner)
    listed = _json(folder / "state.json").get("_data_files")
    if isinstance(listed, list):
        files = [item.get("filename") if isinstance(item, dict) else None for item in listed]
        return [(folder / Path(str(file)).name, "arrow") for file in files]
    found = [
        (file, kind)
        for inner in (folder, folder / "data")
        for file in (sorted(inner.iterdir()) if inner.is_dir() else ())
        if (kind := _kind(file)) and not file.name.startswith(".") and file.is_file()
    ]
    if not found:
        raise SourceFileError(f"{folder}: nothing to read in it; {_READABLE} can be read.")
    kinds = sorted({kind for _, kind in found})
    if len(kinds) > 1:
        raise SourceFileError(
            f"{folder}: holds {' and '.join(kinds)} files; give the files to read one by one."
        )
    names = sorted(
        {_SHARD.sub("", file.stem) for file, _ in found if _SHARD.search(file.stem)} - {""}
    )
    if len(names) > 1:
        raise SourceFileError(
            f"{folder}: has splits {', '.join(names)}; give the files of one, "
            f"as {found[0][0].parent}/{names[0]}-*."
        )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceFileError(f"{path}: cannot be read ({why(error)}).") from error
    return value if isinstance(value, dict) else {}
