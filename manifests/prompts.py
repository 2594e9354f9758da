"""Prompt files and the manifest: how prompts get into both, and whether the two still agree.

What follows from a fault is for the callers to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.manifests import files, queries, schema
from draftmill.manifests.layout import Layout
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.types import Prompt

ADVICE = "restore it from a copy; without it its prompts cannot be asked"


def add_batch(layout: Layout, manifest: Manifest, batch: Sequence[Prompt]) -> int:
    """Write the prompts whose hash is new to a file of their own, then into the manifest as
    pending rows, in the order given; returns how many."""
    unknown = queries.unknown(manifest, [prompt.hash for prompt in batch])
    fresh: list[Prompt] = []
    for prompt in batch:
        if prompt.hash in unknown:
            unknown.discard(prompt.hash)
            fresh.append(prompt)
    if not fresh:
        return 0
    first = queries.max_id(manifest) + 1
    rows = {
        "id": list(range(first, first + len(fresh))),
        **{
            name: [getattr(prompt, name) for prompt in fresh]
            for name in schema.PROMPT_FILE.names[1:]
        },
    }
    numbers = {*layout.prompt_files(), *queries.prompt_files(manifest)}
    number = max(numbers, default=-1) + 1
    path = layout.prompt_file(number)
    temporary = path.with_name(f".{path.name}.tmp")
    with files.disk_full_is_budget(path):
        # Small row groups: a claim of some hundred ids then reads little.
        pq.write_table(
            pa.Table.from_pydict(rows, schema=schema.PROMPT_FILE),
            temporary,
            compression="zstd",
            row_group_size=2048,
            write_page_checksum=True,
        )
        files.publish(temporary, path, "prompts")
    return manifest.insert_prompts(number, path)


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
