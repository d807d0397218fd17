"""Reader of the files of `nsys export --type sqlite`.

The structs follow the published tables. Exports omit empty tables, and columns differ between versions, so
tables and columns are looked up by name, and missing data is not shown. Tested on exports of nsys 2022.4 and
2023.4 without a GPU, and on public exports from H100.

Times are ns since the session's start, which `TARGET_INFO_SESSION_START_TIME.utcEpochNs` states. Exports
without it cannot be aligned.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from stepscope.errors import RecordError
from stepscope.files.sidecar import NSYS_RANGES
from stepscope_report.timeline.clocks import is_wall
from stepscope_report.timeline.readers.contract import (
    Claim,
    Event,
    Flow,
    FoundFile,
    Instant,
    Notes,
    Origin,
    Recording,
    Slice,
    Track,
)

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
START = "TARGET_INFO_SESSION_START_TIME"
PROCESS = ~0xFFFFFF
"""Mask of the process in a serialized thread id, the same as in `globalPid`."""
DIAGNOSTIC = "DIAGNOSTIC_EVENT"
WARNING, ERROR = 2, 3
"""DIAGNOSTIC_EVENT.severity."""
WARNS = "nsys warns: "
"""Beginning of a file's problem that quotes a warning of nsys. Most warnings are about missing records."""
MARK, THREAD_NAME, DOMAIN, PUSH_POP, START_END = 34, 39, 75, (59, 70), (60, 71)
"""Values of NVTX_EVENTS.eventType. 70 and 71 are ranges that were imported as text."""
_WHERE = {"device": "deviceId", "context": "contextId", "stream": "streamId", "correlation": "correlationId"}
_JSON = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_JSON_HEAD = 1 << 12
_JSON_LINE = re.compile(rb'\s*\{\s*"(?:Type"\s*:\s*\d+\s*,\s*"\w+Event"|data"\s*:\s*\[|type"\s*:\s*"String")')
"""The first line of a file of `nsys export --type json` or `jsonlines`."""
_MAGIC = b"SQLite format 3\0"
_STRINGS = 1 << 16
"""Number of texts of `StringIds` that are cached."""
_WARNINGS = 20
"""Number of nsys' own warnings that are shown."""
NO_TIME = "events without a time"
BACKWARDS = "events that end before they begin"
NO_RANGES = (
    "nsys recorded none of the NVTX ranges that stepscope made, as happens on a busy machine. Fix: capture "
    "another step"
)
NEVER_ENDED = "NVTX ranges that never ended, shown as marks"
_COPY_KINDS: dict[object, str] = dict(
    zip((1, 2, 8, 9), ("Host-to-Device", "Device-to-Host", "Device-to-Device", "Host-to-Host"), strict=True)
)
"""Kinds of copies as CUPTI numbers them (`CUpti_ActivityMemcpyKind`), for exports that do not list them."""
_Key: TypeAlias = tuple[object, ...]


class DeviceTable(NamedTuple):
    """A table of the export that lists work of devices."""

    table: str
    category: str
    names: tuple[str, ...]
    """Columns with the id of the event's name, the best one first."""
    args: Mapping[str, str]
    """{argument: its column}. An argument has the name that Kineto gives it, if there is one."""


DEVICES = (
    DeviceTable(
        "CUPTI_ACTIVITY_KIND_KERNEL", "kernel", ("demangledName", "shortName", "mangledName"),
        {
            **_WHERE, **{size + axis: size + axis for size in ("grid", "block") for axis in "XYZ"},
            "registers per thread": "registersPerThread", "shared memory": "dynamicSharedMemory",
            "graph node": "graphNodeId",
        },
    ),
    DeviceTable(
        "CUPTI_ACTIVITY_KIND_MEMCPY", "gpu_memcpy", (),
        {**_WHERE, "bytes": "bytes", "kind": "copyKind", "graph node": "graphNodeId"},
    ),
    DeviceTable(
        "CUPTI_ACTIVITY_KIND_MEMSET", "gpu_memset", (),
        {**_WHERE, "bytes": "bytes", "value": "value", "graph node": "graphNodeId"},
    ),
    # With --cuda-graph-trace=graph, the default, these rows stand for all kernels and copies of a graph.
    DeviceTable(
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "kernel", (),
        {**_WHERE, "graph": "graphId", "graph exec": "graphExecId"},
    ),
)  # fmt: skip


