"""Ctrl-C once or many times, while a command still starts: one line, 130, no traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.manifests.dataset import Dataset
from tests.builder.generation import prompt

LINE = "interrupted; everything acknowledged is kept"
CONFIG = """[target]
model = "m"
hidden_size = 8
num_layers = 8
vocab_size = 8
target_layer_ids = [1, 2, 3]
"""
# Interrupts this process at the start of an import, and again while the first one unwinds.
CHILD = """
import builtins, importlib.abc, os, signal, sys
where, times = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]

def interrupt(times):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        if times > 1:
            interrupt(times - 1)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == where:
            interrupt(times)

if where == "print":
    said = builtins.print
    def talk(*args, **kwargs):
        said(*args, **kwargs)
        if args and "interrupted" in str(args[0]):
            os.kill(os.getpid(), signal.SIGINT)
    builtins.print = talk
    where = "draftmill.tools.status.command"
sys.meta_path.insert(0, Finder())
from draftmill.tools.__main__ import main
main()
"""


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    "where", ["draftmill.tools.cli", "draftmill.tools.status.command", "print"]
)
def test_interrupts_while_a_command_is_imported(tmp_path: Path, where: str, times: int) -> None:
    command = [sys.executable, "-c", CHILD, where, str(times), "status", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 130
    assert ran.stderr.strip().splitlines() == [LINE]


@pytest.mark.slow
def test_two_interrupts_while_servers_are_looked_for(tmp_path: Path) -> None:
    """Nobody answers at this address: the stage is still getting to know its servers."""
    dataset = Dataset.create(tmp_path / "d", CONFIG)
    with dataset.writer() as writer:
        writer.add_prompts(prompt(number) for number in range(3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        child = subprocess.Popen(
            [sys.executable, "-m", "draftmill.tools", "generate", str(dataset.path), "--url", url],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()  # it has asked which models there are
        for _ in range(2):
            os.kill(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=60)
        connection.close()
    assert child.returncode == 130
    assert "Traceback" not in said
