"""The tests' target server in a process of its own, for benches of a clone.

It lives in tests/fakes, where every fault that it can show is tested; a wheel has no tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftmill.manifests.errors import ServerError, UsageError

CLONE = Path(__file__).resolve().parents[2]
MODEL = "fake/target"
_START_S = 60.0


class FakeServer:
    """A running fake target server."""

    def __init__(self, port: str) -> None:
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"

    def counts(self) -> dict[str, Any]:
        """What it was asked and what it generated: `wasted_tokens`, `generated_tokens`, …"""
        with urllib.request.urlopen(f"{self.root}/fake/counts") as reply:
            found: dict[str, Any] = json.load(reply)
        return found


@contextmanager
def fake_server(**options: Any) -> Iterator[FakeServer]:
    """Starts it with these options (fields of the fake's `Options`) and ends it again."""
    if not (CLONE / "tests" / "fakes" / "target_server.py").is_file():
        raise UsageError(
            "this bench needs the fake server of the tests: run it from a clone of draftmill"
        )
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-") as folder:
        ready = Path(folder) / "port"
        command = [sys.executable, "-m", "tests.fakes.target_server", "--ready-file", str(ready)]
        for name, value in options.items():
            command += ["--set", f"{name}={json.dumps(value)}"]
        process = subprocess.Popen(command, cwd=CLONE, stdout=subprocess.DEVNULL)
        try:
            give_up = time.monotonic() + _START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > give_up:
                    raise ServerError("the fake target server did not start")
                time.sleep(0.05)
            yield FakeServer(ready.read_text())
        finally:
            process.terminate()
            process.wait()
