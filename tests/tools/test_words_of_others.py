"""Names, paths and servers' words are shown as they are: no markup, no broken lines, no crash."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from draftmill.builder.progress import Progress
from draftmill.manifests import lock
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.types import Attempt, Prompt, Result
from draftmill.tools import render, terminal
from draftmill.tools.cli import main
from draftmill.tools.init import create
from draftmill.tools.settings import TargetSettings
from draftmill.tools.status import watch

# What templates of chat models, exceptions and people write.
WORDS = [
    "[/INST] is no tag",
    "[INST]",
    "[Errno 111] refused",
    "[bold]x[/bold]",
    "[/]",
    "[link=x]",
    "a]b[",
    ":smile:",
    "\\[x]",
    "<script>alert(1)</script>",
    "tab\there",
    "two\nlines",
    "cr\rx",
    "\x00\x07\x1b",
    "é\u0301 漢字 🙂 \u202e",
    "$x_1$ %s {0}",
    "x" * 3000,
    "",
]


def made(folder: Path, words: str) -> Dataset:
    """A dataset whose source, endpoint, errors and controller all say `words`."""
    target = TargetSettings(
        model="m", hidden_size=8, num_layers=30, vocab_size=100, target_layer_ids=(2, 15, 27)
    )
    dataset = create(folder / "[d]", target)
    with dataset.writer() as writer:
        writer.add_prompts(
            Prompt(
                hash=f"{n:032x}",
                conversation="{}",
                source=words if n % 2 else "other",
                row=n,
                conversation_id=str(n),
            )
            for n in range(4)
        )
        attempt = Attempt(
            id=1,
            stage="generate",
            attempt=1,
            outcome="failed",
            error_class=words,
            error=words,
            endpoint=words,
            started_at=1e9,
            total_s=1.0,
        )
        other = Attempt(
            id=2,
            stage="generate",
            attempt=1,
            outcome="rejected",
            error_class=words,
            error=words,
            endpoint=words,
            started_at=1e9,
            total_s=1.0,
        )
        writer.commit([Result(attempt=attempt, hash=""), Result(attempt=other, hash="")])
        writer.control([{"time": 1e9, "endpoint": words, "limit": 3, "decision": words}])
    return dataset


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setenv("COLUMNS", "250")


def shown(words: str) -> str:
    """What must be left of them on a screen."""
    return re.split(r"[\n\t\r\x00\u202e]", words)[0][:20].strip()


@pytest.mark.slow
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("words", WORDS)
def test_every_view_shows_them(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    dataset = made(tmp_path, words)
    path = str(dataset.path)
    for command in (
        ["status", path],
        ["report", path],
        ["sql", path, "SELECT source, endpoint, error FROM samples JOIN attempts USING (id)"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        seen = capsys.readouterr()
        assert ended.value.code == 0, seen
        assert shown(words) in seen.out, command[0]
    with pytest.raises(SystemExit) as ended:
        main(["report", path, "--html", str(tmp_path / "r.html")])
    assert ended.value.code == 0
    assert capsys.readouterr().err == f"{tmp_path / 'r.html'} written\n", "no warnings"
    page = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in page


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("words", WORDS)
def test_a_stage_that_says_them(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with render.Display(words) as show:
        show(Progress(stage="extract", done=1, total=3, note=words))
    assert isinstance(render.Display("x")._bar, RichProgress)
    seen = capsys.readouterr().err
    assert shown(words) in seen


@pytest.mark.parametrize("words", WORDS)
def test_a_row_is_a_line(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = made(tmp_path, words)
    for query, columns in (
        ("SELECT id, error, endpoint FROM attempts ORDER BY id", 3),
        ("SELECT id, id, 1 AS id_1 FROM attempts", 3),
    ):
        with pytest.raises(SystemExit):
            main(["sql", str(dataset.path), query])
        lines = capsys.readouterr().out.removesuffix("\n").split("\n")
        assert [line.count("\t") for line in lines] == [columns - 1] * 3


def test_a_live_view_of_them(tmp_path: Path) -> None:
    """The real thing on a terminal of its own."""
    dataset = made(tmp_path, "[/INST]")
    with dataset.writer() as writer:
        writer.publish(snapshot=True, running={"stage": "extract", "note": "[/INST] no"})
        parent, child = pty.openpty()
        ran = subprocess.Popen(
            [sys.executable, "-m", "draftmill.tools", "status", str(dataset.path), "--watch"],
            stdout=child,
            stderr=child,
            stdin=child,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"},
        )
        os.close(child)
        seen = b""
        try:
            while b"no" not in seen.partition(b"[/INST]")[2]:
                seen += os.read(parent, 4096)
        finally:
            ran.kill()
            ran.wait()
            os.close(parent)
    assert b"[d]" in seen


# -- escape codes --------------------------------------------------------------------------------

OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# what servers, prompt files and people could send: titles, colours, replies, reversals
TRICKS = [
    "\x1b]0;owned\x07 after",
    "\x1b[2J\x1b[31mred",
    "\x9b31mred",
    "\x1bP+q\x1b\\\\",
    "a\x08b\x7fc",
    "one\rtwo",
    "\u202egnp.exe\u2066",
]


@given(st.text(st.characters(max_codepoint=0x2100)))
def test_clean_text_has_nothing_to_obey_and_loses_nothing(text: str) -> None:
    cleaned = terminal.clean(text)
    assert not OBEYED.search(cleaned)
    assert terminal.clean(cleaned) == cleaned
    assert OBEYED.sub("", text) == re.sub(OBEYED, "", text)
    if not OBEYED.search(text):
        assert cleaned == text


@pytest.mark.parametrize("words", TRICKS)
def test_no_view_passes_escape_codes_on(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")  # then rich has no codes of its own in a table
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    path = str(made(tmp_path, words).path)
    query = "SELECT source, error FROM samples JOIN attempts USING (id)"
    for command in (["status", path], ["report", path], ["sql", path, query]):
        main_ends(command, 0)
        seen = capsys.readouterr()
        assert not OBEYED.search(re.sub(r"\x1b\[[0-9;]*m", "", seen.out + seen.err)), command
        assert terminal.clean(words)[:4] in seen.out, command
    for command in (["status", path, "--json"], ["report", path, "--json"]):
        text = main_ends(command, 0, capsys)
        assert not OBEYED.search(text)
        json.loads(text)
    text = main_ends(["sql", path, query, "--json"], 0, capsys)
    assert not OBEYED.search(text)
    assert {json.loads(line)["error"] for line in text.splitlines()} == {words}


@pytest.mark.parametrize("words", TRICKS)
def test_progress_warnings_and_errors_pass_none_on(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with render.Display("extract") as show:  # plain lines
        show(Progress(stage="extract", done=1, total=3, note=words))
    render.say(words)
    terminal.tell_warnings()
    logging.getLogger("draftmill.builder").warning("%s: asked again", words)
    main_ends(["status", str(tmp_path / words.replace("/", ""))], 1)
    main_ends(["train", str(tmp_path), f"--{words}"], 2)
    seen = capsys.readouterr()
    assert "asked again" in seen.err
    assert not OBEYED.search(seen.out + seen.err)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("words", TRICKS)
def test_a_live_bar_passes_none_on(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with render.Display(words) as show:
        show(Progress(stage="extract", done=1, total=3, note=words))
    seen = capsys.readouterr().err
    assert "\x1b[" in seen, "no terminal, so this shows nothing"
    assert words not in seen
    assert not OBEYED.search(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", seen))


@pytest.mark.parametrize("words", TRICKS)
def test_a_screen_passes_none_on(words: str) -> None:
    file = io.StringIO()
    screen = render.console()
    screen.file = file
    table = Table(title=words)
    table.add_column(Text(words))
    table.add_row(words)
    table.add_row(Text.assemble("a ", (words, "bold")))
    for each in (words, Text(words), table, Panel(words, title=words)):
        screen.print(each)
    assert not OBEYED.search(file.getvalue())
    width = max(len(line) for line in file.getvalue().splitlines())
    assert width <= screen.width


# -- documents of somebody else ------------------------------------------------------------------

RUBBISH: list[object] = [
    "",
    "{",
    "[]",
    "3",
    "null",
    "{}",
    '{"prompts": {}}',
    '{"prompts": 3, "disk": [], "pid": 1}',
    b"\xff\xfe",
    lambda found: {**found, "pid": "x"},
    lambda found: {**found, "running": [1]},
    lambda found: {k: v for k, v in found.items() if k != "disk"},
    lambda found: [found],
    lambda found: {**found, "prompts": {}},
    lambda found: {**found, "running": {"more": 1}},
    lambda found: {**found, "pid": 10**30},
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUBBISH)))
def test_a_status_that_is_none(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a writer the snapshot answers in its place; the live view says what it cannot read."""
    monkeypatch.setattr(watch, "EVERY_S", 0.0)
    dataset = made(tmp_path, "s")
    given = RUBBISH[number]
    with lock.held(dataset.lock_path, ""):
        if callable(given):
            change: Callable[[object], object] = given
            given = json.dumps(change(json.loads(dataset.status_path.read_text())))
        data = given if isinstance(given, bytes) else str(given).encode()
        dataset.status_path.write_bytes(data)
        main_ends(["status", str(dataset.path)], 0)
        main_ends(["report", str(dataset.path)], 0)
        assert '"total": 4' in main_ends(["status", str(dataset.path), "--json"], 0, capsys)
        calls = iter(range(3))

        def stop(_: float) -> None:
            if next(calls) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(watch.time, "sleep", stop)
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            main(["status", str(dataset.path), "--watch"])
        if isinstance(ended.value, SystemExit):
            assert ended.value.code == 1
            assert "`draftmill status" in capsys.readouterr().err


def main_ends(words: list[str], code: int, capsys: pytest.CaptureFixture[str] | None = None) -> str:
    if capsys is not None:
        capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code
    return "" if capsys is None else capsys.readouterr().out


# -- places for a page ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "/", ".", "no/such/folder/r.html", "folder", "x" * 300])
def test_a_page_that_cannot_be_written(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = made(tmp_path, "s")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    before = sorted(os.listdir(tmp_path))
    main_ends(["report", str(dataset.path), "--html", place], 2)
    assert "--html" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == before


def test_a_page_into_what_is_no_file(tmp_path: Path) -> None:
    """A pipe or a device is written to, and not replaced."""
    dataset = made(tmp_path, "s")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    main_ends(["report", str(dataset.path), "--html", str(pipe)], 0)
    assert b"</html>" in reader.communicate()[0]
    assert pipe.is_fifo()
