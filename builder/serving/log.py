"""What a server's log says to a person: its last line, and why it ended. Pure text."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

_TAIL_BYTES = 256 << 10
_MAX_CHARS = 300

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# "(EngineCore pid=8102) ERROR 11-29 15:00:09 [core.py:402] " and what uvicorn writes
_PREFIX = re.compile(
    r"^(\([\w.:-]+ pid=\d+\)\s*)?"
    r"((INFO|WARNING|ERROR|CRITICAL|DEBUG):?\s+(\d\d-\d\d \d\d:\d\d:\d\d\s+)?(\[[^\]]*\]\s?)?)?"
)
_EXCEPTION = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b(: .*|$)")
_USAGE = re.compile(r"^[\w.]+: error: ")
# Raised by a parent because a child failed: true, and no help.
_SECOND_HAND = ("Engine core initialization failed", "WorkerProc initialization failed")
_ADVICE = {
    "Address already in use": "start again, another port is taken then",
    "out of memory": "lower serve.max_model_len, or use more GPUs (serve.tensor_parallel_size)",
    "No available memory for the cache": "raise serve.kv_cache_gib or --gpu-memory-utilization",
    "unrecognized arguments": "correct serve.args, or use a vLLM that knows them",
}


def last_line(path: Path) -> str:
    """The last line that says something, without the prefixes of vLLM's loggers."""
    return next((line for line in reversed(_lines(path)) if line), "starting")[:_MAX_CHARS]


def why_it_ended(path: Path, exit_code: int | None) -> str:
    """The most telling line of a log, or how the process ended if there is none."""
    lines = _lines(path)
    telling = [
        index
        for index, line in enumerate(lines)
        if _USAGE.match(line) or (_EXCEPTION.match(line) and not _second_hand(line))
    ]
    ended = ""
    if exit_code is not None and exit_code < 0:
        ended = f"killed by {_signal_name(-exit_code)}"
        if -exit_code == signal.SIGKILL:
            ended += " (is the machine out of memory?)"
    elif exit_code is not None:
        ended = f"exit code {exit_code}"
    if not telling:
        return f"{ended or 'no reason given'}; last line: {last_line(path)}"
    line = lines[telling[-1]]
    # a validation error has its reason in the lines that follow
    for following in lines[telling[-1] + 1 : telling[-1] + 3]:
        if line.endswith(("Config", ":")) and following:
            line = f"{line} {following.strip()}"
    line = line[:_MAX_CHARS]
    advice = next((text for sign, text in _ADVICE.items() if sign in line), "")
    return line + (f" ({advice})" if advice else "") + (f" [{ended}]" if ended else "")


def _second_hand(line: str) -> bool:
    return any(words in line for words in _SECOND_HAND)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # of a progress bar only what was drawn last is left on a screen
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return [_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in shown]
