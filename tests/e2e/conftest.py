"""Real vLLM servers on the CPU for the tests that need them: one at a time, each started once.

A test asks for `generate_server` or `extract_server`; tests are put in an order in which those of
one kind follow each other. A test that starts servers itself asks for `no_server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftmill.builder.serving.launcher import Server, ServeSettings
from draftmill.tools.demo.command import cache_folder
from draftmill.tools.demo.embedded import MODEL_NAME, ensure_model

HERE = Path(__file__).parent
LAYER_IDS = (2, 15, 27, 30)
SETTINGS = ServeSettings(max_model_len=2048, kv_cache_gib=1)

_ORDER = ("generate_server", "extract_server", "no_server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests of one server together: every switch costs a minute or two."""
    places = [index for index, item in enumerate(items) if item.path.is_relative_to(HERE)]
    ours = sorted((items[index] for index in places), key=_rank)
    for index, item in zip(places, ours, strict=True):
        items[index] = item


def _rank(item: pytest.Item) -> int:
    names = getattr(item, "fixturenames", ())
    return next((rank for rank, name in enumerate(_ORDER, 1) if name in names), 0)


class OneServer:
    """At most one running server; asking for another kind stops the one that is there."""

    def __init__(self, model: Path, run_folder: Path) -> None:
        self._model = str(model)
        # kept between runs of the tests: what a killed run left behind is found there and stopped
        self._run_folder = run_folder
        self._current: Server | None = None

    def use(self, kind: str) -> Server:
        if self._current is None or self._current.spec.kind != kind:
            self.stop()
            new = self._make(kind)
            asyncio.run(new.start())
            self._current = new
        return self._current

    def stop(self) -> None:
        if self._current is not None:
            current, self._current = self._current, None
            asyncio.run(current.stop())

    def _make(self, kind: str) -> Server:
        if kind == "generate":
            return Server.generation(
                self._model, SETTINGS, name=MODEL_NAME, run_folder=self._run_folder, on_wait=print
            )
        return Server.extraction(
            self._model,
            SETTINGS,
            name=MODEL_NAME,
            layer_ids=LAYER_IDS,
            staging=self._run_folder / "staging",
            run_folder=self._run_folder,
            on_wait=print,
        )


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The embedded model as a Hugging Face folder, where the demo keeps it as well."""
    return ensure_model(cache_folder())


@pytest.fixture(scope="session")
def _one_server(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[OneServer]:
    assert request.config.cache is not None
    servers = OneServer(model_folder, request.config.cache.mkdir("draftmill-servers"))
    yield servers
    servers.stop()


@pytest.fixture
def generate_server(_one_server: OneServer) -> Server:
    """A running generation server of the embedded model, shared with other tests."""
    return _one_server.use("generate")


@pytest.fixture
def extract_server(_one_server: OneServer) -> Server:
    """A running extraction server for LAYER_IDS, shared; its folder is `.spec.staging`."""
    return _one_server.use("extract")


@pytest.fixture
def no_server(_one_server: OneServer) -> None:
    """No shared server runs, so that a test can start its own."""
    _one_server.stop()
