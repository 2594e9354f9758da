"""The limit on open files: raised as far as it goes, and no fault of a server when reached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]

LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from draftmill.builder.requests.client import TargetClient
from draftmill.builder.requests.failures import OverloadedError
from tests.builder.generation import generated, history, writer_of
from tests.fakes.target_server import TargetServer
from tests.waiting import until

def spare(files):
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = len(list(Path("/proc/self/fd").iterdir())) + files
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    return before

async def body(path):
    with writer_of(path, 300) as writer:
        async with TargetServer(tokens_per_s=50_000.0, median_tokens=30) as server:
            # server and client both live here: two files a request
            spare(128 + 40)
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            run = asyncio.create_task(generated(writer, server, concurrency=100, tries=1))
            await until(lambda: server.answered.total() > 0)
            server.stuck = True  # until nearly as many are there as files allow
            await until(lambda: server.in_flight > 20)
            server.stuck = False
            report = await run
            assert report.outcomes == {"generated": 300}, report
            assert 20 < server.peak_in_flight <= 40, server.peak_in_flight

async def no_more():
    async with TargetClient("http://127.0.0.1:9") as client:
        before = spare(-1)
        try:
            await client.models()
        except OverloadedError as error:
            assert "ulimit -n" in str(error)
        else:
            raise AssertionError("no error")
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, before))

asyncio.run(no_more())
asyncio.run(body(Path(sys.argv[1])))
"""


def test_the_limit_is_raised_to_what_is_granted() -> None:
    code = (
        "import resource; from draftmill.manifests.open_files import allow_many\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128)); print(allow_many(), allow_many())\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["128 128", "(128, 128)"]


@pytest.mark.slow
def test_a_run_at_the_limit_slows_down_and_blames_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "d")]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
