"""A real browser for the tests of pages, where one is installed; no window, no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip


def find() -> str | None:
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _run(page: Path, *flags: str) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [str(find()), *_FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout


def evaluate(page: Path, expression: str, *, width: int) -> Any:
    """The value of a JavaScript expression in the page, shown in a window of that width.

    The page itself has no script: a copy of it gets one.
    """
    script = f"<script>document.body.dataset.found = JSON.stringify({expression})</script>"
    copy = page.with_name(f"{page.stem}.{width}.html")
    copy.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    shown = _run(copy, f"--window-size={width},2000", "--dump-dom")
    found = re.search(r'data-found="([^"]*)"', shown)
    assert found is not None, shown[-2000:]
    return json.loads(unescape(found.group(1)))


def screenshot(page: Path, to: Path, *, width: int, height: int, dark: bool = False) -> None:
    """A picture of the page, PNG."""
    colours = ("--blink-settings=preferredColorScheme=0",) if dark else ()
    _run(page, f"--window-size={width},{height}", f"--screenshot={to}", *colours)
