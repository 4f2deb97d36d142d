"""Journal of a server: sessions, models, samplers, requests and their results, in SQLite.

Whatever a client was told is in the journal before. With write-ahead logging, a commit survives the
end of the process; a crash of the machine may lose the last commits, never the consistency.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_jax.errors import ConfigError

FILE = "journal.sqlite"

_SCHEMA = """
create table if not exists server (key text primary key, value text);
create table if not exists sessions (id text primary key, fields text, is_open integer);
create table if not exists models (
    id text primary key, session text, fields text, is_open integer, created real,
    snapshot_seq integer, snapshot text, step integer
);
create table if not exists samplers (
    id text primary key, session text, path text, is_open integer
);
create table if not exists requests (
    id text primary key, owner text, seq integer, kind text, body blob, digest text, created real,
    status text, result blob
);
create index if not exists requests_of_owner on requests (owner, seq);
create table if not exists checkpoints (
    path text primary key, model text, kind text, created real, size integer, fields text
);
"""


@dataclass(slots=True)
class ModelRow:
    """A model."""

    id: str
    session: str
    fields: dict[str, Any]
    """rank, targets, seed, user_metadata."""
    is_open: bool = True
    created: float = 0.0
    snapshot_seq: int = -1
    """Last operation that the snapshot contains; -1: there is no snapshot."""
    snapshot: str = ""
    step: int = 0
    """Optimizer steps of the snapshot."""


@dataclass(slots=True)
class RequestRow:
    """A request for a future."""

    id: str
    owner: str
    """Id of a model or a sampler."""
    seq: int
    kind: str
    body: bytes
    digest: str
    created: float = 0.0
    status: str = "pending"
    """`pending`; `protobuf` or `json`, the form of the result; `error`, without any effect; or
    `dropped`, an error that dropped the gradients."""
    result: bytes = b""


@dataclass(slots=True)
class CheckpointRow:
    """Weights that have a tinker:// path."""

    path: str
    model: str
    kind: str
    """`training` or `sampler`."""
    created: float
    size: int
    fields: dict[str, Any] = field(default_factory=dict)


