"""Reader of `ascend_pytorch_profiler*.db`: one SQLite file with all times in unix ns.

STRING_IDS contains the names. `globalTid` is `pid << 32 | tid`. Each producer orders columns differently, and
lower profiler levels write fewer tables, so tables and columns are looked up by name. In PYTORCH_API the
times are text. Format: the reference of msprof's database, and torch_npu's own writer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, TypeAlias

from stepscope.errors import RecordError
from stepscope_npu._layers import layer_category
from stepscope_report.timeline.readers import (
    Event,
    Flow,
    Instant,
    Notes,
    Origin,
    Slice,
    Track,
    clock_of,
)

BACKWARDS = "events that end before they begin"
NO_TIME = "events without a time"
_NAMES = 100_000
"""Number of names in the cache at which the cache is emptied."""
_API_TYPES = {50001: "cpu_op", 50002: "queue", 50003: "python_function", 50004: "user_annotation"}
_MARKS = (0, 3)
"""Values of `MSTX_EVENTS.eventType` for marks; 1 and 2 are ranges."""
_Key: TypeAlias = tuple[str, object, object]


class Database:
    """An open database. `correction_ns` is added to its times, unless they contain times of CANN."""

    def __init__(self, path: Path, notes: Notes, correction_ns: int, origin: Origin) -> None:
        self._notes = notes
        self._tracks: dict[_Key, int] = {}
        self._names: dict[int, str] = {}
        self._device = 0
        """The device of a collective for which the file names no device."""
        with ExitStack() as failing:
            try:
                self._database = failing.enter_context(closing(_connect(path)))
                self._columns = _columns(self._database)
            except sqlite3.Error as error:
                raise RecordError(f"damaged: {error}") from error
            if "STRING_IDS" not in self._columns:
                tables = ", ".join(sorted(self._columns)[:5]) or "none"
                raise RecordError(
                    f"no timeline of the Ascend profiler: it has no table STRING_IDS; its tables: {tables}. "
                    "Fix: `msprof --export=on --type=db --output=PROF_...` writes a timeline"
                )
            with suppress(sqlite3.Error):  # a damaged table is reported when its events are read
                origin = self._completed(origin)
            failing.pop_all()
        by_cann = {"TASK", "CANN_API", "MSTX_EVENTS"} & set(self._columns)
        self._shift_ns = 0 if by_cann else correction_ns
        self.origin = origin

    def close(self) -> None:
        self._database.close()

    def events(self) -> Iterator[Event]:
        reads: list[Callable[[], Iterator[Event]]] = [
            self._steps,
            self._operators,
            self._ranges,
            self._calls,
            self._tasks,
            self._communication,
            self._collections,
        ]
        for read in reads:
            try:
                yield from read()
            except sqlite3.Error as error:
                self._notes.file(f"damaged: {error}; a table, or the rest of it, is left out")

    def _steps(self) -> Iterator[Event]:
        for start, dur, number in self._rows("STEP_TIME", "id"):
            yield from self._declare(("steps", 0, 0), "Profiler steps", 0)
            yield self._slice(("steps", 0, 0), f"ProfilerStep#{number}", start, dur, None)

    def _operators(self) -> Iterator[Event]:
        for start, dur, name, thread, kind in self._rows("PYTORCH_API", "name", "globalTid", "type"):
            key = ("operators", _pid(thread), _tid(thread))
            yield from self._declare(key, f"thread {_tid(thread)}", 0, overlapping=kind == 50002)
            yield self._slice(key, self._name(name), start, dur, _API_TYPES.get(kind))

    def _ranges(self) -> Iterator[Event]:
        wanted = ("message", "globalTid", "eventType", "domainId")
        for start, dur, message, thread, kind, domain in self._rows("MSTX_EVENTS", *wanted):
            key = ("mstx", _pid(thread), _tid(thread))
            yield from self._declare(key, f"mstx thread {_tid(thread)}", 50, overlapping=True)
            name = self._name(message)
            args: dict[str, object] | None = None if domain is None else {"domain": self._name(domain)}
            if kind in _MARKS:
                yield Instant(track=self._tracks[key], name=name, at_ns=start, category="mstx", args=args)
            else:
                yield self._slice(key, name, start, dur, "user_annotation", args)

    def _calls(self) -> Iterator[Event]:
        linked = self._linked()
        for start, dur, name, thread, connection in self._rows(
            "CANN_API", "name", "globalTid", "connectionId"
        ):
            key = ("CANN", _pid(thread), _tid(thread))
            yield from self._declare(key, f"CANN thread {_tid(thread)}", 200, overlapping=True)
            args: dict[str, object] = {"correlation": connection}
            yield self._slice(key, self._name(name), start, dur, "cuda_runtime", args)
            if linked.get(connection) == start - self._shift_ns:
                yield self._flow(key, start, connection, "start")

    def _tasks(self) -> Iterator[Event]:
        linked, launched = self._linked(), set[int]()
        operator_of = self._lookup("COMPUTE_TASK_INFO")
        collective_of = self._lookup("COMMUNICATION_TASK_INFO", "COMMUNICATION_SCHEDULE_TASK_INFO")
        elsewhere = self._listed_elsewhere()
        wanted = ("deviceId", "streamId", "taskType", "globalTaskId", "connectionId")
        for start, dur, device, stream, kind, task, connection in self._rows("TASK", *wanted):
            key = ("device", device, stream)
            npu = f"NPU {device}"
            yield from self._declare(key, f"{npu} stream {stream}", 300, overlapping=True, device=npu)
            task_type = self._name(kind)
            name, collective = operator_of(task), collective_of(task)
            args: dict[str, object] = {"Task Type": task_type, "correlation": connection}
            if name is not None:
                category: str | None = "kernel"
            else:
                category = layer_category(task_type) if collective is None else "communication"
                category = None if category in elsewhere else category
                name = collective if category == "communication" else None
            if collective is not None:
                args["Collective"] = collective
            yield self._slice(key, name or task_type, start, dur, category, args)
            if connection in linked and connection not in launched:
                launched.add(connection)
                yield self._flow(key, start, connection, "end")

    def _listed_elsewhere(self) -> set[str]:
        """Return the categories that have a table of their own. A task that such a table does not list is not
        in the category, whatever its type.

        HCCL's kernels that wait have the task type `AI_CORE` too, but torch_npu counts only operators as
        computing. A collective has one row in COMMUNICATION_OP, and one row in TASK for each part.
        """
        tables = {
            "kernel": ("COMPUTE_TASK_INFO", "globalTaskId"),
            "communication": ("COMMUNICATION_OP", "opName"),
        }
        return {category for category, place in tables.items() if self._first(*place) is not None}

    def _communication(self) -> Iterator[Event]:
        wanted = ("opName", "groupName", "deviceId", "connectionId")
        for start, dur, name, group, device, connection in self._rows("COMMUNICATION_OP", *wanted):
            key = ("communication", group, device)
            npu = f"NPU {self._device if device is None else device}"
            label = f"Communication {self._name(group)}"
            yield from self._declare(key, label, 400, overlapping=True, device=npu)
            args: dict[str, object] = {"correlation": connection}
            yield self._slice(key, self._name(name), start, dur, "communication", args)

    def _completed(self, origin: Origin) -> Origin:
        """Return `origin`, completed by the clock, the host and the rank of this file. Also set `_device`."""
        host = self._first("HOST_INFO", "hostName")
        rank, device = self._first("RANK_DEVICE_MAP", "rankId"), self._first("RANK_DEVICE_MAP", "deviceId")
        self._device = device if isinstance(device, int) and device >= 0 else 0
        starts = (self._first(table, "startNs") for table in ("PYTORCH_API", "CANN_API", "TASK", "STEP_TIME"))
        return Origin(
            clock=clock_of(int(str(start)) for start in starts if start is not None),
            host=str(host) if host else origin.host,
            pid=origin.pid,
            rank=rank if isinstance(rank, int) and rank >= 0 else origin.rank,
        )

    def _first(self, table: str, column: str) -> object:
        if column not in self._columns.get(table, frozenset()):
            return None
        row = self._database.execute(f"SELECT {column} FROM {table} LIMIT 1").fetchone()
        return None if row is None else row[0]

    def _collections(self) -> Iterator[Event]:
        for start, dur, thread in self._rows("GC_RECORD", "globalTid"):
            key = ("gc", _pid(thread), _tid(thread))
            yield from self._declare(key, f"Python GC thread {_tid(thread)}", 100)
            yield self._slice(key, "GC", start, dur, "GC")

    def _rows(self, table: str, *wanted: str) -> Iterator[Any]:
        """Yield (start, duration, the wanted columns), ordered by start. An absent column is None."""
        has = self._columns.get(table, frozenset())
        if not {"startNs", "endNs"} <= has:
            if table in self._columns:
                self._notes.file(f"left out: {table} has no columns startNs and endNs")
            return
        columns = ", ".join(column if column in has else "NULL" for column in wanted)
        start, end = "CAST(startNs AS INTEGER)", "CAST(endNs AS INTEGER)"
        for row in self._database.execute(
            f"SELECT {start}, {end}, {columns} FROM {table} ORDER BY 1, 2 DESC"
        ):
            if type(row[0]) is not int or type(row[1]) is not int:
                self._notes.events(NO_TIME)
            elif row[1] < row[0]:
                self._notes.events(BACKWARDS)
            else:
                yield (row[0] + self._shift_ns, row[1] - row[0], *row[2:])

    def _linked(self) -> dict[int, int]:
        """Return {connection: start of its first call} for calls that started work on a device."""
        for table in ("CANN_API", "TASK"):
            if not {"startNs", "connectionId"} <= self._columns.get(table, frozenset()):
                return {}
        first_calls = self._database.execute(
            "SELECT connectionId, MIN(CAST(startNs AS INTEGER)) FROM CANN_API WHERE connectionId IN"
            " (SELECT connectionId FROM TASK) GROUP BY connectionId"
        )
        return dict(first_calls)

    def _lookup(self, *tables: str) -> Callable[[object], str | None]:
        """Return a function that maps a task to its name in one of these tables, or to None."""
        names = f"names_of_{tables[0]}"
        # Some of these tables have no index, so that each lookup would read a whole table.
        self._database.execute(f"CREATE TEMP TABLE {names} (task INTEGER PRIMARY KEY, name)")
        for table in tables:
            if {"globalTaskId", "name"} <= self._columns.get(table, frozenset()):
                self._database.execute(
                    f"INSERT OR IGNORE INTO {names} SELECT globalTaskId, name FROM {table}"
                    " WHERE typeof(globalTaskId) = 'integer'"
                )
        query = f"SELECT name FROM {names} WHERE task = ?"

        def look(task: object) -> str | None:
            row = self._database.execute(query, (task,)).fetchone()
            return None if row is None else self._name(row[0])

        return look

    def _name(self, number: object) -> str:
        if not isinstance(number, int):
            return "(no name)" if number is None else str(number)
        if number not in self._names:
            if len(self._names) >= _NAMES:
                self._names.clear()
            query = "SELECT value FROM STRING_IDS WHERE id = ?"
            row = self._database.execute(query, (number,)).fetchone()
            self._names[number] = f"(name {number})" if row is None else str(row[0])
        return self._names[number]

    def _declare(
        self, key: _Key, name: str, sort: int, *, overlapping: bool = False, device: str | None = None
    ) -> Iterator[Track]:
        if key not in self._tracks:
            track = self._tracks[key] = len(self._tracks)
            yield Track(track=track, name=name, device=device, sort=sort, overlapping=overlapping)

    def _slice(
        self,
        key: _Key,
        name: str,
        start: int,
        dur: int,
        category: str | None,
        args: dict[str, object] | None = None,
    ) -> Slice:
        return Slice(
            track=self._tracks[key], name=name, start_ns=start, dur_ns=dur, category=category, args=args
        )

    def _flow(self, key: _Key, at_ns: int, connection: int, point: Any) -> Flow:
        return Flow(
            track=self._tracks[key], at_ns=at_ns, id=connection, point=point, name="launch", category="ac2g"
        )


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database read-only, without locks and without files beside it."""
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    database = sqlite3.connect(uri, uri=True, check_same_thread=False)
    database.text_factory = lambda text: text.decode(errors="replace")
    return database


def _columns(database: sqlite3.Connection) -> dict[str, frozenset[str]]:
    """Return {table: its columns}."""
    tables = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
    return {
        table: frozenset(row[1] for row in database.execute("SELECT * FROM pragma_table_info(?)", (table,)))
        for (table,) in tables
    }


def _pid(thread: object) -> int | None:
    return thread >> 32 if isinstance(thread, int) else None


def _tid(thread: object) -> int | str:
    return thread & 0xFFFFFFFF if isinstance(thread, int) else "unknown"
