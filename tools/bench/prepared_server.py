"""An extraction server that computes nothing: it hard-links files that were made beforehand.

For `draftmill bench extract`: in a process of its own, and so cheap that the stage is what is
measured. Requests are told apart by the sample's number in their X-Request-Id; sample i gets file
i modulo their count. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import sys
from pathlib import Path

_NUMBER = re.compile(rb"x-request-id: *\S*-(\d+)-\d+x\r\n", re.IGNORECASE)
_LENGTH = re.compile(rb"content-length: *(\d+)\r\n", re.IGNORECASE)
_ID = re.compile(rb"x-request-id: *(\S+)\r\n", re.IGNORECASE)


class PreparedServer:
    """Answers /v1/models and /v1/completions on one port of this machine."""

    def __init__(self, prepared: Path, staging: Path, model: str) -> None:
        self._files = sorted(prepared.glob("*.safetensors"))
        self._staging = staging
        self._numbers = itertools.count()
        self._models = json.dumps({"object": "list", "data": [{"id": model}]}).encode()

    async def serve(self) -> None:
        """Print the port, then answer until standard input is closed."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 20)
        sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        async with server:
            await asyncio.to_thread(sys.stdin.read)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                if length is not None:
                    await reader.readexactly(int(length[1]))
                body = self._models if head.startswith(b"GET") else self._completion(head)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(body), body)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _completion(self, head: bytes) -> bytes:
        number, request_id = _NUMBER.search(head), _ID.search(head)
        if number is None or request_id is None:
            raise ConnectionError("a request without the id that the stage gives it")
        source = self._files[int(number[1]) % len(self._files)]
        name = f"cmpl-{request_id[1].decode()}-0-{next(self._numbers):08x}.safetensors"
        path = self._staging / name
        (self._staging / f"{name}.lock").touch()
        os.link(source, path)
        return json.dumps(
            {
                "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
                "kv_transfer_params": {"hidden_states_path": str(path)},
            }
        ).encode()


def main() -> None:
    """`python -m … PREPARED STAGING MODEL`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("staging", type=Path)
    parser.add_argument("model")
    options = parser.parse_args()
    asyncio.run(PreparedServer(options.prepared, options.staging, options.model).serve())


if __name__ == "__main__":
    main()
