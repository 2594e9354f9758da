"""The report: its arithmetic on its own, then the whole on a dataset where everything happened."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.headroom import MIN_HEADROOM, UNLIMITED_HEADROOM
from draftmill.tools.cli import main
from draftmill.tools.report import command
from draftmill.tools.report.document import bias, document, forecast, least_tokens
from draftmill.tools.report.gather import GROUPS, Facts
from draftmill.tools.report.page import page
from draftmill.tools.report.plots import titles
from draftmill.tools.report.sections import sections
from tests.tools import browser, story


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return story.make(tmp_path_factory.mktemp("report") / "night")


@pytest.fixture(scope="module")
def found(dataset: Dataset) -> dict[str, Any]:
    return command.read(str(dataset.path))


def source(name: str, **counts: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(
        ("prompts", "completed", "extracted", "timed_out", "lost", "pending", "off_policy",
         "tokens", "extracted_tokens", "completion_bytes", "bytes"), 0
    )  # fmt: skip
    return {"source": name, "mean_completion_tokens": None, **zeros, **counts}


def status(used: int, budget: int | None, free: int = 10**12) -> dict[str, Any]:
    return {"disk": {"used_bytes": used, "budget_bytes": budget, "free_bytes": free}}


# -- arithmetic ----------------------------------------------------------------------------------


def test_forecast_takes_each_source_by_its_own_length() -> None:
    facts = Facts(
        sources=[
            source("short", prompts=100, completed=50, extracted=10, tokens=5_000,
                   extracted_tokens=1_000, bytes=10_000),
            source("long", prompts=10, completed=5, extracted=5, tokens=5_000,
                   extracted_tokens=5_000, bytes=50_000, lost=1),
        ]
    )  # fmt: skip
    ahead = forecast(facts, status(60_000, 100_000 + MIN_HEADROOM))
    assert ahead is not None
    # 90 x 100 tokens and 4 x 1,000 tokens at 10 bytes
    assert ahead["samples_left"] == 94
    assert ahead["tokens_left"] == 13_000
    assert ahead["bytes_at_completion"] == 190_000
    assert not ahead["fits"]
    assert ahead["short_by_bytes"] == 90_000
    assert ahead["samples_that_fit"] == int(94 * 40 / 130)


def test_forecast_without_a_budget_is_measured_against_the_volume() -> None:
    facts = Facts(
        sources=[
            source(
                "a", prompts=3, completed=1, extracted=1, tokens=10, extracted_tokens=10, bytes=9
            )
        ]
    )
    enough, short = (
        forecast(facts, status(9, None, free=UNLIMITED_HEADROOM + free)) for free in (18, 17)
    )
    assert enough is not None
    assert short is not None
    assert enough["fits"]
    assert not short["fits"]


def test_no_forecast_before_anything_is_stored() -> None:
    assert forecast(Facts(sources=[source("a", prompts=9)]), status(0, None)) is None


def test_least_tokens_is_deadline_times_speed() -> None:
    speeds = [{"endpoint": "a", "tokens_per_s": 40.0}, {"endpoint": "b", "tokens_per_s": 10.0}]
    late = [
        {"endpoint": "a", "deadline_s": 30.0, "rows": 3},
        {"endpoint": "b", "deadline_s": 30.0, "rows": 1},
    ]
    assert least_tokens(late, speeds) == 1200
    assert least_tokens(late[1:], speeds) == 300
    assert least_tokens(late, []) is None
    assert least_tokens([], speeds) is None


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(1, 5_000)), min_size=3, max_size=3),
    st.integers(0, 300),
    st.integers(1, 100_000),
)
def test_leaving_longer_rows_out_never_looks_better(
    groups: list[tuple[int, float]], late_rows: int, late: int
) -> None:
    rows = [
        {"name": name, "rows": count, "mean": mean}
        for name, (count, mean) in zip(GROUPS[:3], groups, strict=True)
    ]
    shown = bias(Facts(groups=[*rows, {"name": "timed_out", "rows": late_rows}]), late)
    mean, with_late = shown["mean_completion_tokens"], shown["mean_with_timed_out_at_least"]
    assert (with_late is None) == (late_rows == 0)
    assert with_late is None or with_late >= mean - 0.1


def test_an_empty_dataset_has_a_report(tmp_path: Path) -> None:
    story.make(tmp_path / "ds", generate=0, extract=0, prompts=0)
    shown = command.read(str(tmp_path / "ds"))
    assert shown["prompts"]["total"] == 0
    assert "<h2>Errors</h2>" in page(shown)


# -- the whole -----------------------------------------------------------------------------------


def test_sums_agree_with_each_other(found: dict[str, Any]) -> None:
    states, disk = found["prompts"], found["disk"]
    assert all(states[name] for name in states), "the story shows every state"
    assert sum(row["rows"] for row in found["lengths"]["by_group"]) == states["total"]
    assert sum(row["samples"] for row in disk["by_source"]) == states["extracted"]
    assert sum(row["samples"] for row in disk["by_length"]) == states["extracted"]
    extract = next(row for row in disk["by_stage"] if row["stage"] == "extract")
    assert extract["tokens"] == found["tokens"]["extracted"]
    assert extract["bytes"] == sum(row["hidden_states_bytes"] for row in disk["by_source"])
    assert extract["bytes"] == sum(row["bytes"] for row in disk["by_length"])
    shards = [row for row in disk["by_shard"] if row["kind"] == "hidden_states"]
    assert extract["bytes"] == sum(row["bytes"] for row in shards)
    done = sum(row["samples"] for row in found["throughput"]["over_time"])
    assert done == sum(row["samples"] for row in disk["by_stage"])
    wrong = ("timed_out", "failed", "rejected", "transient")
    by_time = sum(row[name] for row in found["errors"]["over_time"] for name in wrong)
    by_server = sum(row[name] for row in found["errors"]["by_endpoint"] for name in wrong)
    by_class = sum(row["attempts"] for row in found["errors"]["by_class"])
    assert by_time == by_server == by_class


def test_the_bias_of_timeouts_is_shown(found: dict[str, Any]) -> None:
    groups = {row["group"]: row for row in found["lengths"]["by_group"]}
    assert groups["timed_out"]["at_least_tokens"] == story.DEADLINE_S * story.SPEED
    assert groups["recovered"]["mean"] > groups["completed"]["longest"]
    shown = found["lengths"]["bias"]
    assert shown["mean_with_timed_out_at_least"] > shown["mean_completion_tokens"]
    worst = max(shown["by_source"], key=lambda row: row["timed_out_share"])
    assert worst["source"] == "math-proofs"
    assert worst["share_of_completed"] < worst["share_of_prompts"]


def test_keys_are_stable(found: dict[str, Any]) -> None:
    assert list(found) == [
        "dataset", "time", "snapshot", "prompts", "tokens", "disk", "errors", "lengths",
        "throughput", "off_policy", "codecs", "codec_error",
    ]  # fmt: skip
    assert list(found["errors"]) == ["by_class", "by_endpoint", "over_time"]
    assert list(found["lengths"]) == ["by_group", "histogram", "bias"]
    assert list(found["throughput"]) == ["bin_s", "by_stage", "over_time", "control"]
    assert set(found["disk"]) >= {"by_stage", "by_source", "by_shard", "by_length", "forecast"}


def test_terminal_tables_say_what_the_document_says(found: dict[str, Any]) -> None:
    out = io.StringIO()
    command.show(found, Console(file=out, width=160))
    text = out.getvalue()
    assert "10 timed-out rows are longer than 960 tokens" in text
    for each in sections(found):
        assert each.title in text
        assert all(grid.title in text for grid in each.grids if grid.rows)


def test_the_error_of_lossy_storage_is_shown(found: dict[str, Any]) -> None:
    measured = {"samples": 4, "tokens": 900, "relative_error": {"2": 0.0131, "30": 0.0148}}
    errors = {"bitround-4": {**measured, "kl_nats": 0.0016}, "rot4": {**measured, "kl_nats": None}}
    out = io.StringIO()
    command.show({**found, "codec_error": errors}, Console(file=out, width=160))
    assert "2: 0.013, 30: 0.015" in out.getvalue()
    assert "1.6e-03 nats" in out.getvalue()
    assert "rot4" in page({**found, "codec_error": errors})
    assert "lossy" not in page(found)
    assert "Stored as em-zfast (lossless)." in page(found)
    assert "&lt; 128<" in page(found), "a bin ends below its upper length"


def test_json_and_html_from_the_command(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "r.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(dataset.path), "--json", "--html", str(target)])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["prompts"]["total"] == 200
    assert target.read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(dataset.path), "--html", str(tmp_path / "no" / "r.html")])
    assert ended.value.code == 2


@pytest.mark.slow
def test_it_reads_the_snapshot_while_a_writer_works(tmp_path: Path) -> None:
    dataset = story.make(tmp_path / "ds", generate=40, extract=20)
    before = command.read(str(dataset.path))
    with dataset.writer(**story.SIZES):
        # DuckDB locks between processes, so the reader is one of its own.
        words = [sys.executable, "-m", "draftmill.tools.cli", "report", str(dataset.path), "--json"]
        during = json.loads(subprocess.check_output(words))
    assert before["snapshot"] is None
    assert during["snapshot"]["writer_pid"]
    assert "is writing this dataset" in page(during)
    for key in ("prompts", "tokens", "errors", "lengths", "throughput", "off_policy"):
        assert during[key] == before[key]


# -- the page ------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Start tags with their attributes; fails on tags that do not match."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_stands_alone(found: dict[str, Any]) -> None:
    text = page(found)
    elements = Elements(text).seen
    names = [tag for tag, _ in elements]
    assert "script" not in names
    assert not {"link", "img", "iframe"} & set(names)
    for _, attributes in elements:
        for key in ("href", "xlink:href", "src"):
            assert (attributes.get(key) or "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import", text)
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for each in sections(found):
        assert each.key in ids
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == len(titles()) == sum(len(each.charts) for each in sections(found))
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.get("aria-label")
        assert root.get("viewBox")
        assert not re.search("#0[1-5]0[1-5]0[1-5]", drawing), "a colour that no page can change"
    # Every chart has a table beside it.
    assert names.count("table") >= len(drawings)


def test_words_of_others_cannot_become_markup(dataset: Dataset) -> None:
    with dataset.reader() as reader:
        from draftmill.tools.report.gather import gather

        facts = gather(reader.manifest, dataset.prompts_dir)
        now = reader.summary()
    evil = "<script>alert(1)</script>\"&'`$x_1$"
    for row in facts.sources:
        row["source"] = evil
    for row in facts.error_classes:
        row["example"] = row["error_class"] = evil
    for row in facts.control:
        row["endpoint"] = row["decision"] = evil
    text = page(document(facts, now, dataset=evil, now=0.0))
    assert "<script" not in text
    assert "script" not in [tag for tag, _ in Elements(text).seen]
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no browser is installed")
@pytest.mark.parametrize("width", [1200, 600])
def test_a_browser_shows_it(found: dict[str, Any], tmp_path: Path, width: int) -> None:
    target = tmp_path / "report.html"
    target.write_text(page(found))
    seen = browser.evaluate(
        target,
        """{
          wide: document.documentElement.scrollWidth, window: innerWidth,
          headings: [...document.querySelectorAll('h2')].filter(e => e.offsetHeight > 0).length,
          drawings: [...document.querySelectorAll('svg')].map(
            e => e.getBoundingClientRect().height),
          outside: [...document.querySelectorAll('svg text')].filter(e => {
            const t = e.getBoundingClientRect();
            const s = e.closest('svg').getBoundingClientRect();
            return t.left < s.left - 2 || t.right > s.right + 2 || t.top < s.top - 2;
          }).map(e => e.textContent),
        }""",
        width=width,
    )
    assert seen["wide"] <= seen["window"], "the page scrolls sideways"
    assert seen["headings"] == len(sections(found))
    assert all(height > 80 for height in seen["drawings"])
    assert seen["outside"] == []


def test_rows_without_lengths_have_no_part_in_the_mean() -> None:
    groups = [
        {"name": "extracted", "rows": 3, "mean": None},
        {"name": "stop", "rows": 2, "mean": 7},
    ]
    for mean, rows in ((7.0, groups), (None, groups[:1])):
        facts: Any = SimpleNamespace(
            groups=[{**row, "name": GROUPS[n]} for n, row in enumerate(rows)], sources=[]
        )
        assert bias(facts, None)["mean_completion_tokens"] == mean
