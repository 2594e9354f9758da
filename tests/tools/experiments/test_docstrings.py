"""Questions and answers from docstrings: what is taken, in which order, and that it repeats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.manifests.errors import UsageError
from draftmill.tools.bench.experiments import docstrings
from draftmill.tools.bench.experiments.docstrings import (
    collect,
    package_folders,
    read_origins,
    write_pairs,
)

GOOD = "Says what this does in a sentence. " + "It goes on with details. " * 12
# name of the file → (definitions that give a pair, definitions that give none)
PACKAGE = {
    "plain.py": ("first second", "_private"),
    "deep/er.py": ("third", ""),
    "tests/of_it.py": ("", "fourth"),
    "broken.py": ("", ""),
}


def docstring(name: str) -> str:
    return f"{name.capitalize()} the text of it. {GOOD}"


def package(folder: Path) -> Path:
    for name, (good, bad) in PACKAGE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(
                f'def {each}(value, *, other=1):\n    """{docstring(each)}"""\n\n'
                for each in (good + " " + bad).split()
            )
        )
    (folder / "broken.py").write_text("def not python(")
    return folder


def test_public_documented_code_outside_tests_is_taken(tmp_path: Path) -> None:
    pairs = list(collect({"thing": package(tmp_path)}))
    assert {pair.answer for pair in pairs} == {
        docstring(name).strip() for name in ("first", "second", "third")
    }
    for pair in pairs:
        assert pair.package == "thing"
        assert "(value)`" in pair.question
        assert "Python package thing" in pair.question


def test_methods_are_asked_for_without_self(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        f'class Box:\n    """{docstring("box")}"""\n'
        f'    def open(self, key):\n        """{docstring("open")}"""\n'
        f'    def _shut(self):\n        """{docstring("shut")}"""\n'
    )
    questions = [pair.question for pair in collect({docstrings.PYTHON: tmp_path})]
    assert len(questions) == 2
    assert any("`Box`" in each for each in questions)
    assert any("`Box.open(key)`" in each for each in questions)
    assert all("Python standard library" in each for each in questions)


@given(
    text=st.one_of(
        st.just("Too short."),
        st.just(GOOD * 20),
        st.just(f"Args:\n    value: {GOOD}"),
        st.just(f"{GOOD} {{placeholder}}"),
        st.just(f"{GOOD} %(placeholder)s"),
    )
)
def test_what_is_no_answer_is_left_out(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("package")
    (folder / "a.py").write_text(f"def thing():\n    {text!r}\n")
    assert list(collect({"thing": folder})) == []


def test_alike_answers_are_taken_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"def {name}():\n    {GOOD + name!r}\n")
    assert len(list(collect({"thing": tmp_path}))) == 1


def test_files_of_a_real_environment(tmp_path: Path) -> None:
    origins = write_pairs(tmp_path / "one", train=40, held_out=5, packages=("click", "no_such"))
    assert write_pairs(tmp_path / "two", train=40, held_out=5, packages=("click",)) == origins
    assert read_origins(tmp_path / "one") == origins
    assert sum(origin.pairs for origin in origins) == 45
    by_name = {origin.package: origin for origin in origins}
    assert set(by_name) == {"python", "click"}
    assert by_name["click"].licence == "BSD-3-Clause"
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    rows = {
        name: [json.loads(line) for line in (tmp_path / "one" / name).read_text().splitlines()]
        for name in ("train.jsonl", "held_out.jsonl")
    }
    assert [len(rows[name]) for name in rows] == [40, 5]
    asked = [row["messages"][0]["content"] for part in rows.values() for row in part]
    assert len(set(asked)) == 45
    for part in rows.values():
        for row in part:
            assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_more_training_leaves_the_held_out_ones(tmp_path: Path) -> None:
    for name, count in (("few", 10), ("more", 30)):
        write_pairs(tmp_path / name, train=count, held_out=4, packages=())
    few, more = (
        {part: (tmp_path / name / part).read_text().splitlines() for part in FILES}
        for name in ("few", "more")
    )
    assert few["held_out.jsonl"] == more["held_out.jsonl"]
    assert few["train.jsonl"] == more["train.jsonl"][:10]
    assert not set(more["held_out.jsonl"]) & set(more["train.jsonl"])


FILES = ("train.jsonl", "held_out.jsonl")


def test_too_few_docstrings_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {"thing": package(tmp_path / "thing")}
    monkeypatch.setattr(docstrings, "package_folders", lambda packages: folders)
    with pytest.raises(UsageError, match="docstrings to train on where 100 are wanted"):
        write_pairs(tmp_path / "out", train=100, held_out=1)
    assert read_origins(tmp_path / "out") == []


def test_packages_that_are_not_installed_are_left_out() -> None:
    assert set(package_folders(("no_such_package",))) == {docstrings.PYTHON}
