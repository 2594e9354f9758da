"""doctor: each fault of a server, a disk or a machine is found, explained and has a remedy."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from draftmill.builder.requests.replies import PROBE_CONVERSATION
from draftmill.tools.cli import main
from draftmill.tools.doctor import command as doctor
from draftmill.tools.doctor import servers as doctor_servers
from draftmill.tools.doctor.findings import Finding
from tests.fakes import toy_model as toy
from tests.fakes.target_server import TargetServer
from tests.tools.served import served

SIZES = ("--hidden-size", "32", "--layers", "30", "--vocab-size", "512")
Doctor = Callable[..., list[Finding]]


class Thinker(TargetServer):
    """A reasoning model whose server has no parser: its marks stand in the text."""

    async def _chat(self, request: web.Request) -> web.Response:
        reply = await super()._chat(request)
        body = json.loads(reply.body)
        body["choices"][0]["message"]["content"] = "<think>hm</think>391"
        return web.json_response(body)


@pytest.fixture
def dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path / "ds"), "--target", "fake/target", *SIZES,
              "--disk-budget", "1GB"])  # fmt: skip
    (tmp_path / "ds" / "staging").mkdir()
    capsys.readouterr()
    return tmp_path / "ds"


@pytest.fixture(autouse=True)
def _a_machine_without_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this one grants: enough open files, and a disk that holds the budget."""
    monkeypatch.setattr(doctor, "_WRITE_BYTES", 1 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def ask(*words: str | Path) -> list[Finding]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *map(str, words), "--json"])
        found = json.loads(capsys.readouterr().out)
        findings = [Finding(**each) for each in found["findings"]]
        assert found["faults"] == sum(each.ok is False for each in findings)
        assert ended.value.code == (1 if found["faults"] else 0)
        return findings

    return ask


def the_fault(findings: list[Finding], *words: str) -> Finding:
    (fault,) = [each for each in findings if each.ok is False]
    for word in words:
        assert word in fault.what
    return fault


def test_nothing_wrong_with_a_generation_server(run: Doctor, dataset: Path) -> None:
    with served(TargetServer(reasoning="reasoning")) as server:
        found = run(dataset, "--url", server.url, "--for", "generate")
    said = "\n".join(each.what for each in found if each.ok)
    assert all(each.ok is not False for each in found)
    for words in ("serves fake/target", "token ids", "a parser is on", "staging folder"):
        assert words in said


def test_nothing_wrong_with_an_extraction_server(run: Doctor, dataset: Path) -> None:
    staging = dataset / "staging"
    with served(TargetServer(staging=str(staging))) as server:
        found = run(dataset, "--url", server.url, "--for", "extract")
    assert any(each.ok and "extracts layers 2, 15, 27, 30" in each.what for each in found)
    assert list(staging.iterdir()) == [], "the probe's files stayed"


@pytest.mark.parametrize(
    ("stage", "options", "words", "fix"),
    [
        ("generate", {"model": "other"}, "does not serve", ""),
        ("generate", {"api_key": "secret"}, "401", ""),
        ("generate", {"token_ids": False}, "return_token_ids is not honoured", "vLLM 0.10.2"),
        ("extract", {}, "does not extract", "draftmill serve extract"),
        ("generate", {"faults": {"http_400": 1.0}}, "a probe request failed", ""),
        ("generate", {"faults": {"http_500": 1.0}}, "a probe request failed", ""),
    ],
)
def test_faults_of_a_generation_server(
    run: Doctor, dataset: Path, stage: str, options: dict[str, Any], words: str, fix: str
) -> None:
    with served(TargetServer(**options)) as server:
        fault = the_fault(run(dataset, "--url", server.url, "--for", stage), words)
    assert fix in fault.fix


@pytest.mark.parametrize(
    ("options", "words", "fix"),
    [
        ({"layers": 3}, "3", "--layer-ids 2,15,27,30"),
        ({"hidden": 16}, "16", "--layer-ids"),
        ({"faults": {"no_file": 1.0}}, "wrote no file", "--staging"),
        ({"faults": {"wrong_ids": 1.0}}, "token", "--layer-ids"),
    ],
)
def test_faults_of_an_extraction_server(
    run: Doctor, dataset: Path, options: dict[str, Any], words: str, fix: str
) -> None:
    staging = dataset / "staging"
    with served(TargetServer(staging=str(staging), **options)) as server:
        fault = the_fault(run(dataset, "--url", server.url, "--for", "extract"), words)
    assert fix in fault.fix
    assert fault.why
    assert list(staging.iterdir()) == []


