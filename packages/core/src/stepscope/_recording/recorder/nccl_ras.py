"""Queries of NCCL's RAS service, which counts the collectives that each rank of the job has launched.

Every process that uses NCCL has a RAS thread, which can answer for the whole job. The thread listens on a
port of its host and reads requests as lines of text. It answers `OK` or an error; to `STATUS` it sends one
document and closes the connection. NCCL since 2.28.7 and RCCL can send JSON. An older NCCL refuses `SET
FORMAT JSON`, and the query fails.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, Literal

import msgspec

from stepscope.errors import ours
from stepscope.files.states import Communicator, CommunicatorRank

_ADDRESS = "localhost:28028"
"""Default address of RAS, if NCCL_RAS_ADDR is not set."""
ANSWER_S = 1.4
"""Longest wait for an answer, because `stepscope why` answers within 2 s. RAS itself waits 1 s for ranks with
a lost connection, and 5 s or more for ranks that hang."""
_TRY_S = 0.4
"""Longest wait for the first line of RAS's answer. The ranks of a host share the port, and the rank that
accepts the connection may hang; the next attempt may reach another rank."""
_PAIRS = frozenset({"Send", "Recv", "SendRecv", "PutSignal", "Signal", "WaitSignal"})
"""Operations between two ranks. Such operations are not counted, because their numbers differ between the
ranks of a communicator."""
_MOST = 64
"""Largest number of communicators that are returned, and largest number of ranks in each communicator."""
_NO_COMMA = re.compile(r'("nvml_dev": -?\d+)(?=\s*")')
"""Matches the place in a missing rank's JSON at which NCCL 2.28 omits a comma."""
_SIOCGIFADDR = 0x8915


class _Missing(msgspec.Struct):
    rank: int
    host: str = ""
    pid: int = -1
    status: dict[str, bool] = {}


class _Rank(msgspec.Struct):
    rank: int
    host: str = ""
    pid: int = -1
    collective_counts: dict[str, int] = {}

    def collectives(self) -> dict[str, int]:
        return {op: count for op, count in self.collective_counts.items() if op not in _PAIRS}


class _Communicator(msgspec.Struct):
    hash: str
    size: int
    ranks: list[_Rank] = []
    missing_ranks: list[_Missing] = []


class _Status(msgspec.Struct):
    communicators: list[_Communicator]


def may_know() -> bool:
    """Return whether this process should query RAS. It must be the first or the last rank of
    torch.distributed, and use NCCL or have the variable NCCL_RAS_ADDR. Two ranks ask, because the first rank
    may have died.
    """
    torch: Any = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return False
    known = "NCCL_RAS_ADDR" in os.environ or "nccl" in str(torch.get_backend())
    return known and torch.get_rank() in (0, torch.get_world_size() - 1)


def communicators() -> tuple[Communicator, ...]:
    """Return the communicators of the job in which a rank is missing, or has launched fewer collectives than
    other ranks.

    Raises:
        Exception: RAS does not answer within `ANSWER_S`, or its answer has another format.
    """
    return odd_communicators(_ask(time.monotonic() + ANSWER_S))


def odd_communicators(text: str) -> tuple[Communicator, ...]:
    """Return the result of `communicators` from RAS's JSON answer. Text before the JSON, such as RCCL's
    title, is skipped.
    """
    document = text[text.index("{") : text.rindex("}") + 1]
    status = msgspec.json.decode(_NO_COMMA.sub(r"\1,", document), type=_Status)
    found = (_odd(communicator) for communicator in status.communicators)
    return tuple(one for one, _ in zip((odd for odd in found if odd is not None), range(_MOST), strict=False))


def addresses() -> tuple[str, ...]:
    """Return the IP addresses by which RAS identifies this host. Loopback addresses are left out."""
    return tuple(
        dict.fromkeys(address for address in (*_ipv4(), *_ipv6()) if address[:4] not in ("127.", "::1"))
    )


def _ipv4() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                yield socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
            except ours(OSError):  # an interface without an address
                continue


def _ipv6() -> Iterator[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except ours(OSError):
        return
    for line in lines:
        yield str(IPv6Address(int(line.split()[0], 16)))


def _ask(until: float) -> str:
    """Query RAS and return its answer.

    Raises:
        OSError: RAS does not answer before `until`.
        ValueError: RAS refuses a request.
    """
    host, _, port = os.environ.get("NCCL_RAS_ADDR", _ADDRESS).rpartition(":")
    address = host.strip("[]"), int(port)
    while True:
        with socket.create_connection(address, _left(until)) as connection:
            lines = connection.makefile("rb")
            connection.settimeout(min(_TRY_S, _left(until)))
            try:
                _request(connection, lines, b"CLIENT PROTOCOL 2", b"SERVER PROTOCOL ")
            except ours(TimeoutError):
                continue
            connection.settimeout(_left(until))
            _request(connection, lines, b"TIMEOUT 1", b"OK")
            _request(connection, lines, b"SET FORMAT JSON", b"OK")
            connection.sendall(b"VERBOSE STATUS\n")
            answer = bytearray()
            while part := lines.read1():
                answer += part
                connection.settimeout(_left(until))
            return answer.decode(errors="replace")


def _left(until: float) -> float:
    """Return the seconds until a deadline.

    Raises:
        TimeoutError: the deadline has passed.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("NCCL's RAS does not answer in time")
    return left


def _request(connection: socket.socket, lines: Any, request: bytes, expected: bytes) -> None:
    connection.sendall(request + b"\n")
    answer = lines.readline(1024)
    if not answer.upper().startswith(expected):
        raise ValueError(f"NCCL's RAS answers {answer!r} to {request!r}")


def _odd(communicator: _Communicator) -> Communicator | None:
    """Return the communicator with only the ranks that are missing or have launched fewer collectives than
    `_usual`, or None if there are no such ranks.
    """
    counts = {rank.rank: rank.collectives() for rank in communicator.ranks}
    usual = _usual(counts)
    ranks = [_missing(rank) for rank in communicator.missing_ranks]
    ranks += [
        _behind(rank, counts[rank.rank], usual)
        for rank in communicator.ranks
        if any(count < usual[op] for op, count in counts[rank.rank].items())
    ]
    if not ranks:
        return None
    odd = {rank.rank for rank in ranks}
    return Communicator(
        hash=communicator.hash,
        size=communicator.size,
        ranks=tuple(ranks[:_MOST]),
        others=tuple((rank.host, rank.pid) for rank in communicator.ranks if rank.rank not in odd),
    )


def _usual(counts: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """Return {collective: count} of the ranks that have launched the most collectives. If these ranks differ,
    the most frequent counts are returned.
    """
    most = max((sum(own.values()) for own in counts.values()), default=0)
    first = Counter(tuple(own.items()) for own in counts.values() if sum(own.values()) == most)
    return dict(first.most_common(1)[0][0]) if first else {}


def _missing(rank: _Missing) -> CommunicatorRank:
    state: Literal["dead", "silent"] = "dead" if rank.status.get("considered_dead") else "silent"
    return CommunicatorRank(rank=rank.rank, host=rank.host, pid=rank.pid, state=state)


def _behind(rank: _Rank, own: Mapping[str, int], usual: Mapping[str, int]) -> CommunicatorRank:
    op = max(own, key=lambda op: usual[op] - own[op])
    return CommunicatorRank(
        rank=rank.rank, host=rank.host, pid=rank.pid, state="behind", op=op, begun=own[op], others=usual[op]
    )
