"""A TokenizerManager whose schedulers exist only in memory. They follow rules that a real SGLang showed.

The rules that an adapter must handle are: a start silently replaces a running profile, an armed start cannot
be cancelled, a refused stop has no reason, and a call must not be cancelled.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from stepscope.engines.protocol import EngineCapture
from stepscope.files.sidecar import Artifact
from stepscope.testing.engine_conformance import a_capture
from stepscope_sglang import SglangProfiler
from stepscope_sglang._engine_side import plugin, states

NOT_RUNNING = "Profiling is not in progress. Call /start_profile first."
RUNNING = "Profiling is already in progress. Call /stop_profile first."


def plugin_state(count: int, **changes: object) -> dict[str, object]:
    """Return the plugin's answer for a scheduler that has begun `count` passes."""
    answer = SimpleNamespace(internal_state={})
    plugin.show(answer, SimpleNamespace(forward_ct=count))
    return {**answer.internal_state, states.SENDS_QUIET: True, **changes}  # as a scheduler's process answers


class ProfileReq(msgspec.Struct, kw_only=True):
    """A profile request with the fields of SGLang 0.5.23."""

    output_dir: str | None = None
    start_step: int | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: str | None = None
    merge_profiles: bool = False
    profile_prefix: str | None = None
    profile_stages: list[str] | None = None
    detailed_annotations: bool = False


@dataclass
class Scheduler:
    """The scheduler of one rank."""

    suffix: str
    rank: int
    world_size: int
    request: ProfileReq = field(default_factory=ProfileReq)
    forward_ct: int = 0
    start_at: int | None = None
    stop_at: int | None = None
    seen: dict[str, int] = field(default_factory=dict)
    recording: list[str] | None = None
    stamps: list[dict[str, object]] = field(default_factory=list)
    """Stamps in the form in which stepscope's plugin keeps them."""

    def start(self, request: ProfileReq) -> str | None:
        """Start a profile. Return the error, or None."""
        armed = bool(request.profile_by_stage or request.start_step)
        if self.recording is not None:
            if armed:
                return RUNNING
            self.recording = []  # the events of the first profile are lost, but its folder is still used
            return None
        self.request = request
        if request.start_step:
            self.start_at = max(request.start_step, self.forward_ct + 1)
        self.stop_at = None
        if request.profile_by_stage:
            self.seen = {"EXTEND": 0, "DECODE": 0}
        elif request.num_steps:
            self.stop_at = (self.start_at or self.forward_ct + 1) + request.num_steps
        if not armed:
            self.recording = []
        return None

    def stop(self, stage: str | None = None) -> str | None:
        if self.recording is None:
            return NOT_RUNNING
        self._write(self.recording, "" if stage is None else f"-{stage}")
        self.recording = self.start_at = None
        return None

    def forward(self, mode: str) -> None:
        self.forward_ct += 1
        if self.request.profile_by_stage:
            self._follow_stages(mode)
        else:
            if self.stop_at is not None and self.stop_at <= self.forward_ct:
                self.stop()
            if self.start_at == self.forward_ct:
                self.recording = []
        if self.recording is not None:
            self.recording.append(mode)

    def _follow_stages(self, mode: str) -> None:
        if self.request.num_steps is None:
            raise SystemExit("the scheduler has died: NoneType += int")
        if self.seen[mode] == 0:
            if mode == "DECODE" and self.recording is not None:
                self.stop("EXTEND")
            self.recording = []
        self.seen[mode] += 1
        if self.seen[mode] > self.request.num_steps and self.recording is not None:
            self.stop(mode)

    def shown(self) -> dict[str, object]:
        """Return the plugin's answer for this scheduler."""
        stages = {"prefill": self.seen.get("EXTEND", 0), "decode": self.seen.get("DECODE", 0)}
        by_stage = self.request.profile_by_stage
        shown = {states.RECORDINGS: list(self.stamps), states.STAGES: stages if by_stage else None}
        return plugin_state(self.forward_ct, **shown)

    def _write(self, modes: list[str], stage: str) -> None:
        request, began_ns = self.request, time.time_ns()
        folder = Path(request.output_dir or "/tmp")
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{request.profile_prefix}-" if request.profile_prefix else ""
        name = f"{prefix}{request.profile_id or time.time()}{self.suffix}{stage}.trace.json.gz"
        now, at = began_ns / 1000, {"pid": 4711 + self.rank, "tid": 4711}
        meta = {"ph": "M", "name": "process_name", "ts": now, **at, "args": {"name": "sglang"}}
        step = {"ph": "X", "cat": "user_annotation", **at, "ts": now, "dur": 1}
        steps = [{**step, "name": f"step[{mode} bs=1]"} for mode in modes]
        distributed = {"backend": "gloo", "rank": self.rank, "world_size": self.world_size}
        edge = {"ph": "i", "s": "g", "pid": "Traces", "tid": "Trace", "ts": now}
        marks = ("Iteration Start: PyTorch Profiler", "Record Window End")
        edges = [{"name": name, **edge} for name in marks]
        events = [meta, *steps, *edges]
        trace = {"distributedInfo": distributed, "baseTimeNanoseconds": 0, "traceEvents": events}
        (folder / name).write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
        if request.merge_profiles and self.rank == 0:
            merged = folder / f"merged-{request.profile_id}.trace.json.gz"
            merged.write_bytes((folder / name).read_bytes())
        stamp = states.Stamp(
            folder=str(folder),
            pid=4711 + self.rank,
            doing="writing",
            start_ns=began_ns,
            end_ns=time.time_ns(),
            passes=self.forward_ct,
        )
        self.stamps.append(msgspec.structs.asdict(stamp))


