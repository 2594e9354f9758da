"""One server behind several URLs is one server; two servers on one machine are two."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.builder.generation import generated, states, writer_of
from tests.fakes.target_server import TargetServer


class Alias(TargetServer):
    """Another URL of a server that runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url


# by its address; and by its process, where another address leads to it
WAYS = [(host, has) for host in ("localhost", "127.0.0.1", "127.1") for has in (True, False)]


@pytest.mark.parametrize("host, metrics", [*WAYS, ("127.0.0.2", True)])
def test_two_urls_of_one_server_count_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, metrics: bool
) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 60) as writer:
            async with TargetServer(tokens_per_s=9000.0, metrics=metrics) as server:
                if host == "127.0.0.2":  # another way to the same process
                    relay = await asyncio.start_server(_relay(server.port), host, 0)
                    port = relay.sockets[0].getsockname()[1]
                else:
                    port = server.port
                other = Alias(f"http://{host}:{port}/v1")
                with caplog.at_level(logging.WARNING):
                    await generated(writer, server, other, concurrency=4)
                assert states(writer) == {"generated": 60}
                assert server.peak_in_flight <= 4
        if other.url != server.url:
            assert "counted once" in caplog.text

    asyncio.run(body())


def _relay(port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    return one


def test_two_servers_on_one_machine_are_two(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 60) as writer:
            async with TargetServer(tokens_per_s=900.0) as one, TargetServer() as two:
                await generated(writer, one, two, concurrency=4)
                assert states(writer) == {"generated": 60}
                assert one.answered.total() > 1
                assert two.answered.total() > 1

    asyncio.run(body())
