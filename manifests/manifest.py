"""The manifest: one DuckDB database per dataset, and the only module that knows DuckDB.

Owns tables, transactions and queries. Order of writing payload and manifest is left to `dataset`,
what a crash leaves behind to `recovery`.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from draftmill.manifests import files, schema
from draftmill.manifests.errors import BudgetError, DatasetError, LockedError, UsageError
from draftmill.manifests.types import Attempt, Stage

_LOCK_WAIT_S = 5.0
# A state that a prompt may take as the direct outcome of an attempt.
_STATE_OUTCOMES = {"generated", "extracted", "timed_out", "failed", "rejected"}


_KIND = duckdb.StatementType
# PIVOT is made of several statements.
_QUESTIONS = (_KIND.SELECT, _KIND.EXPLAIN, _KIND.PRAGMA, _KIND.CALL, _KIND.MULTI)

# What a query can raise, for callers that look after it themselves.
QueryError = duckdb.Error


class ManifestDamaged(DatasetError):
    """The database file cannot be opened; it can be rebuilt from prompts and shards."""


class Manifest:
    """An open manifest. Not thread-safe: callers hold one lock around it (see `dataset`)."""

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self.path = path
        self._db = _connect(path, read_only)
        if read_only:
            self._check_schema()
            self._db.execute(schema.CURRENT_VIEW.format(temporary="TEMP"))
            return
        # Rows stay in memory until a checkpoint; one at every commit would cost more than all else.
        self._db.execute("SET checkpoint_threshold = '32MB'")
        # A commit's statements are tiny: handing them to other threads costs more than it brings.
        self._db.execute("SET threads = 1")
        if not self._db.execute("SELECT 1 FROM duckdb_tables() LIMIT 1").fetchall():
            with self.transaction("create"):
                self._db.execute(schema.TABLES)
                self._db.execute(schema.CURRENT_VIEW.format(temporary=""))
                self.set_meta("schema_version", schema.SCHEMA_VERSION)
        self._check_schema()

    def _check_schema(self) -> None:
        try:
            found = self.meta("schema_version")
        except duckdb.Error as error:
            raise DatasetError(f"{self.path} is not a manifest of draftmill") from error
        if found != schema.SCHEMA_VERSION:
            raise DatasetError(
                f"{self.path} has schema version {found}, this draftmill reads "
                f"{schema.SCHEMA_VERSION}. Use the draftmill version that wrote it."
            )

    def close(self) -> None:
        """Close the database; DuckDB writes its checkpoint."""
        self._db.close()

    @contextmanager
    def transaction(self, label: str) -> Iterator[None]:
        """Everything inside becomes durable together, or not at all."""
        files.reach(f"commit.{label}.before")
        try:
            self._db.begin()
            try:
                yield
            except BaseException:
                try:
                    self._db.rollback()
                except duckdb.Error:
                    pass  # the error that is already on its way says more
                raise
            self._db.commit()
        except duckdb.Error as error:
            if "No space left" not in str(error):
                raise
            raise BudgetError(
                f"{self.path}: no space left on the disk. Free some; what was committed is safe."
            ) from error
        if files.observer is not None:
            files.observer("commit", self.path or Path(), {"label": label})
        files.reach(f"commit.{label}.after")

    # -- facts about the dataset -------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        """A value of the table `meta`, or None."""
        found = self.rows("SELECT value FROM meta WHERE key = ?", [key])
        return str(found[0][0]) if found else None

    def set_meta(self, key: str, value: str) -> None:
        """Set a value of the table `meta`."""
        self._db.execute("DELETE FROM meta WHERE key = ?", [key])
        self._db.execute("INSERT INTO meta VALUES (?, ?)", [key, value])

    def table(self, query: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """The result of a query as an Arrow table."""
        return self._db.sql(query, params=list(parameters)).to_arrow_table()

    def run(self, query: str, parameters: Sequence[Any] = ()) -> None:
        """A statement whose result nobody needs."""
        self._db.execute(query, list(parameters))

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The result of a query as tuples."""
        return self._db.execute(query, list(parameters)).fetchall()

    def user_query(self, query: str) -> pa.Table:
        """A query that a person typed; its errors become a UsageError with DuckDB's words."""
        try:
            # A question must not write files, nor change the settings that forbid it.
            self._db.execute("SET enable_external_access = false")
            # Nor is a misspelt table one of this program's variables.
            self._db.execute("SET python_enable_replacements = false")
            statements = duckdb.extract_statements(query)
            if len(statements) > 1 or any(each.type not in _QUESTIONS for each in statements):
                raise UsageError(f"{query!r} is more than a question; write one SELECT")
            found = self._db.sql(query)
            # The rows come now, and with them errors that only some rows have.
            table = None if found is None else found.to_arrow_table()
        except duckdb.Error as error:
            raise UsageError(str(error)) from error
        if table is None:
            raise UsageError(f"{query!r} asks nothing; write a SELECT")
        return table.rename_columns(_distinct(table.column_names))

    # -- prompts -----------------------------------------------------------------------------

    def insert_prompts(self, number: int, path: Path) -> int:
        """Insert the rows of the prompt file `number` as pending; returns how many."""
        with self.transaction("prompts"):
            self._db.execute(
                "INSERT INTO prompts SELECT id, hash, source, row, conversation_id, off_policy, ? "
                "FROM read_parquet(?) ORDER BY id",
                [number, str(path)],
            )
            self._db.execute(
                "INSERT INTO state SELECT id, 'pending', NULL, 0, NULL, NULL "
                "FROM prompts WHERE file = ? ORDER BY id",
                [number],
            )
        return int(self.rows("SELECT count(*) FROM prompts WHERE file = ?", [number])[0][0])

    # -- commits -----------------------------------------------------------------------------

    def commit(
        self, attempts: Sequence[Attempt], payloads: pa.Table, sealed: Sequence[tuple[str, int]]
    ) -> None:
        """Append attempts and payload offsets and update the rows' states, in one transaction."""
        with self.transaction("results"):
            self._append(attempts, payloads)
            self._update_states(attempts)
            for kind, number in sealed:
                self._seal_row(kind, number)

    def adopt(
        self, attempts: Sequence[Attempt], payloads: pa.Table, changes: Sequence[Attempt]
    ) -> None:
        """Take over records found on disk: their history, their offsets, and `changes` of state."""
        with self.transaction("adopt"):
            self._append(attempts, payloads)
            self._update_states(changes)

    def _append(self, attempts: Sequence[Attempt], payloads: pa.Table) -> None:
        self._insert("attempts", schema.attempt_rows(attempts))
        self._insert("payloads", payloads)

    def _insert(self, table: str, new_rows: pa.Table) -> None:
        # DuckDB finds the Arrow table by the name of the variable: `batch` would cost 2 ms more.
        if new_rows.num_rows:
            self._db.execute(f"INSERT INTO {table} SELECT * FROM new_rows")

    def _update_states(self, attempts: Sequence[Attempt]) -> None:
        changes: dict[int, dict[str, Any]] = {}
        # In attempt order, so that the highest attempt of a row in this batch decides.
        for attempt in sorted(attempts, key=lambda a: (a.id, a.attempt)):
            change = changes.setdefault(attempt.id, {"id": attempt.id})
            change["attempts"] = attempt.attempt
            if attempt.outcome in _STATE_OUTCOMES:
                change["state"], change["stage"] = attempt.outcome, attempt.stage
            if attempt.outcome == "generated":
                # A new completion makes the hidden states of the old one worthless.
                change["generate_payload"], change["extract_payload"] = attempt.attempt, None
            elif attempt.outcome == "extracted":
                change["extract_payload"] = attempt.attempt
        # Planning is most of what an UPDATE costs: one for all rows that change the same columns.
        alike: dict[frozenset[str], list[dict[str, Any]]] = {}
        for change in changes.values():
            alike.setdefault(frozenset(change), []).append(change)
        for columns, rows in alike.items():
            self._update(schema.state_rows(columns, rows))

    def _update(self, changes: pa.Table) -> None:
        """Set the columns that `changes` has in the rows with its ids."""
        values = ", ".join(
            f"{name} = greatest(state.{name}, c.{name})"
            if name == "attempts"
            else f"{name} = c.{name}"
            for name in changes.column_names
            if name != "id"
        )
        self._db.execute(f"UPDATE state SET {values} FROM changes c WHERE state.id = c.id")

    def revert(self, ids: Sequence[int], outcome: str, reason: str, stage: Stage | None) -> int:
        """Put rows back to the last state that their payloads support; `attempts` says why.

        stage "extract" forgets hidden states, "generate" completion and hidden states; None keeps
        both (a retry: the old completion stays current until its replacement is committed, but
        the row is asked again). Returns how many rows changed.
        """
        if not ids:
            return 0
        batch = pa.table({"id": pa.array(sorted(ids), pa.int64())})
        with self.batch("reverted", batch):
            self._db.execute(
                "INSERT INTO attempts(id, stage, attempt, outcome, error, started_at) "
                "SELECT s.id, coalesce(?, s.stage, 'generate'), s.attempts, ?, ?, ? "
                "FROM state s SEMI JOIN reverted USING (id) ORDER BY s.id",
                [stage, outcome, reason, time.time()],
            )
            if stage == "extract":
                change = "state = 'generated', stage = NULL, extract_payload = NULL"
            elif stage == "generate":
                change = (
                    "state = 'pending', stage = NULL, generate_payload = NULL, "
                    "extract_payload = NULL"
                )
            else:
                change = (
                    "state = CASE WHEN state.stage = 'extract' AND state.state <> 'extracted' "
                    "THEN 'generated'::row_state ELSE 'pending'::row_state END, stage = NULL"
                )
            self._db.execute(f"UPDATE state SET {change} FROM reverted r WHERE state.id = r.id")
        return int(batch.num_rows)

    # -- shards ------------------------------------------------------------------------------

    def _seal_row(self, kind: str, number: int) -> None:
        stage = "generate" if kind == "completions" else "extract"
        self._db.execute("DELETE FROM shards WHERE kind = ? AND number = ?", [kind, number])
        self._db.execute(
            "INSERT INTO shards SELECT ?, ?, 'sealed', count(*), sum(tokens), sum(raw_bytes), "
            "sum(length) FROM payloads WHERE stage = ? AND shard = ?",
            [kind, number, stage, number],
        )

    def set_shard(self, kind: str, number: int, state: str) -> None:
        """Record a shard as `sealed` (with its totals) or `evicted`."""
        if state == "sealed":
            self._seal_row(kind, number)
            return
        self._db.execute(
            "UPDATE shards SET state = ? WHERE kind = ? AND number = ?", [state, kind, number]
        )

    def add_control(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append decisions of the generation controller."""
        names = (
            "time",
            "endpoint",
            "limit",
            "running",
            "waiting",
            "kv_usage",
            "tokens_per_s",
            "decision",
        )
        batch = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
        with self.transaction("control"), self.batch("new_control", batch):
            self._db.execute("INSERT INTO control SELECT * FROM new_control")

    @contextmanager
    def batch(self, name: str, table: pa.Table) -> Iterator[None]:
        """Make an Arrow table visible to queries under `name`."""
        # Arrow insert: executemany runs one statement for each row.
        self._db.register(name, table)
        try:
            yield
        finally:
            self._db.unregister(name)


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of columns, each one once: `id, id` as `id, id_1`."""
    found: list[str] = []
    for name in names:
        free = (f"{name}_{n}" if n else name for n in itertools.count())
        found.append(next(each for each in free if each not in found))
    return found


def _connect(path: Path | None, read_only: bool) -> duckdb.DuckDBPyConnection:
    if path is None:
        return duckdb.connect(":memory:")
    # A reader may hold the file for a moment while a writer starts; that is not worth an error.
    give_up = time.monotonic() + (0.0 if read_only else _LOCK_WAIT_S)
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only)
        except duckdb.Error as error:
            text = str(error)
            if "lock" in text.lower() and "onflicting" in text:
                if time.monotonic() < give_up:
                    time.sleep(0.1)
                    continue
                match = re.search(r"PID (\d+)", text)
                pid = int(match.group(1)) if match else None
                raise LockedError(
                    f"{path.parent} is open in another process"
                    + (f" (PID {pid})" if pid else "")
                    + ". Wait until it ends, or stop it.",
                    pid=pid,
                ) from error
            _check_usable(path, read_only)
            raise ManifestDamaged(
                f"{path} is damaged ({text.splitlines()[0]}). `draftmill verify {path.parent} "
                "--repair` rebuilds it from prompts and shards."
            ) from error


def _check_usable(path: Path, read_only: bool) -> None:
    """Raises DatasetError for a file that the system does not let us open: that is no damage."""
    try:
        os.close(os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC))
    except IsADirectoryError:
        return
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be opened: {error.strerror}. Use the dataset as the user who writes it."
        ) from error
