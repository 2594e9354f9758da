"""Starts the command line; an interrupt ends it as documented even while it is still imported."""

from __future__ import annotations

import io
import os
import signal
import sys


def main() -> None:
    """Entry point of the console script; always ends the process with a documented exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a name that the terminal cannot show must not end a command that has done its work
            stream.reconfigure(errors="backslashreplace")
    try:
        from draftmill.tools import cli

        code = cli.run(sys.argv[1:])
    except KeyboardInterrupt:
        # Whoever presses Ctrl-C again wants out, not another traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted; everything acknowledged is kept", file=sys.stderr)  # noqa: T201
        code = 130
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    sys.exit(code)


if __name__ == "__main__":
    main()
