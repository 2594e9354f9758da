"""Files and folders that are none: every command says so in a line or two, and breaks nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import CLONE

pytestmark = pytest.mark.slow

# Runs in a process of its own that may not pass over permissions, and prints [[words, code, said]].
PROGRAM = '''
import contextlib, io, json, os, shutil, socket, sys
from pathlib import Path
from draftmill.tools import cli

told = []


def run(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = cli.run(words)
        except BaseException as error:
            code = repr(error)
    told.append([words, code, out.getvalue()])


def rubbish(suffix):
    """Paths of what is no prompt file, no model, no dataset, no place to write."""
    at = Path("rubbish" + suffix)
    at.mkdir()
    names = {}

    def name(kind):
        names[kind] = str(at / (kind + suffix))
        return at / (kind + suffix)

    name("folder").mkdir()
    name("empty").touch()
    name("bytes").write_bytes(bytes(range(256)) * 9)
    name("latin").write_bytes(b'{"prompt": "caf\\xe9"}')
    name("list").write_text("[1, {}]")
    name("deep").write_text("[" * 100_000)
    name("loop").symlink_to("loop" + suffix)
    name("dangling").symlink_to("nowhere")
    name("secret").write_text("{}")
    os.chmod(names["secret"], 0)
    locked = name("locked")
    locked.mkdir()
    (locked / "config.json").touch()
    os.chmod(locked, 0)
    name("readonly").mkdir()
    os.chmod(names["readonly"], 0o555)
    names["inside"] = names["readonly"] + "/x"
    names["under"] = names["empty"] + "/x"
    names |= {"long": "x" * 300 + suffix, "full": "/dev/full", "memory": "/proc/self/mem"}
    with contextlib.suppress(OSError):
        socket.socket(socket.AF_UNIX).bind(str(name("socket")))
    for kind, text in {
        "empty": b"", "bytes": b"\\xff\\xfe", "list": b"[1]", "deep": b"[" * 100_000,
        "text": b'{"text_config": 3}', "types": b'{"hidden_size": "x", "vocab_size": []}',
    }.items():
        folder = name("model-" + kind)
        folder.mkdir()
        (folder / "config.json").write_bytes(text)
    return names


def sources():
    for suffix in (".jsonl", ".parquet", ".jsonl.gz", ".jsonl.zst", ""):
        for path in rubbish(suffix).values():
            run("add", "ds", path)
            run("estimate", "ds", "--prompts", path)


def places():
    for number, path in enumerate(rubbish("").values()):
        for words in (("status",), ("report",), ("add", "p.jsonl"), ("verify",), ("config",)):
            run(words[0], path, *words[1:])
        run("init", f"by{number}", "--target", path)
        run("init", f"config{number}", "--target", "m", "--model-config", path)
        run("init", path + ("/y" if os.path.isdir(path) else ""), "--target", "m", *SIZES)
        run("estimate", "--model", path, "--samples", "9", "--tokens-per-sample", "9")
        run("report", "ds", "--html", path)
        run("serve", "generate", path, "--print")
        run("serve", "extract", "m", "--print", "--layer-ids", "1,2", "--staging", path)
        run("serve", "extract", "m", "--print", "--layer-ids", "1,2", "--staging", "s",
            "--run-folder", path)
        run("extract", "ds", "--url", "http://127.0.0.1:1", "--weights", path)
        run("export", "ds", path)
        run("import", "ds", path)


def pieces():
    kinds = rubbish("")
    for piece in (
        "config.toml", "prompts", "prompts/000000.parquet", "completions", "manifest.duckdb",
        "manifest.parquet", "status.json",
    ):
        for kind in ("folder", "empty", "bytes", "loop", "secret", "readonly"):
            folder = Path(f"{piece.replace('/', '-')}-{kind}")
            shutil.copytree("ds", folder)
            at = folder / piece
            shutil.rmtree(at) if at.is_dir() else at.unlink()
            if kind == "loop":
                at.symlink_to(at.name)
            elif kind in ("folder", "readonly"):
                at.mkdir(mode=0o755 if kind == "folder" else 0o555)
            else:
                at.write_bytes(b"" if kind == "empty" else bytes(99))
                at.chmod(0 if kind == "secret" else 0o644)
            for words in (("config",), ("status",), ("report",), ("sql", "SELECT 1"),
                          ("estimate",), ("verify",), ("add", "p.jsonl")):
                run(words[0], str(folder), *words[1:])


SIZES = ("--hidden-size", "64", "--layers", "8", "--vocab-size", "100")
Path("p.jsonl").write_text('{"prompt": "a"}')
run("init", "ds", "--target", "m", *SIZES)
run("add", "ds", "p.jsonl")
{"sources": sources, "places": places, "pieces": pieces}[sys.argv[1]]()
print(json.dumps(told, default=str))
'''


def unprivileged() -> list[str]:
    """What goes before a command that permissions are to hold for, also where root runs it."""
    if os.geteuid() != 0:
        return []
    if (setpriv := shutil.which("setpriv")) is None:
        pytest.skip("root passes over permissions, and there is no setpriv")
    return [setpriv, "--bounding-set=-all", "--inh-caps=-all"]


@pytest.mark.parametrize("part", ["sources", "places", "pieces"])
def test_no_command_breaks_on_it(tmp_path: Path, part: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    work = tmp_path / "work"
    work.mkdir()
    ran = subprocess.run(
        [*unprivileged(), sys.executable, str(program), part],
        cwd=work,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(CLONE)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert len(told) > 150
    assert [each[1] for each in told[:2]] == [0, 0]
    faults = [each for each in told if "unexpected" in each[2] or each[1] not in (0, 1, 2, 3)]
    assert not faults
    for words, code, said in told:
        if code:
            assert "Traceback" not in said
            assert said.strip(), words


def test_a_manifest_that_may_not_be_opened_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    """Rebuilding it would lose what only it knows: rows that timed out, failed, were rejected."""
    command = [*unprivileged(), sys.executable, "-m", "draftmill.tools.cli"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True)

    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    sizes = ("--hidden-size", "64", "--layers", "8", "--vocab-size", "100")
    assert run("init", "ds", "--target", "m", *sizes).returncode == 0
    assert run("add", "ds", "p.jsonl").returncode == 0
    manifest = tmp_path / "ds" / "manifest.duckdb"
    for mode in (0o000, 0o444):
        manifest.chmod(mode)
        before = manifest.stat().st_ino, sorted(each.name for each in manifest.parent.iterdir())
        for words in (("add", "ds", "p.jsonl"), ("verify", "ds", "--repair"), ("status", "ds")):
            if words[0] == "status" and mode:
                continue
            ran = run(*words)
            assert ran.returncode == 1
            assert "manifest.duckdb cannot be opened: Permission denied" in ran.stderr
        after = manifest.stat().st_ino, sorted(each.name for each in manifest.parent.iterdir())
        assert after == before
    manifest.chmod(0o644)
    assert run("add", "ds", "p.jsonl").returncode == 0