def test_a_staging_folder_that_is_not_shared(
    run: Doctor, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_servers, "_FILE_S", 0.1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with served(TargetServer(staging=str(elsewhere))) as server:
        fault = the_fault(run(dataset, "--url", server.url), "does not arrive")
    assert f"--staging {elsewhere}" in fault.fix


def test_a_prefix_cache_on_the_extraction_server(run: Doctor, dataset: Path) -> None:
    messages = json.loads(PROBE_CONVERSATION)["messages"]
    ids = doctor_servers._long(toy.render(messages))
    with served(TargetServer(staging=str(dataset / "staging"))) as server:
        server.plan(ids, ["ok", "wrong_length"])
        fault = the_fault(run(dataset, "--url", server.url, "--for", "extract"))
    assert "--no-enable-prefix-caching" in fault.fix


def test_generating_on_an_extraction_server(run: Doctor, dataset: Path) -> None:
    with served(TargetServer(staging=str(dataset / "staging"))) as server:
        fault = the_fault(run(dataset, "--url", server.url, "--for", "generate"), "extracts")
    assert "corrupted" in fault.why


def test_a_reasoning_parser_that_is_off(run: Doctor, dataset: Path) -> None:
    with served(Thinker()) as server:
        fault = the_fault(run(dataset, "--url", server.url), "<think>")
    assert "--reasoning-parser" in fault.fix
    config = dataset / "config.toml"
    config.write_text(config.read_text().replace('reasoning = "any"', 'reasoning = "required"'))
    with served(TargetServer()) as server:
        the_fault(run(dataset, "--url", server.url), "required")


def test_nobody_answers(run: Doctor) -> None:
    the_fault(run("--url", "http://127.0.0.1:9"), "no server answers")


def test_a_server_that_takes_less_than_the_settings_allow(run: Doctor, dataset: Path) -> None:
    with served(TargetServer(max_model_len=2048)) as server:
        found = run(dataset, "--url", server.url, "--for", "generate")
    note = next(each for each in found if each.ok is None and "takes 2,048" in each.what)
    assert "--max-model-len 4096" in note.fix


def test_no_metrics_is_a_note(run: Doctor) -> None:
    with served(TargetServer(metrics=False)) as server:
        found = run("--url", server.url)
    assert any(each.ok is None and "/metrics" in each.what for each in found)


# -- this machine --------------------------------------------------------------------------------


def test_too_few_open_files(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert the_fault(run(), "1024").fix == "ulimit -n 65536"


def test_versions_that_were_not_tested(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.TESTED, "duckdb", "0.1")
    note = next(each for each in run() if "duckdb" in each.what)
    assert note.ok is None
    assert "0.1" in note.fix


def test_disks(run: Doctor, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataset / "config.toml"
    text = config.read_text()
    config.write_text(text.replace('disk_budget = "1GB"', 'disk_budget = ""'))
    assert any("no disk budget" in each.what for each in run(dataset))
    config.write_text(text.replace('disk_budget = "1GB"', 'disk_budget = "900TB"'))
    the_fault(run(dataset), "more than the volume")
    config.write_text(text)
    (dataset / "staging").rmdir()
    note = next(each for each in run(dataset) if "does not exist" in each.what)
    assert note.fix.startswith("mkdir -p")
    (dataset / "staging").mkdir()
    monkeypatch.setattr(doctor, "filesystem", lambda _: "nfs4")
    note = next(each for each in run(dataset) if "nfs4" in each.what)
    assert note.ok is None
    usage = shutil.disk_usage(dataset)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    faults = [each.what for each in run(dataset) if each.ok is False]
    assert any("the longest sample takes 2.1 MB" in what for what in faults)


def test_a_person_reads_what_why_and_how(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(dataset), "--url", "http://127.0.0.1:9"])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "FAULT no server answers" in out
    assert "     why: no stage can use this server" in out


def test_a_dataset_that_cannot_be_written(run: Doctor, dataset: Path) -> None:
    (dataset / ".doctor.tmp").mkdir()
    fault = the_fault(run(dataset), "cannot be written")
    assert fault.fix


def test_the_file_of_somebody_else_is_left_alone(run: Doctor, dataset: Path) -> None:
    """A server can name any file of the staging folder; doctor deletes only its own."""
    theirs = dataset / "staging" / "draftmill-0123456789-aaaaaaaa-1-1x.safetensors"
    theirs.write_bytes(b"theirs")

    class Liar(TargetServer):
        async def _completions(self, request: web.Request) -> web.Response:
            reply = await super()._completions(request)
            body = json.loads(reply.body)
            if "kv_transfer_params" in body:
                body["kv_transfer_params"]["hidden_states_path"] = str(theirs)
            return web.json_response(body)

    with served(Liar(staging=str(dataset / "staging"))) as server:
        findings = run(dataset, "--url", server.url, "--for", "extract")
    assert [each for each in findings if each.ok is False]
    assert theirs.read_bytes() == b"theirs"