def _pid_of(process: int) -> int:
    """Return the OS pid in a serialized id."""
    return process >> 24 & 0xFFFFFF


def _unnamed(device: DeviceTable, args: Mapping[str, object]) -> str:
    """Return the name of an event whose table has no names."""
    if device.category == "gpu_memcpy":
        return f"Memcpy {args['kind']}" if "kind" in args else "Memcpy"
    if device.table.endswith("GRAPH_TRACE"):
        return f"CUDA graph {args.get('graph', 'unknown')}"
    return "Memset" if device.category == "gpu_memset" else "(no name)"


def _grouped(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with grid and block as lists [x, y, z], as in Kineto."""
    for word in ("grid", "block"):
        if all(f"{word}{axis}" in args for axis in "XYZ"):
            args[word] = [args.pop(f"{word}{axis}") for axis in "XYZ"]
    return args


class NsysReader:
    """SQLite exports of Nsight Systems. Only nsys itself can read a report (`.nsys-rep`)."""

    name = "nsys"

    def claims(self, file: FoundFile) -> Claim | None:
        if file.path.suffix == ".nsys-rep":
            exported = file.path.with_suffix(".sqlite").exists()
            fix = f"nsys export --type sqlite {file.path.name}"
            return Claim(read=False, why=None if exported else f"to have it in the timeline: {fix}")
        if file.path.name.endswith(_JSON) and _JSON_LINE.match(file.head(_JSON_HEAD)):
            return Claim(read=False, why="nsys' JSON has no start of its session: nsys export --type sqlite")
        if file.path.suffix == ".gz" or not file.head(len(_MAGIC)).startswith(_MAGIC):
            return None
        try:
            with closing(_connect(file.path)) as database:
                known = _tables(database)
        except sqlite3.Error:
            return Claim() if file.path.suffix == ".sqlite" else None  # damaged: `open` reports it
        ours = "StringIds" in known and any(
            table.startswith(("CUPTI_", "NVTX_", "TARGET_")) for table in known
        )
        return Claim() if ours else None

    def open(self, file: FoundFile, notes: Notes) -> Recording:
        options = {} if file.sidecar is None else file.sidecar.options
        return _Export(file.path, notes, has_ranges=options.get(NSYS_RANGES) is True)


class _Export:
    """An open export."""

    def __init__(self, path: Path, notes: Notes, *, has_ranges: bool) -> None:
        """
        Args:
            has_ranges: True if stepscope made NVTX ranges while nsys recorded.
        """
        self._notes = notes
        self._has_ranges = has_ranges
        self._tracks: dict[_Key, int] = {}
        self._strings: dict[int | None, str | None] = {}
        with ExitStack() as failing:
            try:
                self._database = failing.enter_context(closing(_connect(path)))
                self._columns = {table: _columns(self._database, table) for table in _tables(self._database)}
                self.origin = self._origin()
            except sqlite3.Error as error:
                raise RecordError(f"damaged: {error}") from error
            if "StringIds" not in self._columns:
                raise RecordError("it holds no export of nsys (no StringIds)")
            failing.pop_all()
        self._owned = self._linked = False
        """True once temporary tables exist: with the process of each correlation (`_owned`), and with the
        first device event of each call (`_linked`).
        """

    def close(self) -> None:
        self._database.close()

    def events(self) -> Iterator[Event]:
        reads: list[Callable[[], Iterator[Event]]] = [
            self._warnings,
            self._link,
            self._nvtx,
            self._runtime,
            *(partial(self._device, device) for device in DEVICES),
        ]
        for read in reads:
            try:
                yield from read()
            except sqlite3.Error as error:
                self._notes.file(f"damaged: {error}; a table, or the rest of it, is left out")

    def _origin(self) -> Origin:
        began = self._first(START, "utcEpochNs")
        self._since_ns = began if isinstance(began, int) and is_wall(began) else 0
        processes = self._processes()
        self._only = next(iter(processes)) if len(processes) == 1 else None
        pids = sorted(map(_pid_of, processes))
        missing = f"the export does not say when its session began ({START}.utcEpochNs)"
        return Origin(
            clock="realtime" if self._since_ns else "unknown",
            why=None if self._since_ns else missing,
            host=self._host(),
            pid=pids[0] if len(pids) == 1 else None,
            processes=tuple(pids),
        )

    def _processes(self) -> set[int]:
        """Return the serialized ids of all processes with events."""
        processes: set[int] = set()
        for table in (RUNTIME, NVTX, *(device.table for device in DEVICES)):
            for column in ("globalPid", "globalTid"):
                if self._has(table, column):
                    query = f"SELECT DISTINCT {column} & {PROCESS} FROM {table} WHERE {column} IS NOT NULL"
                    processes |= {process for (process,) in self._database.execute(query)}
        return processes

    def _host(self) -> str | None:
        if not self._has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
            return None
        query = "SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname' LIMIT 1"
        row = self._database.execute(query).fetchone()
        return None if row is None else str(row[0])

    def _first(self, table: str, column: str) -> object:
        if not self._has(table, column):
            return None
        row = self._database.execute(f"SELECT {column} FROM {table} LIMIT 1").fetchone()
        return None if row is None else row[0]

    def _string(self, number: int | None) -> str | None:
        """Return a text of `StringIds`, or None if there is none with this number. Texts are cached."""
        if number not in self._strings:
            if len(self._strings) >= _STRINGS:
                self._strings.clear()
            row = self._database.execute("SELECT value FROM StringIds WHERE id = ?", (number,)).fetchone()
            self._strings[number] = None if row is None else str(row[0])
        return self._strings[number]

    def _warnings(self) -> Iterator[Event]:
        """Record nsys' own notes about its recording, such as lost events."""
        if self._has(DIAGNOSTIC, "severity", "text"):
            query = f"SELECT DISTINCT severity, text FROM {DIAGNOSTIC} WHERE severity IN (?, ?) LIMIT ?"
            for severity, text in self._database.execute(query, (WARNING, ERROR, _WARNINGS)):
                who = WARNS if severity == WARNING else "nsys failed: "
                self._notes.file(f"{who}{' '.join(str(text).split())}")
        yield from ()

    def _link(self) -> Iterator[Event]:
        """Store on disk the first device event that each call launched, for an arrow to the event."""
        linked = [device.table for device in DEVICES if self._has(device.table, "correlationId")]
        if not linked or not self._has(RUNTIME, "correlationId", "globalTid"):
            return
        run = self._database.execute
        run("CREATE TEMP TABLE owners (correlation INT PRIMARY KEY, process INT)")
        if not all(self._has(table, "globalPid") for table in linked):
            run(
                f"INSERT INTO owners SELECT correlationId, min(globalTid & {PROCESS}) FROM {RUNTIME}"
                f" GROUP BY 1 HAVING min(globalTid & {PROCESS}) = max(globalTid & {PROCESS})"
            )
        self._owned = True
        for table in ("launched", "called"):
            columns = "process INT, correlation INT, at INT, PRIMARY KEY (process, correlation)"
            run(f"CREATE TEMP TABLE {table} ({columns}) WITHOUT ROWID")
        for table in linked:
            run(
                f"INSERT INTO launched SELECT {self._owner(table)} AS owner, correlationId, min(start)"
                f" FROM {table} t WHERE owner IS NOT NULL AND correlationId > 0 GROUP BY 1, 2"
                " ON CONFLICT DO UPDATE SET at = min(at, excluded.at)"
            )
        run(
            f"INSERT INTO called SELECT process, correlation, min(start) FROM {RUNTIME} JOIN launched"
            f" ON process = globalTid & {PROCESS} AND correlation = correlationId GROUP BY 1, 2"
        )
        matched = "(process, correlation) IN (SELECT process, correlation FROM called)"
        run(f"DELETE FROM launched WHERE NOT {matched}")
        self._linked = True
        yield from ()

    def _owner(self, table: str) -> str:
        """Return the SQL expression of the process of a row `t` of a device's table: `globalPid`, or else the
        export's only process, or else the only process with a call of the row's correlation. NULL if unknown.
        """
        stated = "t.globalPid" if self._has(table, "globalPid") else "NULL"
        if self._only is not None:
            return f"coalesce({stated}, {self._only})"
        if stated == "NULL" and self._owned and self._has(table, "correlationId"):
            return "(SELECT process FROM temp.owners WHERE correlation = t.correlationId)"
        return stated

    def _nvtx(self) -> Iterator[Event]:
        """Yield ranges and marks. Started ranges are on a track per process, pushed ranges and marks on a
        track per thread.
        """
        domains = dict(self._nvtx_texts(DOMAIN, "domainId"))
        kinds = ", ".join(map(str, (MARK, *PUSH_POP, *START_END)))
        wanted = ("eventType", "text", "textId", "globalTid", "domainId")
        found = False
        for start, end, kind, text, text_id, thread, domain in self._rows(
            NVTX, wanted, f"WHERE eventType IN ({kinds})"
        ):
            process = None if thread is None else thread & PROCESS
            if kind in START_END:
                found = True
                key, label = ("ranges", process), "NVTX ranges"
            else:
                key, label = ("nvtx", thread), f"NVTX {self._thread(thread)}"
            yield from self._declare(key, label, process, 0, thread=None if kind in START_END else thread)
            track, name = self._tracks[key], text or self._string(text_id) or "(no text)"
            args = {"domain": domains[domain]} if domain in domains else None
            if kind == MARK or not end:  # 0 if the export writes no NULL
                if kind != MARK:
                    self._notes.events(NEVER_ENDED)
                yield Instant(
                    track=track, name=name, at_ns=start + self._since_ns, category="nvtx", args=args
                )
            elif self._is_sound(start, end):
                yield self._slice(track, name, start, end, "user_annotation", args)
        if self._has_ranges and not found:
            self._notes.file(NO_RANGES)

    def _runtime(self) -> Iterator[Event]:
        wanted = ("nameId", "globalTid", "correlationId", "returnValue")
        linked = self._at_link(RUNTIME, "called", f"(t.globalTid & {PROCESS})")
        for start, end, name_id, thread, correlation, returned, first in self._rows(RUNTIME, wanted, *linked):
            if not self._is_sound(start, end):
                continue
            process, key = None if thread is None else thread & PROCESS, ("runtime", thread)
            yield from self._declare(key, f"CUDA API {self._thread(thread)}", process, 1, thread=thread)
            args = {"correlation": correlation, **({"return value": returned} if returned else {})}
            name = self._string(name_id) or "(no name)"
            yield self._slice(self._tracks[key], name, start, end, "cuda_runtime", args)
            if first:
                yield self._flow("start", key, start, process, correlation)

    def _device(self, device: DeviceTable) -> Iterator[Event]:
        kinds = self._copy_kinds() if device.category == "gpu_memcpy" else {}
        wanted = (*device.names, *device.args.values())
        named, owner = len(device.names), self._owner(device.table)
        linked = self._at_link(device.table, "launched", owner)
        for start, end, *values, first, process in self._rows(device.table, wanted, *linked, owner):
            if not self._is_sound(start, end):
                continue
            args = {
                word: value
                for word, value in zip(device.args, values[named:], strict=True)
                if value is not None
            }
            where = tuple(args.get(word, "unknown") for word in ("device", "stream"))
            key = ("device", process, *where)
            gpu, name = f"GPU {where[0]}", "GPU {} stream {}".format(*where)
            yield from self._declare(key, name, process, _place(*where), gpu)
            if "kind" in args:
                args["kind"] = kinds.get(args["kind"], args["kind"])
            names = (self._string(number) for number in values[:named])
            name = next(filter(None, names), None) or _unnamed(device, args)
            yield self._slice(self._tracks[key], name, start, end, device.category, _grouped(args))
            if first:
                yield self._flow("end", key, start, process, args["correlation"])

    def _rows(self, table: str, wanted: Sequence[str], clauses: str = "", *more: str) -> Iterator[Any]:
        """Yield (start, end, the wanted columns, the SQL expressions `more`) of a table's rows, by start. A
        missing column is None. Nothing is yielded if the table is missing, or has no times.
        """
        if table not in self._columns:
            return
        if not self._has(table, "start", "end"):
            self._notes.file(f"left out: {table} has no columns start and end")
            return
        has = self._columns[table]
        columns = ", ".join([*(f"t.{column}" if column in has else "NULL" for column in wanted), *more])
        query = f"SELECT t.start, t.end, {columns} FROM {table} t {clauses} ORDER BY t.start, t.end DESC"
        for row in self._database.execute(query):
            if type(row[0]) is int:
                yield row
            else:
                self._notes.events(NO_TIME)

    def _at_link(self, table: str, first: str, process: str) -> tuple[str, str]:
        """Return (SQL join, SQL expression that is true for the first row of each correlation), for
        `_rows`.
        """
        if not self._linked or not self._has(table, "correlationId"):
            return "", "NULL"
        join = f"l.process = {process} AND l.correlation = t.correlationId"
        return f"LEFT JOIN temp.{first} l ON {join}", "l.at = t.start"

    def _is_sound(self, start: int, end: object) -> bool:
        if type(end) is not int or start == end == 0:  # CUPTI writes 0 for an unknown time
            self._notes.events(NO_TIME)
        elif end < start:
            self._notes.events(BACKWARDS)
        else:
            return True
        return False

    def _slice(
        self, track: int, name: str, start: int, end: int, category: str, args: Mapping[str, object] | None
    ) -> Slice:
        at_ns = start + self._since_ns
        return Slice(track=track, name=name, start_ns=at_ns, dur_ns=end - start, category=category, args=args)

    def _flow(
        self, point: Literal["start", "end"], key: _Key, start: int, process: int | None, correlation: int
    ) -> Flow:
        return Flow(
            track=self._tracks[key], at_ns=start + self._since_ns, id=f"{process} {correlation}", point=point,
            name="launch", category="ac2g",
        )  # fmt: skip

    def _declare(
        self,
        key: _Key,
        name: str,
        process: int | None,
        sort: int,
        device: str | None = None,
        thread: int | None = None,
    ) -> Iterator[Track]:
        if key not in self._tracks:
            track = self._tracks[key] = len(self._tracks)
            pid = None if process is None else _pid_of(process)
            # Kernels of a stream (launched early, or in graphs) and domains of a thread may overlap.
            yield Track(
                track=track, name=name, pid=pid, device=device, thread=thread, sort=sort, overlapping=True
            )

    def _thread(self, thread: int | None) -> str:
        if thread is None:
            return "thread unknown"
        name, number = self._thread_names.get(thread), thread & ~PROCESS
        return f"thread {number}" if name is None else f"thread {number} ({name})"

    @cached_property
    def _thread_names(self) -> dict[int, str]:
        names = {}
        if self._has("ThreadNames", "globalTid", "nameId"):
            for thread, name_id in self._database.execute("SELECT globalTid, nameId FROM ThreadNames"):
                if (name := self._string(name_id)) is not None:
                    names[thread] = name
        return {**names, **dict(self._nvtx_texts(THREAD_NAME, "globalTid"))}

    def _nvtx_texts(self, kind: int, column: str) -> Iterator[tuple[int, str]]:
        """Yield the texts of NVTX events that name an object, with the number of that object."""
        if self._has(NVTX, "eventType", "text", "textId", column):
            query = f"SELECT {column}, text, textId FROM {NVTX} WHERE eventType = {kind}"
            for number, text, text_id in self._database.execute(query):
                if name := text or self._string(text_id):
                    yield number, name

    def _copy_kinds(self) -> Mapping[object, str]:
        if not self._has("ENUM_CUDA_MEMCPY_OPER", "id", "label"):
            return _COPY_KINDS
        return dict(self._database.execute("SELECT id, label FROM ENUM_CUDA_MEMCPY_OPER"))

    def _has(self, table: str, *columns: str) -> bool:
        return set(columns) <= self._columns.get(table, frozenset())


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database read-only, without locks and without files beside it."""
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    database = sqlite3.connect(uri, uri=True, check_same_thread=False)
    database.text_factory = lambda text: text.decode(errors="replace")
    database.execute("PRAGMA temp_store = FILE")  # sorting and linking use files instead of memory
    return database


def _tables(database: sqlite3.Connection) -> set[str]:
    return {
        name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
    }


def _columns(database: sqlite3.Connection, table: str) -> frozenset[str]:
    return frozenset(row[1] for row in database.execute("SELECT * FROM pragma_table_info(?)", (table,)))


def _place(device: object, stream: object) -> int:
    """Return the place of a stream among a recording's tracks: below the threads."""
    return (
        1000 + 1000 * (device if isinstance(device, int) else 0) + (stream if isinstance(stream, int) else 0)
    )
