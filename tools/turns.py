"""Which stages of a build are still to do, and which of them one server can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from draftmill.manifests.writer import DatasetWriter
from draftmill.tools.render import say

Kind = Literal["generate", "extract"]


def turns(
    stages: Sequence[Kind], urls: Mapping[Kind, Sequence[str]], writer: DatasetWriter
) -> Iterator[list[Kind]]:
    """Stages that have something to do, those together that one server of ours can do.

    Where every answer is given already (mode prefill), generate only tokenises: no model is loaded
    for that when the extraction server comes next anyway.
    """
    left = list(stages)
    while left:
        stage = left.pop(0)
        if not writer.count("pending" if stage == "generate" else "generated"):
            say(f"{stage}: nothing to do")
            continue
        given = stage == "generate" and writer.count("pending") == writer.count(
            "pending", off_policy=True
        )
        if given and left == ["extract"] and not urls["generate"] and not urls["extract"]:
            say("all answers are given (mode prefill): the extraction server tokenises them")
            yield [stage, left.pop()]
        else:
            yield [stage]
