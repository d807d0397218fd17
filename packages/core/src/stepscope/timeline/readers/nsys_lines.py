"""Reader of the files of `nsys export --type jsonlines`, and of `--type json`, which have the same lines.

Each line is one object: an event, or the texts that events name by number, in front of the events or behind
them. The file is read twice. It does not say when its session began: its times cannot be aligned.
Written from the published description and from lines that others printed; never run on a whole file of nsys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from stepscope.timeline.readers.blocks import Notes, read_blocks
from stepscope.timeline.readers.contract import (
    Claim,
    Event,
    FoundFile,
    Origin,
    Recording,
    Slice,
    Track,
)
from stepscope.timeline.readers.nsys_schema import PROCESS, pid_of

_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_HEAD = 1 << 16
_FIRST = re.compile(rb'\s*\{\s*"(?:Type"\s*:\s*\d+\s*,\s*"\w+Event"|data"\s*:\s*\[|type"\s*:\s*"String")')
_WANTED = re.compile(rb'"(?:CudaEvent|TraceProcessEvent|NvtxEvent)"')
_TEXTS = re.compile(rb'\s*\{\s*"(?:data|type)"')
_GLOBAL = re.compile(rb'"[gG]lobal[PT]id"\s*:\s*"?(\d+)')
_NO_NAME = "(no name)"
_COPIES = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}
_NO_START = "nsys' JSON does not say when its session began; `nsys export --type sqlite` does"
BROKEN = "lines that are not as nsys writes them"
BACKWARDS = "events that end before they begin"


class _Names(msgspec.Struct):
    demangled: int | None = msgspec.field(name="demangledName", default=None)
    short: int | None = msgspec.field(name="shortName", default=None)


class _Copy(msgspec.Struct):
    size: int | None = msgspec.field(name="sizebytes", default=None)
    kind: int | None = msgspec.field(name="copyKind", default=None)


class _Cuda(msgspec.Struct, rename="camel"):
    start_ns: int
    end_ns: int
    device_id: int | None = None
    stream_id: int | None = None
    correlation_id: int | None = None
    global_pid: int = 0
    kernel: _Names | None = None
    memcpy: _Copy | None = None
    memset: _Copy | None = None


class _Call(msgspec.Struct, rename="camel"):
    start_ns: int
    end_ns: int
    name: int | None = None
    correlation_id: int | None = None
    global_tid: int = 0


class _Nvtx(msgspec.Struct, rename="pascal"):
    timestamp: int
    end_timestamp: int | None = None
    text: str | None = None
    text_id: int | None = None
    global_tid: int = 0


class _Line(msgspec.Struct):
    cuda: _Cuda | None = msgspec.field(name="CudaEvent", default=None)
    call: _Call | None = msgspec.field(name="TraceProcessEvent", default=None)
    nvtx: _Nvtx | None = msgspec.field(name="NvtxEvent", default=None)


class _Texts(msgspec.Struct):
    data: list[str] = []
    type: str = ""
    id: int | None = None
    value: str = ""


_line = msgspec.json.Decoder(_Line, strict=False).decode
_texts = msgspec.json.Decoder(_Texts, strict=False).decode


class NsysLinesReader:
    """JSON exports of Nsight Systems."""

    name = "nsys json"

    def claims(self, file: FoundFile) -> Claim | None:
        if not file.path.name.endswith(_SUFFIXES):
            return None
        head = file.head(_HEAD)
        known = _FIRST.match(head) is not None and (head.startswith(b'{"Type"') or b"Event" in head)
        return Claim() if known or (_FIRST.match(head) and file.path.suffix == ".jsonl") else None

    def open(self, file: FoundFile, notes: Notes) -> Recording:
        return _Lines(file, notes)


class _Lines:
    """One file, opened."""

    def __init__(self, file: FoundFile, notes: Notes) -> None:
        self._file = file
        self._notes = notes
        self._names: dict[int, str] = {}
        self._tracks: dict[tuple[int | None, str], int] = {}
        pids = set[int]()
        for line in self._lines(Notes()):
            if _WANTED.search(line):
                pids |= {pid_of(int(number)) for number in _GLOBAL.findall(line)}
            elif _TEXTS.match(line):
                self._take_texts(line)
        self.origin = Origin(
            clock="unknown",
            why=_NO_START,
            pid=min(pids) if len(pids) == 1 else None,
            processes=tuple(sorted(pids)),
        )

    def close(self) -> None:
        pass

    def events(self) -> Iterator[Event]:
        for text in self._lines(self._notes):
            if not _WANTED.search(text):
                continue
            try:
                line = _line(text)
            except msgspec.MsgspecError:
                self._notes.events(BROKEN)
                continue
            if line.cuda is not None:
                yield from self._device(line.cuda)
            elif line.call is not None:
                call = line.call
                track = self._of_thread("CUDA API", call.global_tid)
                args = {"correlation": call.correlation_id}
                yield from self._slice(
                    track, self._name(call.name), call.start_ns, call.end_ns, "cuda_runtime", args
                )
            elif (nvtx := line.nvtx) is not None and nvtx.end_timestamp:
                track, name = self._of_thread("NVTX", nvtx.global_tid), nvtx.text or self._name(nvtx.text_id)
                yield from self._slice(track, name, nvtx.timestamp, nvtx.end_timestamp, "user_annotation", {})

    def _device(self, event: _Cuda) -> Iterator[Event]:
        times = event.start_ns, event.end_ns
        args = {"device": event.device_id, "stream": event.stream_id, "correlation": event.correlation_id}
        if event.kernel is not None:
            names = (self._name(number) for number in (event.kernel.demangled, event.kernel.short))
            name, category = next((name for name in names if name != _NO_NAME), _NO_NAME), "kernel"
        elif event.memcpy is not None:
            kind = event.memcpy.kind or 0
            name, category = f"Memcpy {_COPIES.get(kind, kind)}", "gpu_memcpy"
            args["bytes"] = event.memcpy.size
        elif event.memset is not None:
            name, category = "Memset", "gpu_memset"
        else:
            return  # waits for events and streams
        gpu = f"GPU {'unknown' if event.device_id is None else event.device_id}"
        stream = "unknown" if event.stream_id is None else event.stream_id
        track = Track(
            track=0, name=f"{gpu} stream {stream}", pid=pid_of(event.global_pid), device=gpu, sort=1000
        )
        yield from self._slice(track, name, *times, category, args)

    def _of_thread(self, kind: str, thread: int) -> Track:
        return Track(track=0, name=f"{kind} thread {thread & ~PROCESS}", pid=pid_of(thread))

    def _slice(
        self,
        track: Track,
        name: str,
        start_ns: int,
        end_ns: int,
        category: str,
        args: Mapping[str, int | None],
    ) -> Iterator[Event]:
        """Yield a slice, behind its track if that is new."""
        if end_ns < start_ns:
            self._notes.events(BACKWARDS)
            return
        number = self._tracks.get((track.pid, track.name))
        if number is None:
            number = self._tracks[track.pid, track.name] = len(self._tracks)
            yield msgspec.structs.replace(track, track=number)
        known = {word: value for word, value in args.items() if value is not None}
        yield Slice(
            track=number, name=name, start_ns=start_ns, dur_ns=end_ns - start_ns, category=category,
            args=known or None,
        )  # fmt: skip

    def _take_texts(self, line: bytes) -> None:
        try:
            texts = _texts(line)
        except msgspec.MsgspecError:
            return  # of threads, streams of output, or the like
        self._names.update(enumerate(texts.data))
        if texts.type == "String" and texts.id is not None:
            self._names[texts.id] = texts.value

    def _name(self, number: int | None) -> str:
        return self._names.get(-1 if number is None else number) or _NO_NAME

    def _lines(self, notes: Notes) -> Iterator[bytes]:
        rest = b""
        for block in read_blocks(self._file.path, notes):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        if rest and not rest.rstrip().endswith(b"}"):
            notes.file("cut off: its last line does not end")
        yield rest
