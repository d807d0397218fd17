"""A stand-in for the commands of CANN's tool `msprof` that torch_npu's analysis runs.

It writes files that the real analysis merges, from the mstx ranges in `host/fake_ranges.tsv`, which the
stand-in for CANN wrote. File names and columns follow the published reference of `msprof`. For each range
there is an invented device task of half the range's length on stream 0, named `fake_kernel_<n>`.
"""

from __future__ import annotations

import csv
import json
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

HOST, CANN, HARDWARE, OVERLAP = 31, 2, 14, 20
NOTHING = 4294967295


def main(arguments: list[str]) -> None:
    given = dict(word.lstrip("-").partition("=")[::2] for word in arguments)
    if "help" in given:
        print("--type: text (which will also export the database), db")
        return
    if given.get("export") != "on":
        return
    prof, when = Path(given["output"]), time.strftime("%Y%m%d%H%M%S")
    info = json.loads((prof / "host" / "info.json").read_text())
    lines = [line.split("\t") for line in (prof / "host" / "fake_ranges.tsv").read_text().splitlines()]
    ranges = [(int(a), int(b), int(thread), domain, name) for a, b, thread, domain, name in lines]
    if given.get("type") == "db":
        write_database(prof / f"msprof_{when}.db", int(info["pid"]), ranges)
    else:
        folder = prof / "mindstudio_profiler_output"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"msprof_{when}.json", int(info["pid"]), str(info["pid_name"]), ranges)
        write_summary(folder / f"op_summary_{when}.csv", ranges)
    # torch_npu looks for these files every 0.1 s, and drops files that it finds after this program has ended.
    # The real msprof still works for seconds.
    time.sleep(0.5)


def us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def write_json(path: Path, os_pid: int, name: str, ranges: list[tuple[int, int, int, str, str]]) -> None:
    def pid(layer: int, device: int) -> int:
        return os_pid << 10 | layer << 5 | device

    events: list[dict[str, Any]] = []

    def layer(at: int, name: str, label: str, sort: int, threads: dict[int, str]) -> None:
        for word, value in (("name", name), ("labels", label), ("sort_index", sort)):
            events.append({"name": f"process_{word}", "pid": at, "tid": 0, "args": {word: value}, "ph": "M"})
        for tid, text in threads.items():
            events.append({"name": "thread_name", "pid": at, "tid": tid, "args": {"name": text}, "ph": "M"})

    threads = {one[2]: f"Thread {one[2]}" for one in ranges}
    layer(pid(0, HOST), name, "CPU", 0, threads)
    layer(pid(CANN, HOST), "CANN", "CPU", CANN, threads)
    layer(pid(HARDWARE, 0), "Ascend Hardware", "NPU 0", HARDWARE, {0: "Stream 0"})
    names = ("Computing", "Communication", "Communication(Not Overlapped)", "Free")
    layer(pid(OVERLAP, 0), "Overlap Analysis", "NPU 0", OVERLAP, dict(enumerate(names)))
    for at, (start, end, thread, domain, message) in enumerate(ranges):
        middle = (start + end) // 2
        host, cann = {"pid": pid(0, HOST), "tid": thread}, {"pid": pid(CANN, HOST), "tid": thread}
        device, flow = (
            {"pid": pid(HARDWARE, 0), "tid": 0},
            {"name": f"HostToDevice{at}", "cat": "HostToDevice", "id": str(at)},
        )
        task = {
            "Model Id": NOTHING,
            "Task Type": "AI_CORE",
            "Stream Id": 0,
            "Task Id": at,
            "connection_id": at,
        }
        call = {
            "Thread Id": thread,
            "Mode": "launch",
            "level": "node",
            "id": f"fake_kernel_{at}",
            "connection_id": at,
        }
        took, half = (end - start) / 1000, (end - middle) / 1000
        events += [
            {
                **host,
                "name": message,
                "ts": us(start),
                "dur": took,
                "args": {"event_type": "start/end", "domain": domain},
                "ph": "X",
            },
            {**cann, "name": "AscendCL@launch", "ts": us(start), "dur": 1.0, "args": call, "ph": "X"},
            {**cann, **flow, "ts": us(start), "ph": "s"},
            {**device, "name": f"fake_kernel_{at}", "ts": us(middle), "dur": half, "args": task, "ph": "X"},
            {**device, **flow, "ts": us(middle), "ph": "f", "bp": "e"},
            {"pid": pid(OVERLAP, 0), "tid": 0, "name": "Computing", "ts": us(middle), "dur": half, "ph": "X"},
        ]
    path.write_text(json.dumps(events))