class Journal:
    """The journal of a run folder. One process has it open; only its event loop calls it.

    It has more than 200 lines because it holds every statement on the tables.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the journal.

        Raises:
            ConfigError: another server has the run folder open, or the file is no journal.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # It holds the key and the data of clients.
        (folder / FILE).touch(mode=0o600)
        # Calls are serialized by the event loop, which may run in another thread than this.
        self._db = sqlite3.connect(folder / FILE, timeout=0.5, check_same_thread=False)
        try:
            self._db.execute("pragma locking_mode=exclusive")
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=normal")
            self._db.executescript(_SCHEMA)
            self._db.execute("begin immediate")
            self._db.commit()
        except sqlite3.Error as error:
            self._db.close()
            raise ConfigError(
                f"run_folder={folder}: cannot open {FILE} ({error}); another server may use it, "
                "set run_folder to another folder"
            ) from error

    def close(self) -> None:
        self._db.close()

    def value(self, key: str, default: str) -> str:
        """Return a value of the server, and store the default if there is none."""
        with self._db:
            self._db.execute("insert or ignore into server values (?, ?)", (key, default))
        (found,) = self._db.execute("select value from server where key = ?", (key,)).fetchone()
        return found

    # Sessions and samplers.

    def add_session(self, session: str, fields: dict[str, Any]) -> None:
        with self._db:
            self._db.execute("insert into sessions values (?, ?, 1)", (session, json.dumps(fields)))

    def sessions(self) -> Iterator[tuple[str, dict[str, Any], bool]]:
        for session, fields, is_open in self._db.execute("select * from sessions").fetchall():
            yield session, json.loads(fields), bool(is_open)

    def end_session(self, session: str) -> None:
        """End a session with its models and samplers."""
        with self._db:
            self._db.execute("update sessions set is_open = 0 where id = ?", (session,))
            self._db.execute("update models set is_open = 0 where session = ?", (session,))
            self._db.execute("update samplers set is_open = 0 where session = ?", (session,))

    def add_sampler(self, sampler: str, session: str, path: str) -> None:
        with self._db:
            self._db.execute(
                "insert or replace into samplers values (?, ?, ?, 1)", (sampler, session, path)
            )

    def samplers(self) -> list[tuple[str, str, str]]:
        """Id, session and path of every open sampler."""
        return self._db.execute("select id, session, path from samplers where is_open").fetchall()

    # Models.

    def add_model(self, row: ModelRow) -> None:
        with self._db:
            self._db.execute(
                "insert or replace into models values (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.id,
                    row.session,
                    json.dumps(row.fields),
                    int(row.is_open),
                    row.created or time.time(),
                    row.snapshot_seq,
                    row.snapshot,
                    row.step,
                ),
            )

    def models(self) -> list[ModelRow]:
        """List all models, also those that were unloaded."""
        return [
            ModelRow(id_, session, json.loads(fields), bool(is_open), *rest)
            for id_, session, fields, is_open, *rest in self._db.execute(
                "select * from models order by created"
            )
        ]

    def close_model(self, model: str) -> None:
        with self._db:
            self._db.execute("update models set is_open = 0 where id = ?", (model,))

    def set_snapshot(
        self, model: str, seq: int, snapshot: str, step: int, expired_s: float
    ) -> None:
        """Store where a model's snapshot is, and delete its requests of before that have expired.

        Args:
            model: the model.
            seq: last operation in the snapshot.
            snapshot: its folder.
            step: optimizer steps.
            expired_s: requests that are older may be deleted.
        """
        with self._db:
            self._db.execute(
                "update models set snapshot_seq = ?, snapshot = ?, step = ? where id = ?",
                (seq, snapshot, step, model),
            )
            # The bodies of what the snapshot contains are never computed again.
            self._db.execute(
                "update requests set body = x'' "
                "where owner = ? and seq <= ? and status != 'pending'",
                (model, seq),
            )
            self._db.execute(
                "delete from requests where owner = ? and seq <= ? and created < ?",
                (model, seq, time.time() - expired_s),
            )

    # Requests.

    def delete_closed(self, expired_s: float) -> None:
        """Delete the requests of models and samplers that have ended, if they are older."""
        with self._db:
            self._db.execute(
                "delete from requests where created < ? "
                "and owner not in (select id from models where is_open) "
                "and owner not in (select id from samplers where is_open)",
                (time.time() - expired_s,),
            )

    def add_request(self, row: RequestRow) -> None:
        row.created = row.created or time.time()
        with self._db:
            self._db.execute(
                "insert into requests values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.id,
                    row.owner,
                    row.seq,
                    row.kind,
                    row.body,
                    row.digest,
                    row.created,
                    row.status,
                    row.result,
                ),
            )

    def request(self, request: str) -> RequestRow | None:
        """Return a request with its result; None if there is none, or no longer."""
        row = self._db.execute("select * from requests where id = ?", (request,)).fetchone()
        return None if row is None else RequestRow(*row)

    def finish_request(self, request: str, status: str, result: bytes) -> None:
        with self._db:
            self._db.execute(
                "update requests set status = ?, result = ? where id = ?",
                (status, result, request),
            )

    def requests(self, owner: str, after: int = -2) -> list[RequestRow]:
        """List the requests of a model or sampler with a higher number, in order."""
        return [
            RequestRow(*row)
            for row in self._db.execute(
                "select * from requests where owner = ? and seq > ? order by seq", (owner, after)
            )
        ]

    def expire_requests(self, owner: str, expired_s: float) -> list[str]:
        """Delete finished requests of a sampler that are older; return their ids."""
        limit = time.time() - expired_s
        which = "where owner = ? and status != 'pending' and created < ?"
        ids = [
            row[0] for row in self._db.execute(f"select id from requests {which}", (owner, limit))
        ]
        if ids:
            with self._db:
                self._db.execute(f"delete from requests {which}", (owner, limit))
        return ids

    # Checkpoints.

    def add_checkpoint(self, row: CheckpointRow) -> None:
        with self._db:
            self._db.execute(
                "insert or replace into checkpoints values (?, ?, ?, ?, ?, ?)",
                (row.path, row.model, row.kind, row.created, row.size, json.dumps(row.fields)),
            )

    def delete_checkpoint(self, path: str) -> None:
        with self._db:
            self._db.execute("delete from checkpoints where path = ?", (path,))

    def checkpoints(self) -> list[CheckpointRow]:
        """List all checkpoints, oldest first."""
        return [
            CheckpointRow(path, model, kind, created, size, json.loads(fields))
            for path, model, kind, created, size, fields in self._db.execute(
                "select * from checkpoints order by created"
            )
        ]