class FakeManager:
    """The TokenizerManager of 0.5.15 and later."""

    def __init__(self, *, tp: int = 1, dp: int = 1, pp: int = 1, **settings: object) -> None:
        sizes = {"tp_size": tp, "dp_size": dp, "pp_size": pp}
        given = {"device": "cpu", "sleep_on_idle": True, "enable_dp_attention": False, **sizes, **settings}
        self.server_args = SimpleNamespace(**given)
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.schedulers = [
            Scheduler(_suffix(tp, dp, pp, t, d, p), p * tp + t, tp * pp)
            for d in range(dp)
            for p in range(pp)
            for t in range(tp)
        ]
        self.asked: list[str] = []
        self.wedged = False
        self.silent: str | None = None
        """`start` or `stop` if that call is not answered until `answer` is set; else None."""
        self.answer = asyncio.Event()
        self.dead = False
        self.lag_s = 0.0
        """Time in s from the first pipeline rank's answer to a stop until the other ranks stop."""
        self.lost = 0
        """Number of schedulers that died because their folder was gone."""
        self.has_plugin = True
        """True if the schedulers have loaded stepscope's plugin."""

    @property
    def recording(self) -> bool:
        return any(scheduler.recording is not None for scheduler in self.schedulers)

    @property
    def armed(self) -> bool:
        return any(
            scheduler.start_at is not None and scheduler.recording is None for scheduler in self.schedulers
        ) or any(
            scheduler.request.profile_by_stage and 0 in scheduler.seen.values()
            for scheduler in self.schedulers
        )

    async def start_profile(self, req: ProfileReq | None = None) -> None:
        await self._ask("start", req or ProfileReq())

    async def stop_profile(self) -> None:
        await self._ask("stop", None)

    async def get_internal_state(self) -> list[dict[str, object]]:
        self._bind()
        return [scheduler.shown() if self.has_plugin else {} for scheduler in self.schedulers]

    async def generate(self, iterations: int, mode: str | None = None, only: int | None = None) -> None:
        """Run one prefill pass, then decode passes.

        Args:
            mode: Mode of all passes, instead of prefill and decode.
            only: Index of the only scheduler that runs them, or None for all.
        """
        self._bind()
        for number in range(iterations):
            await asyncio.sleep(0)
            for scheduler in self.schedulers if only is None else [self.schedulers[only]]:
                scheduler.forward(mode or ("DECODE" if number else "EXTEND"))

    async def _ask(self, what: str, request: ProfileReq | None) -> None:
        self._bind()
        self.asked.append(what)
        if self.wedged or self.dead:
            await asyncio.Event().wait()
        try:
            await asyncio.sleep(0)
            if self.silent == what:
                await self.answer.wait()
        except asyncio.CancelledError:
            self.wedged = True
            raise
        first = self.schedulers
        if request is None and self.lag_s:
            first = [scheduler for scheduler in self.schedulers if "-PP-0" in scheduler.suffix]
            later = [scheduler for scheduler in self.schedulers if scheduler not in first]
            for scheduler in later:
                asyncio.get_running_loop().call_later(self.lag_s, self._late, scheduler)
        errors = [s.stop() if request is None else s.start(request) for s in first]
        if errors[0] is not None:  # SGLang ignores the answers of the other schedulers
            raise RuntimeError(errors[0])

    def _late(self, scheduler: Scheduler) -> None:
        if scheduler.recording is None:
            return
        if Path(scheduler.request.output_dir or "").is_dir():
            scheduler.stop()
        else:
            self.lost += 1

    def _bind(self) -> None:
        running = asyncio.get_running_loop()
        if self.event_loop is None:
            self.event_loop = running
        if self.event_loop is not running:
            raise AssertionError("a TokenizerManager was used on a loop that does not own it")


