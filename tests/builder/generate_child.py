"""A process that generates and may be killed: ... -m tests.builder.generate_child PATH URL JSON.

Appends the id of every acknowledged completion to DATASET.acknowledged after its commit returned.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from draftmill.builder.generation.stage import GenerateSettings, generate
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.types import Result
from draftmill.manifests.writer import DatasetWriter
from tests.builder.generation import QUICK


def main(path: str, url: str, settings: str) -> None:
    log = os.open(f"{path}.acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    commit = DatasetWriter.commit

    def logged(self: DatasetWriter, results: Sequence[Result]) -> None:
        commit(self, results)
        ids = [each.attempt.id for each in results if each.attempt.outcome == "generated"]
        os.write(log, "".join(f"{identity}\n" for identity in ids).encode())

    DatasetWriter.commit = logged  # type: ignore[method-assign]
    with Dataset.open(path).writer() as writer:
        os.write(1, b"ready\n")
        report = asyncio.run(
            generate(writer, GenerateSettings(**QUICK | json.loads(settings)), [url])
        )
    sys.exit(0 if report.stopped is None else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