def write_summary(path: Path, ranges: list[tuple[int, int, int, str, str]]) -> None:
    columns = (
        "Device_id,Model ID,Task ID,Stream ID,Op Name,OP Type,OP State,Task Type,Task Start Time(us),"
        "Task Duration(us),Task Wait Time(us),Block Num,Mix Block Num,HF32 Eligible"
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns.split(","))
        for at, (start, end, *_) in enumerate(ranges):
            middle = (start + end) // 2
            took = (end - middle) / 1000
            row = [0, NOTHING, at, 0, f"fake_kernel_{at}", "Fake", "N/A", "AI_CORE", f"{us(middle)}\t", took]
            writer.writerow([*row, 0, 1, 0, "NO"])


TABLES = {
    "STRING_IDS": "id INTEGER PRIMARY KEY, value TEXT",
    "ENUM_API_TYPE": "id INTEGER PRIMARY KEY, name TEXT",
    "NPU_INFO": "id INTEGER, name TEXT",
    "HOST_INFO": "hostUid TEXT, hostName TEXT",
    "SESSION_TIME_INFO": "startTimeNs INTEGER, endTimeNs INTEGER",
    "RANK_DEVICE_MAP": "rankId INTEGER, deviceId INTEGER",
    "META_DATA": "name TEXT, value TEXT",
    "CANN_API": "startNs INTEGER, endNs INTEGER, type INTEGER, globalTid INTEGER, connectionId INTEGER, "
    "name INTEGER",
    "TASK": "startNs INTEGER, endNs INTEGER, deviceId INTEGER, connectionId INTEGER, globalTaskId INTEGER, "
    "globalPid INTEGER, taskType INTEGER, contextId INTEGER, streamId INTEGER, taskId INTEGER, "
    "modelId INTEGER",
    "COMPUTE_TASK_INFO": "name INTEGER, globalTaskId INTEGER PRIMARY KEY, blockNum INTEGER, "
    "mixBlockNum INTEGER, taskType INTEGER, opType INTEGER",
    "MSTX_EVENTS": "startNs INTEGER, endNs INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER, "
    "message INTEGER, globalTid INTEGER, endGlobalTid INTEGER, domainId INTEGER, connectionId INTEGER",
}
API_TYPES = {20000: "acl", 15000: "model", 10000: "node", 5500: "communication", 5000: "runtime"}


def write_database(path: Path, os_pid: int, ranges: list[tuple[int, int, int, str, str]]) -> None:
    database = sqlite3.connect(path)
    strings: dict[str, int] = {}

    def put(table: str, *values: object) -> None:
        database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    def string(value: str) -> int:
        if value not in strings:
            strings[value] = len(strings)
            put("STRING_IDS", strings[value], value)
        return strings[value]

    for table, columns in TABLES.items():
        database.execute(f"CREATE TABLE {table} ({columns})")
    for number, name in API_TYPES.items():
        put("ENUM_API_TYPE", number, name)
    put("NPU_INFO", 0, "FAKE")
    for at, (start, end, thread, domain, message) in enumerate(ranges):
        tid, middle = os_pid << 32 | thread, (start + end) // 2
        put(
            "MSTX_EVENTS",
            start,
            end,
            2,
            NOTHING,
            NOTHING,
            string(message),
            tid,
            tid,
            string(domain),
            4 * 10**9 + at,
        )
        put("CANN_API", start, start + 1000, 10000, tid, at, string("launch"))
        put("TASK", middle, end, 0, at, at, os_pid, string("AI_CORE"), NOTHING, 0, at, NOTHING)
        kernel = string(f"fake_kernel_{at}")
        put("COMPUTE_TASK_INFO", kernel, at, 1, 0, string("AI_CORE"), string("Fake"))
    database.commit()
    database.close()


if __name__ == "__main__":
    main(sys.argv[1:])
