"""The socket through which other processes read the forward passes that an engine's scheduler keeps.

vLLM's core and SGLang's scheduler are separate processes, and their APIs do not answer during generation. So
each process listens on a Unix socket of the abstract namespace, and answers processes of its own user.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from stepscope.errors import ours

KEEP, KEPT = "keep", "kept"
"""The two questions, each sent with a number. `keep` asks the process to keep passes from now on; the number
is the memory in MB. `kept` asks for the kept passes; the number is the earliest time in unix ns."""
Answers = Mapping[str, Callable[[int], "bytes | None"]]
"""{question: function that answers it}."""
ASK_S = 5.0
"""Longest wait for an answer."""
_LISTENS = "0A"
"""State of a listening socket in `/proc/net/tcp`, from Linux' `include/net/tcp_states.h`."""


def listen(answers: Answers) -> None:
    """Answer questions from now on, on a thread. Has no effect on systems other than Linux."""
    with suppress(OSError, AttributeError):  # this system has no AF_UNIX, or no abstract names
        server = socket.socket(socket.AF_UNIX)
        server.bind(_address(os.getpid()))
        server.listen()
        threading.Thread(target=_answer, args=(answers, server), name="stepscope-passes", daemon=True).start()


def _answer(answers: Answers, server: socket.socket) -> None:
    while True:
        asked, _ = server.accept()
        with suppress(OSError), asked:  # OSError: the process that asked has gone, or sent nothing in time
            asked.settimeout(ASK_S)
            if _peer(asked)[1] == os.getuid():
                asked.sendall(_answer_to(answers, asked.recv(256)))


def _answer_to(answers: Answers, question: bytes) -> bytes:
    """Return `none` if there is no content, `some` and the content, or `fail` and the reason."""
    try:
        method, number = msgspec.msgpack.decode(question, type=tuple[str, int])
        content = answers[method](number)
    except ours() as error:  # the process that asked reports the error; the engine goes on
        return f"fail{type(error).__name__}: {error}".encode()
    return b"none" if content is None else b"some" + content


def ask(pid: int, question: str, number: int) -> bytes | None:
    """Return the answer of a process of this host, or None if the answer has no content.

    Raises:
        ConnectionRefusedError: the process does not listen.
        OSError: the process did not answer within `ASK_S`, or could not answer.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ASK_S)
        asking.connect(_address(pid))
        if _peer(asking) != (pid, os.getuid()):
            raise ConnectionError(f"another process listens in the place of {pid}")
        asking.sendall(msgspec.msgpack.encode((question, number)))
        with asking.makefile("rb") as file:
            answer = file.read()
    if answer[:4] not in (b"none", b"some"):
        reason = answer[4:].decode(errors="replace") or "it closed the connection"
        raise ConnectionError(f"the engine's process {pid} could not answer {question!r}: {reason}")
    return None if answer[:4] == b"none" else answer[4:]


def ask_all(pids: Iterable[int], question: str, number: int) -> list[bytes | None] | None:
    """Return the answers (as `ask` does) of the processes that listen, in the order of `pids`; None if no
    process listens.
    """
    answers = []
    for pid in pids:
        with suppress(ConnectionRefusedError, FileNotFoundError):
            answers.append(ask(pid, question, number))
    return answers or None


def _address(pid: int) -> bytes:
    """Return the name of a process' socket. The leading zero puts the name in the abstract namespace."""
    return b"\0stepscope-passes-%d" % pid


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user id of the process at the other end."""
    option = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", option)
    return pid, uid


def keep_behind(urls: Iterable[str], memory_mb: int) -> bool:
    """Make the servers that run on this host keep their latest passes.

    Returns:
        False if one of the servers does not serve yet.
    """
    serve = True
    for url in urls:
        pids = behind(url)
        serve = serve and pids != []
        ask_all(pids or (), KEEP, memory_mb)
    return serve


def kept_behind(urls: Iterable[str], start_ns: int) -> list[bytes]:
    """Return the passes since `start_ns` (unix ns) that servers of this host keep, as packed copies; empty if
    they keep none.
    """
    answers = (ask_all(behind(url) or (), KEPT, start_ns) for url in urls)
    return [content for contents in answers for content in contents or () if content is not None]


def behind(url: str) -> list[int] | None:
    """Return the ids of the processes of the server at a URL, and then of their descendants.

    Returns:
        None if the server runs on another host or as another user. Empty while no process listens on the
        server's port.
    """
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    if not _is_here(host):
        return None
    inodes = set(_listening(port))
    owners = [pid for pid in _pids() if not inodes.isdisjoint(_sockets(pid))] if inodes else []
    return below(owners) if owners or not inodes else None


def below(pids: Iterable[int]) -> list[int]:
    """Return the ids of these processes, and then of their descendants."""
    children = defaultdict[int, list[int]](list)
    for pid in _pids():
        with suppress(OSError):  # the process has ended
            stat = Path(f"/proc/{pid}/stat").read_text()
            children[int(stat.rpartition(")")[2].split()[1])].append(pid)
    found = dict.fromkeys(pids)
    waiting = list(found)
    while waiting:
        new = [child for child in children[waiting.pop()] if child not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return list(found)


def _is_here(host: str) -> bool:
    """Return whether a host name or address is this host's."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as bound:
                bound.bind(address)  # fails for an address of another host
                return True
    return False


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTENS and int(columns[1].rpartition(":")[2], 16) == port:
                    yield columns[9]


def _sockets(pid: int) -> set[str]:
    """Return the inodes of a process' sockets; empty for a process of another user."""
    links = list[str]()
    with suppress(OSError):
        for file in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                links.append(os.readlink(file.path))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def _pids() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []
