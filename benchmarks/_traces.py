"""Steps of any size to merge, made from a real torch trace. The same trace and seed give the same step.

Each rank gets the trace with its own pids and tids, and starts within four seconds of the others. The events
of the trace are repeated until it has the requested size.
"""

from __future__ import annotations

import gzip
import random
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from stepscope.files.layout import sidecar_of
from stepscope.files.sidecar import Artifact, Sidecar
from stepscope.testing.steps import OPENED_NS, StepFolder

_LONGER = 1 << 16
"""Bytes to copy beyond the requested size, so that the end can be cut after a whole event."""
PROFILE_ID = "bench"
"""The part of the file names by which SGLang's merger finds the files."""
_PERIOD_S = 7_889_238
"""Kineto's base times are multiples of this period."""
_BASE_S = OPENED_NS // 1_000_000_000 // _PERIOD_S * _PERIOD_S


class Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def as_torch() -> Compressor:
    """Return a compressor that writes gzip as torch does, with level 9."""
    return zlib.compressobj(9, zlib.DEFLATED, 31)


def quickly() -> Compressor:
    """Return a compressor with igzip, for gigabytes of traces."""
    from isal import isal_zlib

    made: Compressor = isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31)
    return made


def record(steps: int) -> bytes:
    """Return a torch trace of small training steps of linear layers."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)), torch.nn.Linear(32, 1))
    return _recorded(steps, lambda: model(torch.randn(4, 32)).sum().backward())


def record_stacks(steps: int) -> bytes:
    """Return a torch trace of training steps of a small transformer, with Python stacks."""
    return record_transformer(steps, stacks=True)


def record_transformer(steps: int, *, stacks: bool = False) -> bytes:
    """Return a torch trace of a small transformer's training steps, with Python stacks or operator shapes."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, 16, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _recorded(steps, step, shapes=not stacks, stacks=stacks)


def _recorded(steps: int, step: Callable[[], object], *, shapes: bool = False, stacks: bool = False) -> bytes:
    from torch.profiler import profile, record_function

    with profile(record_shapes=shapes, with_stack=stacks) as profiler:
        for _ in range(steps):
            with record_function("update_actor"):
                step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


class Template:
    """A recorded trace, split into its events and the text around them."""

    def __init__(self, trace: bytes) -> None:
        start = re.search(rb'"traceEvents": \[\s*', trace)
        process = re.search(rb'"pid": (\d+)', trace)
        assert start is not None
        assert process is not None
        end = trace.rindex(b"]")
        base = rb'(?<="baseTimeNanoseconds": )\d+'
        self._head = re.sub(base, b"%d" % (_BASE_S * 10**9), trace[: start.end()])
        self._tail = trace[end:]
        events = trace[start.end() : end].rstrip()
        threads = {process[1]: 0, **dict.fromkeys(re.findall(rb'"tid": (\d{3,})', events), 0)}
        self._threads = {tid: number for number, tid in enumerate(threads)}
        seconds = {int(second) for second in re.findall(rb'"ts": (\d+)\d{6}', events)}
        self._lasts_s = max(seconds) - min(seconds) + 1
        # Moved from the time of the recording to the time of the step.
        self._events = _later(events, OPENED_NS // 10**9 - _BASE_S - min(seconds))

    def trace(self, rank: int, size: int, chance: random.Random) -> Iterator[bytes]:
        """Yield parts of the text of a rank's trace, of about `size` bytes together."""
        own = {tid: b"%d" % (self.pid(rank) + number) for tid, number in self._threads.items()}
        enough = self._events if size > len(self._events) else self._events[: size + _LONGER]
        events = re.sub(rb'("[pt]id": )(\d+)', lambda match: match[1] + own.get(match[2], match[2]), enough)
        begun_s = chance.randrange(4)
        yield self._head
        for turn in count():
            text = _later(events, begun_s + turn * self._lasts_s)
            size -= len(text)
            if size <= 0:
                yield text[: text.rindex(b"\n  },", 0, size or None) + len(b"\n  }")]
                yield self._tail
                return
            yield text + b",\n"

    def pid(self, rank: int) -> int:
        return 100_000 + 32 * rank


def _later(events: bytes, by: int) -> bytes:
    """Return the events with `by` seconds added to their times."""
    at = rb'("ts": )(\d+)(?=\d{6}\D)'
    return re.sub(at, lambda match: b"%b%d" % (match[1], int(match[2]) + by), events) if by else events


def build(
    root: Path, template: Template, ranks: int, size: int, compressor: Callable[[], Compressor], seed: int = 1
) -> tuple[Path, int]:
    """Write a step with a trace of about `size` bytes of JSON for each rank. Return (folder, all bytes)."""
    chance = random.Random(seed)
    folder = StepFolder(root)
    folder.process("trainer", owner=True).close(10**10)
    total = 0
    for rank in range(ranks):
        actor = folder.process("actor", rank, pid=template.pid(rank))
        actor.span("update_actor", 0, 10**9)
        actor.close(10**10)
        path = folder.layout.traces / "actor" / f"{PROFILE_ID}-TP-{rank}.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        packed = compressor()
        with path.open("wb") as file:
            for text in template.trace(rank, size, chance):
                file.write(packed.compress(text))
                total += len(text)
            file.write(packed.flush())
        describe(folder, path, rank, actor.info.host, actor.info.pid, actor.info.key)
    return folder.write(), total


def describe(folder: StepFolder, path: Path, rank: int, host: str, pid: int | None, key: str | None) -> None:
    """Write the sidecar of a trace."""
    artifact = Artifact(
        path=str(path.relative_to(folder.layout.root)), kind="torch_trace", tool="torch", role="actor",
        rank=rank, host=host, pid=pid, size_bytes=path.stat().st_size,
    )  # fmt: skip
    made = Sidecar(
        step=folder.step, run_id=folder.run_id, artifact=artifact, process=key, opened=None, closed=None
    )
    sidecar_of(path).write_bytes(msgspec.json.encode(made))


def build_of_files(root: Path, traces: list[Path]) -> Path:
    """Write a step whose ranks have these traces from other machines, and return its folder."""
    folder = StepFolder(root)
    folder.process("trainer", owner=True).close(10**10)
    for rank, trace in enumerate(traces):
        path = folder.layout.traces / "actor" / f"{PROFILE_ID}-TP-{rank}.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(_at_the_step(gzip.decompress(trace.read_bytes()))))
        describe(folder, path, rank, "host-a", None, None)
    return folder.write()


def _at_the_step(trace: bytes) -> bytes:
    """Return the trace, moved by whole seconds to the time of the step.

    The base time is changed, or all times if the trace has no base time.
    """
    first = re.search(rb'"ph": "X".*?"ts": (\d+)', trace, re.DOTALL)
    recorded_s = 0 if first is None else int(first[1]) // 10**6
    opened_s = OPENED_NS // 10**9
    if b'"baseTimeNanoseconds"' not in trace:
        return _later(trace, opened_s - recorded_s)
    base = b"%d" % ((opened_s - recorded_s) * 10**9)
    return re.sub(rb'(?<="baseTimeNanoseconds": )\d+', base, trace)
