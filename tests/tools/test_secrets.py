"""The API key comes from the environment and shows nowhere: files, output, errors, commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from aiohttp import web

from draftmill.builder.requests import api_key
from draftmill.builder.requests.failures import words
from draftmill.builder.requests.urls import split_url
from draftmill.builder.serving.command import ServeSettings
from draftmill.manifests.errors import ServerError
from draftmill.tools.cli import main
from tests.fakes.target_server import TargetServer
from tests.tools.served import served

KEY = "sk-canary-7f3a9c55e1"
PROMPTS = 24


class Echo(TargetServer):
    """Quotes in its errors what it was sent, as some gateways do."""

    def _error(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        return super()._error(status, f"{message}; you sent Authorization: Bearer {KEY}", headers)


@pytest.mark.slow
def test_the_key_shows_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    staging = home / "staging"
    staging.mkdir(parents=True)
    prompts = home / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(PROMPTS)))
    for name, value in (("DRAFTMILL_API_KEY", KEY), ("HOME", str(home)), ("COLUMNS", "200")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    said: list[str] = []

    def run(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capfd.readouterr()
        assert ended.value.code in codes, (arguments, captured)
        said.append(captured.out + captured.err)
        return captured.out

    faults = {"http_400": 0.15, "http_500": 0.2, "garbage": 0.1}
    options = {"api_key": KEY, "hidden": 16, "staging": str(staging), "faults": faults}
    sizes = ("--hidden-size", "16", "--layers", "30", "--vocab-size", "512")
    with served(Echo(model="m", **options)) as server:
        run("init", "ds", "--target", "m", *sizes, "--disk-budget", "1GB")
        config = home / "ds" / "config.toml"
        config.write_text(config.read_text().replace("retry_base_s = 1.0", "retry_base_s = 0.01"))
        run("add", "ds", "prompts.jsonl")
        run("doctor", "ds", "--url", server.url, codes=(0, 1))
        run("--debug", "generate", "ds", "--url", server.url, codes=(0, 4))
        run("--debug", "extract", "ds", "--url", server.url, "--staging", str(staging),
            codes=(0, 4))  # fmt: skip
        server.options.api_key = "another"
        run("retry", "ds", "--failed", "--timed-out", "--rejected")
        run("--debug", "generate", "ds", "--url", server.url, codes=(0, 1))
        run("--debug", "doctor", "--url", server.url, codes=(1,))
        carried = f"http://user:{KEY}@127.0.0.1:{server.port}/v1"
        run("generate", "ds", "--url", carried, codes=(0, 1))
    history = run("sql", "ds", "SELECT * FROM attempts", "--json")
    assert "Authorization: Bearer ***" in history, "no error was quoted, so this shows nothing"
    for table in ("meta", "control", "samples", "shards"):
        run("sql", "ds", f"SELECT * FROM {table}", "--json")
    for command in ("status", "report", "config", "verify", "estimate"):
        run(command, "ds")
        run(command, "ds", "--json")
    assert '"DRAFTMILL_API_KEY": true' in "".join(said)
    run("report", "ds", "--html", "report.html")
    for kind in ("generate", "extract"):
        where = ("--layer-ids", "2,15,27,30", "--staging", str(staging))
        run("serve", kind, "m", *where, "--print")
    for text in said:
        assert KEY not in text
    files = [path for path in home.rglob("*") if path.is_file()]
    assert any(path.name == "manifest.duckdb" for path in files)
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path


def test_the_first_variable_that_is_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in api_key.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert api_key.api_key() is None
    for number, name in reversed(list(enumerate(api_key.VARIABLES))):
        monkeypatch.setenv(name, f"key-{number}")
        assert api_key.api_key() == f"key-{number}"
    assert words(ValueError("key-0 key-1\nkey-2")) == "*** *** ***"


def test_an_empty_or_tiny_key_does_not_blot_out_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", "e"):
        monkeypatch.setenv("DRAFTMILL_API_KEY", key)
        assert api_key.redacted("the server said no") == "the server said no"


@pytest.mark.parametrize(
    "url", [f"http://u:{KEY}@h:1/v1", f"http://{KEY}@h/v1", f"https://h/v1?api_key={KEY}"]
)
def test_an_address_with_a_key_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ServerError, match="DRAFTMILL_API_KEY") as error:
        split_url(url)
    assert KEY not in str(error.value)


@pytest.mark.parametrize("name", ["args", "generate_args", "extract_args"])
@pytest.mark.parametrize("given", [("--api-key", KEY), (f"--api-key={KEY}",)])
def test_a_key_has_no_place_in_the_config(name: str, given: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="VLLM_API_KEY") as error:
        ServeSettings(**{name: given})
    assert KEY not in str(error.value)
