"""NCCL's RAS: `stepscope why` names the rank that is behind, or gone, by what NCCL says.

The server here answers as NCCL's source does. It was compared with the threads of NCCL 2.30.7 itself, on a
machine without a GPU: with these, three ranks got the same answers. It never met NCCL on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from packages.report.tests.steps import some
from packages.report.tests.three_ranks import hanging
from stepscope._recording.recorder import nccl_ras
from stepscope._recording.recorder.state import communicators_in_time
from stepscope.files.layout import RunLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.states import Communicator, CommunicatorRank, OpenSpan, ProcessState, Thread
from stepscope_report.cli.why import ask
from stepscope_report.why import say_first, why

STATUS = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False}
HERE = "127.0.0.1"


def rank(number: int, counts: Mapping[str, int], pid: int = 0, host: str = HERE) -> dict[str, Any]:
    place = {"rank": number, "host": host, "pid": pid or 100 + number, "cuda_dev": number, "nvml_dev": number}
    all_counts = {"Broadcast": 0, "Reduce": 0, "AllGather": 20, "ReduceScatter": 0, **counts}
    return {**place, "status": {**STATUS, "abort_flag": False}, "collective_counts": all_counts}


def missing(number: int, *, dead: bool) -> dict[str, Any]:
    place = {"rank": number, "host": HERE, "pid": 100 + number, "cuda_dev": 0, "nvml_dev": 0}
    return {**place, "status": {"unresponsive": True, "considered_dead": dead}}


def document(ranks: list[dict[str, Any]], gone: list[dict[str, Any]] | None = None) -> str:
    """Return the status of one communicator, laid out as NCCL 2.30.7 does."""
    gone = gone or []
    sizes = {"size": len(ranks) + len(gone), "ranks_count": len(ranks), "missing_ranks_count": len(gone)}
    one = {"hash": "0xabc123", "secondary_hash": "0x1:0x2", **sizes, "ranks": ranks, "missing_ranks": gone}
    head = {"nccl_version": "2.30.7", "timestamp": "2026-01-01 00:00:00", "communicators_count": 1}
    tail = {"ras": {"collection_time_sec": 0.001, "timeouts_count": 0}}
    return json.dumps({**head, "communicators": [one], **tail}, indent=2) + "\n"


BEHIND = document([rank(0, {"AllReduce": 119}), rank(1, {"AllReduce": 118}), rank(2, {"AllReduce": 119})])
GONE = document([rank(0, {"AllReduce": 9})], [missing(1, dead=True), missing(2, dead=False)])
GONE_2_28 = re.sub(r'("nvml_dev": 0),(?=\s*"status": {\s*"unresponsive")', r"\1", GONE)
SKIPPED = document(
    [rank(n, {"AllReduce": 7} if n == 1 else {"AllReduce": 6, "AllGather": 21}) for n in range(3)]
)
SENDS = document([rank(0, {"AllReduce": 5, "Send": 9}), rank(1, {"AllReduce": 5, "Send": 1})])
RCCL = 'RCCL version 2.28.3 compiled with ROCm "7.2.0.0"\nHIP runtime version 70226015, driver version 1\n\n'


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        (BEHIND, [(1, "behind", "AllReduce", 118, 119)]),
        (RCCL + BEHIND, [(1, "behind", "AllReduce", 118, 119)]),
        (GONE, [(1, "dead", "", None, None), (2, "silent", "", None, None)]),
        (GONE_2_28, [(1, "dead", "", None, None), (2, "silent", "", None, None)]),
        (SKIPPED, [(1, "behind", "AllGather", 20, 21)]),
        (SENDS, []),
        (document([]), []),
    ],
    ids=["behind", "rccl", "gone", "gone in 2.28", "skipped one", "other sends", "no rank"],
)
def test_the_ranks_that_differ_are_read(text: str, odd: list[tuple[Any, ...]]) -> None:
    if text is GONE_2_28:
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
    found = [one for communicator in nccl_ras.odd_communicators(text) for one in communicator.ranks]
    assert [(one.rank, one.state, one.op, one.begun, one.others) for one in found] == odd


class Ras(socketserver.StreamRequestHandler):
    """One connection of a client, answered as `client_support.cc` of NCCL does."""

    answer: Callable[[], str]
    is_old = False
    """True as before 2.28.7, without JSON."""
    is_still = False
    """True for a process that stands still: the kernel accepts for it."""

    def handle(self) -> None:
        form = "text"
        while line := self.rfile.readline().decode().strip():
            words = line.lower().split()
            if self.is_still:
                continue
            if words[:2] == ["client", "protocol"]:
                self.wfile.write(b"SERVER PROTOCOL 2\n")
            elif words[0] == "timeout" and words[1].isdigit():
                self.wfile.write(b"OK\n")
            elif words[:2] == ["set", "format"] and not self.is_old:
                form = words[2]
                self.wfile.write(b"OK\n" if form in ("text", "json") else b"ERROR: Invalid format\n")
            elif words[-1] == "status":
                answer = type(self).answer() if form == "json" else "NCCL version 2.30.7\n"
                self.wfile.write(answer.encode())
                return
            else:
                self.wfile.write(f"ERROR: Unknown command {line}\n".encode())


@contextmanager
def serving(answer: Callable[[], str], **how: bool) -> Iterator[str]:
    handler = type("Handler", (Ras,), {"answer": staticmethod(answer), **how})
    with socketserver.ThreadingTCPServer((HERE, 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{HERE}:{server.server_address[1]}"
        server.shutdown()


def test_the_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda: BEHIND) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        (communicator,) = communicators_in_time()
    assert communicator == nccl_ras.odd_communicators(BEHIND)[0]
    assert communicator.others == ((HERE, 100), (HERE, 102))


@pytest.mark.parametrize(
    ("how", "answer"),
    [({"is_old": True}, BEHIND), ({"is_still": True}, BEHIND), ({}, BEHIND[:900]), ({}, ""), ({}, "{}")],
    ids=["before 2.28.7", "stands still", "cut off", "empty", "another form"],
)
def test_no_answer_of_use_is_none_in_time(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, bool], answer: str
) -> None:
    with serving(lambda: answer, **how) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        began = time.monotonic()
        assert communicators_in_time() == ()
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("address", [f"{HERE}:1", "nowhere", "[::1]:x", ""])
def test_an_address_where_nobody_listens_is_no_error(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    assert communicators_in_time() == ()


@pytest.mark.skipif(
    shutil.which("ncclras") is None, reason="no ncclras here: NCCL's own client, no wheel has it"
)
def test_the_client_of_nccl_reads_the_server() -> None:
    with serving(lambda: BEHIND) as address:
        host, _, port = address.partition(":")
        command = ["ncclras", "-h", host, "-p", port, "-f", "json", "-t", "1"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (told.stdout, told.stderr) == (BEHIND, "")


def state_of(number: int, host: str, address: str, *communicators: Communicator) -> ProcessState:
    """Return the state of a rank that waits for the device. Each host gives the first process id 100."""
    return ProcessState(
        process=ProcessInfo(role="actor", rank=number, world_size=3, host=host, pid=100),
        run_id="feed0004",
        at_ns=0,
        step=3,
        spans=(OpenSpan(span=1, role="actor", stage="update", age_ns=10 - number, thread=1),),
        threads=(Thread(id=1, name="MainThread", frames=()),),
        tasks=(),
        communicators=communicators,
        addresses=(address,),
    )


def test_hosts_whose_processes_have_one_id_are_told_apart() -> None:
    late = CommunicatorRank(
        rank=1, host="10.0.0.2", pid=100, state="behind", op="AllReduce", begun=1_118, others=1_119
    )
    told = Communicator(hash="0x5f2a", size=3, ranks=(late,), others=(("10.0.0.1", 100), ("10.0.0.3", 100)))
    states = [state_of(n, f"node-{n}", f"10.0.0.{n + 1}", *[told][n:]) for n in range(3)]
    answer = why(states)
    assert [answer.calls[at].process for at in answer.culprits] == ["actor_rank1_node-1_pid100"]
    assert answer.held == 2
    assert "1,118 AllReduce of communicator 0x5f2a; other ranks have begun 1,119" in say_first(answer)
    others = [state_of(n, f"node-{n}", f"10.9.0.{n + 1}", *[told][n:]) for n in range(3)]
    assert all(call.behind is None for call in why(others).calls)  # of another run


RANK = """
def load():
    print("ready", flush=True)
    threading.Event().wait()
def wait_for_the_device():
    print("ready", flush=True)
    threading.Event().wait()
@profile_step("actor")
def update():
    load() if rank == 1 else wait_for_the_device()
with capture(3, role="actor"):
    update()
"""


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_the_rank_that_nccl_knows_to_be_behind_is_named(tmp_path: Path) -> None:
    ranks: list[subprocess.Popen[str]] = []

    def answer() -> str:
        return document([rank(n, {"AllReduce": 119 - (n == 1)}, ranks[n].pid) for n in range(3)])

    with serving(answer) as address, hanging(tmp_path, RANK, NCCL_RAS_ADDR=address) as started:
        ranks += started
        told = why(ask(RunLayout(tmp_path), 10))
    (first,) = (told.calls[at] for at in told.culprits)
    assert first.process == f"actor_rank1_{os.uname().nodename}_pid{ranks[1].pid}"
    behind = some(first.behind)
    assert (behind.begun, behind.others, told.held) == (118, 119, 2)
