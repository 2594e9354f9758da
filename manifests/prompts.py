"""Prompt files against the manifest: whether they are there, whole, and of the same dataset.

Reads prompt files, changes nothing. What follows from a fault is for the callers to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.manifests import schema
from draftmill.manifests.manifest import Manifest

ADVICE = "restore it from a copy; without it its prompts cannot be asked"


def stranger(manifest: Manifest, paths: Mapping[int, Path]) -> str | None:
    """What shows that the manifest was made of other prompt files; None if nothing does.

    Looks at the first row of the first and of the last file that both have: cheap enough for
    every start, and enough for a manifest that was copied from somewhere else.
    """
    known = dict(manifest.rows("SELECT file, min(id) FROM prompts GROUP BY file"))
    both = sorted(known.keys() & paths.keys())
    for number in {*both[:1], *both[-1:]}:
        try:
            with pq.ParquetFile(paths[number]) as file:
                row = file.read_row_group(0, columns=["id", "hash"]).slice(0, 1).to_pylist()[0]
        except (OSError, pa.ArrowException, LookupError):
            continue  # damaged, which `faults` tells
        wanted = manifest.rows("SELECT id, hash FROM prompts WHERE id = ?", [known[number]])[0]
        if wanted != (row["id"], row["hash"]):
            return (
                f"prompts/{paths[number].name} begins with prompt {row['id']} {row['hash']}, the "
                f"manifest has {wanted[0]} {wanted[1]} there"
            )
    return None


def faults(manifest: Manifest, paths: Mapping[int, Path]) -> Iterator[tuple[str, str]]:
    """(name, reason) of every prompt file that is missing, damaged or not what was added."""
    known = dict(manifest.rows("SELECT file, count(*) FROM prompts GROUP BY file"))
    for number in sorted(known.keys() | paths.keys()):
        name = f"{number:06d}.parquet"
        if number not in paths:
            yield name, f"the file is missing; {ADVICE}"
        elif (reason := _fault(manifest, number, paths[number], known.get(number))) is not None:
            yield name, reason


def _fault(manifest: Manifest, number: int, path: Path, count: int | None) -> str | None:
    try:
        table = pq.read_table(
            path, columns=schema.PROMPT_FILE.names, page_checksum_verification=True
        ).select(["id", "hash"])
    except (OSError, pa.ArrowException, LookupError) as error:
        return f"{str(error).splitlines()[0]}; {ADVICE}"
    if count is None:
        return None  # of an add that was interrupted: the next writer takes it in
    with manifest.batch("of_file", table):
        same = manifest.rows(
            "SELECT count(*) FROM of_file SEMI JOIN (SELECT id, hash FROM prompts WHERE file = ?) "
            "USING (id, hash)",
            [number],
        )[0][0]
    if (same, table.num_rows) != (count, count):
        return f"has {table.num_rows} prompts, {same} of the {count} that were added; {ADVICE}"
    return None
