"""`draftmill eval` against servers that run already: keys, sources, speeds, refusals, the card."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from draftmill.tools.cli import main
from draftmill.tools.measure import held_out
from draftmill.trainer.acceptance import Acceptance, from_metrics
from draftmill.trainer.model_card import put_evaluation
from tests.fakes.target_server import TargetServer

ACCEPTED = (7, 4, 1)  # of every ten drafts, those whose token 1, 2, 3 was accepted


class DraftingServer(TargetServer):
    """The fake with a draft model: ten drafts for every answered prompt."""

    async def _metrics(self, request: web.Request) -> web.Response:
        reply = await super()._metrics(request)
        answered = sum(self.answered.values())
        counters = {
            "num_drafts_total{": 10 * answered,
            "num_draft_tokens_total{": 30 * answered,
            "num_accepted_tokens_total{": sum(ACCEPTED) * answered,
            **{
                f'num_accepted_tokens_per_pos_total{{position="{i}",': count * answered
                for i, count in enumerate(ACCEPTED)
            },
        }
        lines = [f'vllm:spec_decode_{name}engine="0"}} {value}' for name, value in counters.items()]
        return web.Response(text="\n".join([str(reply.text), *lines, ""]))


@contextmanager
def running(server: TargetServer) -> Iterator[str]:
    """A server in a thread of its own: the command has the loop of this one."""
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with server:
            ready.set()
            while not end.is_set():  # noqa: ASYNC110  (an event of another thread)
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(120)
    try:
        yield server.url
    finally:
        end.set()
        thread.join()


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    """The options for two files of three prompts each."""
    words = []
    for source in ("math", "code"):
        path = tmp_path / f"{source}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{source} {n}"}) + "\n" for n in range(3)))
        words += ["--prompts", str(path)]
    return words


def evaluate(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, words)])
    captured = capsys.readouterr()
    assert ended.value.code == code, captured
    return captured.out, captured.err


@pytest.mark.slow
def test_every_key_by_source_and_against_no_draft(
    draft: Path, prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin, end = "<!-- accepted tokens: begin -->", "<!-- accepted tokens: end -->"
    (draft / "README.md").write_text(f"# mine\n{begin}\nnothing\n{end}\nthe rest\n")
    plot = tmp_path / "plot.png"
    with running(DraftingServer()) as url, running(TargetServer()) as plain:
        out, _ = evaluate(
            capsys, draft, "--target", "fake/target", *prompts, "--url", url,
            "--baseline-url", plain, "--plot", plot, "--json",
        )  # fmt: skip
    found: dict[str, Any] = json.loads(out)
    assert found["accepted_per_step"] == pytest.approx(sum(ACCEPTED) / 10)
    assert found["accepted_by_position"] == pytest.approx([n / 10 for n in ACCEPTED])
    assert found["prompts"] == 6
    assert set(found["tokens_per_s"]) == {"with_draft", "without_draft"}
    assert min(found["tokens_per_s"].values()) > 0
    sources = found["by_source"]
    assert {name: part["prompts"] for name, part in sources.items()} == {"code": 3, "math": 3}
    assert sum(part["drafts"] for part in sources.values()) == found["drafts"] == 60
    for part in sources.values():
        assert part["accepted_per_step"] == pytest.approx(sum(ACCEPTED) / 10)
        assert part["tokens_per_s"]["without_draft"] > 0
    assert (found["temperature"], found["max_tokens"], found["concurrency"]) == (0.0, 256, 8)
    for image in (plot, draft / "acceptance.png"):
        assert image.read_bytes().startswith(b"\x89PNG")
    card = (draft / "README.md").read_text()
    assert card.startswith(f"# mine\n{begin}\n")
    assert card.endswith(f"{end}\nthe rest\n")
    assert "| all | 1.200 | 0.700 / 0.400 / 0.100 | 60 |" in card
    assert put_evaluation(draft, found, "again.jsonl")


def test_for_people_a_line_a_source(
    draft: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(DraftingServer()) as url:
        out, _ = evaluate(capsys, draft, "--target", "fake/target", *prompts, "--url", url)
    assert "all: 1.200 accepted per step (by position 0.700 / 0.400 / 0.100; 60 drafts)" in out
    assert not (draft / "README.md").exists()
    assert not (draft / "acceptance.png").exists()


def test_servers_that_are_not_what_they_must_be(
    draft: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = (draft, "--target", "fake/target", *prompts)
    with running(TargetServer()) as plain, running(DraftingServer()) as url:
        _, err = evaluate(capsys, *words, "--url", plain, code=1)
        assert "drafted nothing" in err
        _, err = evaluate(capsys, *words, "--url", url, "--baseline-url", url, code=1)
        assert "without a draft model, but it drafts" in err
        _, err = evaluate(capsys, *words, "--url", url, "--baseline", code=2)
        assert "--baseline-url" in err
    _, err = evaluate(capsys, *words, "--baseline-url", "http://127.0.0.1:9", code=2)
    assert "goes with --url" in err
    with running(DraftingServer(faults={"http_400": 1.0})) as url:
        _, err = evaluate(capsys, *words, "--url", url, code=1)
        assert "every held-out prompt failed" in err


class RestartedServer(DraftingServer):
    """Its counters begin again at every reading."""

    async def _metrics(self, request: web.Request) -> web.Response:
        reply = await super()._metrics(request)
        self.answered.clear()
        return reply


def test_a_server_that_was_restarted_in_between_is_said_so(
    draft: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server = RestartedServer()
    server.answered["before"] = 100
    with running(server) as url:
        words = (draft, "--target", "fake/target", *prompts, "--url", url)
        _, err = evaluate(capsys, *words, code=1)
    assert "counters went back: it was restarted in between. Measure again." in err


@pytest.mark.parametrize(
    "option", [("--concurrency", 0), ("--max-tokens", -1), ("--k", 0), ("--temperature", -1)]
)
def test_numbers_that_would_wait_for_ever_are_refused(
    draft: Path, prompts: list[str], capsys: pytest.CaptureFixture[str], option: tuple[str, int]
) -> None:
    words = (draft, "--target", "fake/target", *prompts, "--url", "http://127.0.0.1:9", *option)
    _, err = evaluate(capsys, *words, code=2)
    assert option[0] in err


def test_files_of_one_name_are_two_sources(tmp_path: Path) -> None:
    paths = [str(tmp_path / folder / "test.jsonl") for folder in "ab"]
    for path in paths:
        Path(path).parent.mkdir()
        Path(path).write_text('{"prompt": "x"}\n')
    assert [each.source for each in held_out(paths, None)] == paths
    assert [each.source for each in held_out(paths[:1], None)] == ["test"]


def test_counters_that_are_no_numbers_are_passed_over() -> None:
    name = "vllm:spec_decode_num_drafts_total"
    assert from_metrics(f"{name} NaN\n{name} x\n{name} +Inf\n{name} 2") == Acceptance(drafts=2)
