"""Reads and writes `config.toml`: one section per settings dataclass, errors with key and line.

A settings dataclass is frozen and keyword-only; `field(metadata={"help": ...})` becomes the comment
in the file, and `__post_init__` raises ValueError("key: what is wrong"). Which sections there are
is decided by whoever reads.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill.manifests.errors import ConfigError


def setting(default: Any, text: str, **more: Any) -> Any:
    """A field of a settings dataclass; `text` is its comment in the file and in the reference."""
    return dataclasses.field(default=default, metadata={"help": text, **more})


def render(sections: Mapping[str, Any], lists: Mapping[str, type] | None = None) -> str:
    """The text of a config file with these settings; every key has its explanation above it.

    `lists` are sections that may come several times, as [[name]]; they are shown commented out.
    """
    lines = ["# Settings of this dataset. docs/reference.md lists all keys.", ""]
    for name, settings in sections.items():
        lines.append(f"[{name}]")
        for item in dataclasses.fields(settings):
            value = getattr(settings, item.name)
            lines.extend(f"# {line}" for line in str(item.metadata["help"]).splitlines())
            if value is None:
                lines.append(f"# {item.name} =")
            else:
                lines.append(f"{item.name} = {_toml(value)}")
        lines.append("")
    for name, cls in (lists or {}).items():
        lines += [
            f"# One or more sections [[{name}]], without the first # of each line:",
            f"# [[{name}]]",
        ]
        for item in dataclasses.fields(cls):
            lines.extend(f"# # {line}" for line in str(item.metadata["help"]).splitlines())
            value = item.default
            if item.default_factory is not dataclasses.MISSING:
                value = item.default_factory()
            lines.append(
                f"# # {item.name} =" if value is None else f"# {item.name} = {_toml(value)}"
            )
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items())
        return "{ " + ", ".join(pairs) + " }" if value else "{}"
    raise TypeError(f"{type(value).__name__} has no TOML form")


def read(
    path: Path, sections: Mapping[str, type], lists: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Settings of every section, a tuple for those of `lists`; missing keys keep their defaults.

    Raises ConfigError with file, line and key for whatever is unknown, of another type or out of
    range.
    """
    text = _text(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    known = {**sections, **(lists or {})}
    for name, content in document.items():
        if name not in known:
            kind = "section" if isinstance(content, dict) else "key"
            raise ConfigError(
                f"{_where(path, text, None, name)}: unknown {kind} {name!r}"
                + _suggestion(name, known)
            )
    found = {
        name: _build(path, text, name, cls, document.get(name, {}))
        for name, cls in sections.items()
    }
    for name, cls in (lists or {}).items():
        entries = document.get(name, [])
        if not isinstance(entries, list):
            where = _where(path, text, None, name)
            raise ConfigError(f"{where}: {name} must be a list of sections: [[{name}]]")
        found[name] = tuple(
            _build(path, text, name, cls, entry, number) for number, entry in enumerate(entries)
        )
    return found


def where(path: Path, section: str, key: str, entry: int | None = None) -> str:
    """`FILE line N` of a key; `entry` is the number, from 0, of a section that comes often."""
    return _where(path, _text(path), section, key, entry)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _build(
    path: Path, text: str, section: str, cls: type, content: Any, entry: int | None = None
) -> Any:
    label = f"[{section}]" if entry is None else f"[[{section}]]"
    if not isinstance(content, dict):
        where = _where(path, text, None, section)
        raise ConfigError(f"{where}: {section} must be a section: {label}")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in content.items():
        where = _where(path, text, section, key, entry)
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r} in {label}" + _suggestion(key, hints))
        try:
            values[key] = _coerce(value, hints[key])
        except TypeError as error:
            raise ConfigError(f"{where}: {key} must be {error}, not {value!r}") from error
    try:
        return cls(**values)
    except ValueError as error:
        key = str(error).partition(":")[0]
        raise ConfigError(f"{_where(path, text, section, key, entry)}: {error}") from error
    except TypeError as error:
        missing = [
            item.name
            for item in dataclasses.fields(cls)
            if item.name not in values
            and item.default is dataclasses.MISSING
            and item.default_factory is dataclasses.MISSING
        ]
        where = _where(path, text, None, section)
        raise ConfigError(f"{where}: {label} needs {', '.join(missing)}") from error


def _coerce(value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it; raises TypeError with the name of what is wanted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        wanted: list[str] = []
        for option in arguments:
            if option is type(None):
                continue
            try:
                return _coerce(value, option)
            except TypeError as error:
                wanted.append(str(error))
        raise TypeError(" or ".join(wanted))
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise TypeError("one of " + ", ".join(map(repr, arguments)))
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError("a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            try:
                return tuple(_coerce(item, arguments[0]) for item in value)
            except TypeError as error:
                raise TypeError(f"a list of which each is {error}") from error
        if len(value) != len(arguments):
            raise TypeError(f"a list of {len(arguments)}")
        return tuple(_coerce(v, a) for v, a in zip(value, arguments, strict=True))
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, dict):
            raise TypeError("a table")
        return value
    if hint is Any:
        return value
    if type(value) in (int, float) and not _fits(value):
        raise TypeError("a number of ordinary size")
    if hint is float and type(value) is int:
        return float(value)
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
    if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise TypeError(names.get(hint, str(hint)))


def _fits(value: float) -> bool:
    """Neither NaN nor infinite nor more than 63 bits: nothing here is meant to be so large."""
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 63


def check_number(key: str, value: Any) -> None:
    """Raise ValueError for a number from the command line that no setting can have."""
    if type(value) in (int, float) and not _fits(value):
        raise ValueError(f"{key}: must be a number of ordinary size, not {value}")


def _suggestion(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; known are " + ", ".join(known)


def _where(path: Path, text: str, section: str | None, key: str, entry: int | None = None) -> str:
    """`FILE line N` of a key or section; the header of a list's entry that lacks the key."""
    number = _line(text, section, key, entry)
    if number is None and section is not None and entry is not None:
        number = _line(text, section, None, entry)
    if number is not None:
        return f"{path} line {number}"
    return f"{path} [{section}]" if section else str(path)


def line_of(text: str, section: str, key: str, entry: int | None = None) -> int | None:
    """The line on which `key` of [section] is set, None where it is not; `entry` as in `where`."""
    content = tomllib.loads(text).get(section, {} if entry is None else [])
    content = content if entry is None else content[entry]
    return _line(text, section, key, entry) if key in content else None


def _line(text: str, section: str | None, key: str | None, entry: int | None = None) -> int | None:
    """tomllib keeps no positions, so they are looked up in the text: a key may stand in its
    section, be a section of its own (`[section.key]`), or be written with dots. `entry` counts
    the sections [[section]] of a list from 0."""
    wanted = [name for name in (section, key) if name is not None]
    current: list[str] = []
    entries: Counter[str] = Counter()
    here: int | None = None  # the entry of a list that this line belongs to
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            current = _names(header.group(2))
            if header.group(1) == "[[":
                here = entries[current[0]]
                entries[current[0]] += 1
            elif len(current) == 1:
                here = None
            if (section is None or here == entry) and current[: len(wanted)] == wanted:
                return number
            continue
        assigned = _ASSIGNED.match(line)
        names = [*current, *_names(assigned.group(1))] if assigned else []
        if names and (section is None or here == entry) and names[: len(wanted)] == wanted:
            return number
    return None


_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_ASSIGNED = re.compile(rf"\s*({_DOTTED})\s*=")


def _names(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in re.findall(_NAME, dotted)]