class OldManager(FakeManager):
    """The TokenizerManager of 0.5.8, whose start takes keywords, and no id from the caller."""

    async def start_profile(  # type: ignore[override]
        self,
        output_dir: str | None = None,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: list[str] | None = None,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
        profile_by_stage: bool = False,
        merge_profiles: bool = False,
        profile_prefix: str | None = None,
        profile_stages: list[str] | None = None,
    ) -> None:
        options: dict[str, Any] = {key: value for key, value in locals().items() if key != "self"}
        await self._ask("start", ProfileReq(**options, profile_id=str(time.time())))


class FakeEngine:
    """A stand-in for `sglang.Engine` with a manager, a loop of its own, and processes that can die."""

    def __init__(
        self,
        manager: FakeManager,
        processes: Sequence[subprocess.Popen[bytes]] = (),
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.tokenizer_manager = manager
        self.loop = loop
        self.processes = processes

    def get_all_child_pids(self) -> list[int]:
        return [process.pid for process in self.processes]


def named(kind: type, name: str, module: str) -> type:
    """Return a subclass of `kind` with the name and module of one of SGLang's classes."""
    return type(name, (kind,), {"__module__": module})


def trace(name: str, folder: Path, *, rank: int = 0, modes: Mapping[str, int] | None = None) -> Path:
    """Write a trace of one scheduler as SGLang does, and return its path."""
    scheduler = Scheduler("", rank, 1, ProfileReq(output_dir=str(folder), profile_id="x"))
    scheduler._write([mode for mode, times in (modes or {}).items() for _ in range(times)], "")
    written = folder / "x.trace.json.gz"
    return written.rename(folder / name)


def _suffix(tp: int, dp: int, pp: int, t: int, d: int, p: int) -> str:
    parts = [f"-TP-{t}", f"-DP-{d}" if dp > 1 else "", f"-PP-{p}" if pp > 1 else ""]
    return "".join(parts)


def asked(root: Path, **changes: Any) -> EngineCapture:
    """Return a capture in the folder `root` with some fields changed."""
    return msgspec.structs.replace(a_capture(root), **changes)


async def recorded(manager: FakeManager, capture: EngineCapture, iterations: int) -> list[Artifact]:
    """Return the artifacts of one capture around one generation."""
    profiler = SglangProfiler(manager)
    await profiler.start(capture)
    if iterations:
        await manager.generate(iterations)
    return await profiler.stop()
