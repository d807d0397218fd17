"""Spans of other tracers in a step's timeline, from OTLP JSON files.

The files lie in the folder `otel` of the step or of its run. A step's timeline gets the spans of the step's
own trace, and all spans that ran during the step. vLLM's `llm_request`, SGLang's `Req`, OpenInference and the
`gen_ai` conventions get the names of stepscope's stages; any other span keeps its name and its process' role.
Ids of parents are also looked up among stepscope's spans (`files.trace_context`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.files.layout import RunLayout, StepLayout
from stepscope.files.sidecar import ProcessInfo
from stepscope.files.spans import only_waits
from stepscope.files.trace_context import SpanIds, TraceContext, parse_traceparent, trace_id_of
from stepscope.files.values import AttrValue, bounded
from stepscope_report.timeline.clocks import NOT_NEAR, is_near
from stepscope_report.timeline.model import FileProblem, Process, ProcessClock, Span, Timeline
from stepscope_report.timeline.readers.otlp import SUFFIXES, OtlpSpan, Resource, read_otlp
from stepscope_report.timeline.rows import clock_of, names_of, offset_at
from stepscope_report.timeline.tree import cut_cycles

_LATENCY = "gen_ai.latency."
_PHASES = (
    ("queue", f"{_LATENCY}time_in_queue"),
    ("prefill", f"{_LATENCY}time_in_model_prefill"),
    ("decode", f"{_LATENCY}time_in_model_decode"),
)
"""(Phase of a vLLM request, attribute with its length), in order. The phases of an SGLang request are spans
of SGLang, because its attributes count the queue as prefill."""
_SGLANG = "sglang server"
"""The tracer of SGLang's spans."""
_SGLANG_STAGES = {
    "prefill_waiting": "queue",
    "prefill_forward": "prefill",
    "chunked_prefill": "prefill",
    "decode_waiting": "wait",
    "decode_forward": "decode",
    "decode_loop": "decode",
}
_RANKS = ("tp_rank", "pp_rank")
"""Attributes of a scheduler's span that number its rank. All ranks of an engine run the same passes for a
request."""
_DEEPEST = 5
"""Largest number of spans that are checked on the way up from a span. A path from a request to a token has at
most four spans."""
_THREAD = "thread_label"
"""The attribute of SGLang's spans whose value holds the host and the pid of the process."""
_SEVERAL = "MultiTokenizer-"
"""Text before the pid in `thread_label`, if a server has several tokenizer workers."""
_FACTS = {
    "gen_ai.request.id": "request_id",
    "rid": "request_id",
    "gen_ai.usage.prompt_tokens": "prompt_tokens",
    "gen_ai.usage.completion_tokens": "output_tokens",
    "gen_ai.usage.cached_tokens": "cached_tokens",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "output_tokens",
    "llm.token_count.prompt": "prompt_tokens",
    "llm.token_count.completion": "output_tokens",
    "llm.token_count.prompt_details.cache_read": "cached_tokens",
}
"""{attribute of another tracer: its name in stepscope, as in `record_request`}."""
_GENERATE, _TOOL, _AGENT = "generate", "tool", "agent"
_KINDS = {
    "openinference.span.kind": {"LLM": _GENERATE, "TOOL": _TOOL, "AGENT": _AGENT},
    "gen_ai.operation.name": {
        "chat": _GENERATE,
        "generate_content": _GENERATE,
        "text_completion": _GENERATE,
        "execute_tool": _TOOL,
        "invoke_agent": _AGENT,
    },
}
"""{attribute: {value: kind of work}}."""
_ROLES = {_GENERATE: "rollout", _TOOL: "env", _AGENT: "agent_loop"}
_TOOL_NAMES = ("gen_ai.tool.name", "tool.name")
_UNKNOWN_HOST = "host not named"
_UNNAMED = "otel"


def is_request(span: OtlpSpan) -> bool:
    """Return whether an inference engine made the span for one request."""
    return any(name.startswith(_LATENCY) for name in span.attrs)


def _is_of_engine(span: OtlpSpan) -> bool:
    return span.scope == _SGLANG or is_request(span)


def _engine_stage(span: OtlpSpan) -> str | None:
    """Return the stage of a span that an engine made, or None for any other span."""
    if is_request(span):
        return "request"
    if span.scope != _SGLANG:
        return None
    thread = span.attrs.get(_THREAD)
    if isinstance(thread, str):
        return "tokenizer" if thread.startswith(_SEVERAL) else thread.lower()
    return _SGLANG_STAGES.get(span.name, span.name)


def without_copies(spans: Sequence[OtlpSpan]) -> list[OtlpSpan]:
    """Return the spans without SGLang's spans that repeat the time of another span.

    Left out are single tokens and chunks below their phase, and all ranks of an engine but the first.
    """
    of_sglang = {TraceContext(span.trace_id, span.span_id): span for span in spans if span.scope == _SGLANG}

    def above(span: OtlpSpan) -> OtlpSpan | None:
        return of_sglang.get(TraceContext(span.trace_id, span.parent_id or ""))

    def is_copy(span: OtlpSpan) -> bool:
        stage, around = _SGLANG_STAGES.get(span.name), above(span)
        if stage is not None and around is not None and _SGLANG_STAGES.get(around.name) == stage:
            return True
        path: OtlpSpan | None = span
        for _ in range(_DEEPEST):
            if path is None:
                return False
            if any(path.attrs.get(rank) for rank in _RANKS):
                return True
            path = above(path)
        return False

    return [span for span in spans if span.scope != _SGLANG or not is_copy(span)]


def _with_our_names(attrs: Mapping[str, AttrValue]) -> dict[str, AttrValue]:
    """Return the attributes of a request, each under stepscope's name if there is one."""
    named: dict[str, AttrValue] = {}
    for name, value in attrs.items():
        if name in _FACTS:
            named.setdefault(_FACTS[name], value)
        else:
            named[name] = value
    return named


def _phases(request: Span) -> Iterator[Span]:
    """Yield the phases of an engine's request, if the engine states the length of all of them.

    The engine states no start times. The phases are placed without gaps so that the last phase ends with the
    last token. In the time before the phases, the frontend read the prompt.
    """
    if request.end_ns is None or request.dur_ns is None:
        return
    seconds = [(request.attrs or {}).get(name) for _, name in _PHASES]
    lengths = [round(s * 1e9) for s in seconds if isinstance(s, int | float) and 0 <= s < 1e6]
    until_ns = _until_ns(request.attrs or {}, request.dur_ns)
    if len(lengths) < len(_PHASES) or sum(lengths) > until_ns:
        return
    at_ns = request.start_ns + until_ns - sum(lengths)
    for (stage, _), length_ns in zip(_PHASES, lengths, strict=True):
        yield msgspec.structs.replace(
            request,
            stage=stage,
            start_ns=at_ns,
            end_ns=at_ns + length_ns,
            dur_ns=length_ns,
            attrs=None,
            error=None,
            waits=only_waits(stage, None),
        )
        at_ns += length_ns


def _until_ns(attrs: Mapping[str, AttrValue], dur_ns: int) -> int:
    """Return the time from the arrival to the last token, or to the end of the span if the last token is not
    stated.
    """
    seconds = attrs.get(f"{_LATENCY}e2e")
    return min(round(seconds * 1e9), dur_ns) if isinstance(seconds, float) and 0 < seconds < 1e6 else dur_ns


class _Naming(NamedTuple):
    """The role, the stage and the attributes of a span in a step's timeline."""

    role: str | None
    """The role of the span, or None for the role of its process."""
    stage: str
    attrs: dict[str, AttrValue]


def _naming(span: OtlpSpan, *, alone: bool) -> _Naming:
    """Return the names that stepscope gives a span.

    Args:
        alone: True if no engine recorded its requests, so that tokens are counted on the agent's calls.
    """
    stage = _engine_stage(span)
    if stage is not None:
        return _Naming(None, stage, _with_our_names(span.attrs))
    kind = _kind(span.attrs)
    if kind == _GENERATE:
        return _Naming(_ROLES[kind], kind, _with_our_names(span.attrs) if alone else span.attrs)
    stage = _tool(span.attrs) if kind == _TOOL else None
    return _Naming(_ROLES.get(kind or ""), stage or span.name, span.attrs)


def _kind(attrs: Mapping[str, AttrValue]) -> str | None:
    kinds = (table.get(str(attrs.get(name))) for name, table in _KINDS.items())
    return next(filter(None, kinds), None)


def _tool(attrs: Mapping[str, AttrValue]) -> str | None:
    names = (attrs.get(name) for name in _TOOL_NAMES)
    return next((bounded(name) for name in names if isinstance(name, str) and name), None)


def add_foreign(layout: StepLayout, timeline: Timeline) -> Timeline:
    """Return the timeline with the spans of other tracers. Parents named by trace context are set, too."""
    files = list(_files(layout))
    if not files and all(span.traceparent is None for span in timeline.spans):
        return timeline
    contexts = _contexts(timeline)
    taken, problems = _read(layout, files, timeline, contexts)
    merged = GrowingTimeline(timeline, contexts, engines=any(map(is_request, taken)))
    for info, spans in by_process(without_copies(taken), timeline):
        merged.add(info, spans)
    merged.link()
    return msgspec.structs.replace(
        timeline,
        processes=merged.named(),
        spans=merged.spans,
        problems=(*timeline.problems, *problems),
    )


def _files(layout: StepLayout) -> Iterator[Path]:
    for folder in (layout.otel, RunLayout(layout.root.absolute().parent).otel):
        yield from sorted(path for path in folder.glob("[!.]*") if not path.is_dir())


def _contexts(timeline: Timeline) -> dict[TraceContext, int]:
    """Return {ids of a span of stepscope in OpenTelemetry: index of the span}."""
    run, step = timeline.run_id, timeline.step
    ids = [SpanIds(run, step, process.info.key) for process in timeline.processes]
    contexts: dict[TraceContext, int] = {}
    for index, span in enumerate(timeline.spans):
        own = ids[span.process]
        contexts.setdefault(TraceContext(own.trace_id, own.span_id(span.number)), index)
    return contexts


def _read(
    layout: StepLayout, files: Sequence[Path], timeline: Timeline, contexts: dict[TraceContext, int]
) -> tuple[list[OtlpSpan], list[FileProblem]]:
    own, window = trace_id_of(timeline.run_id, timeline.step), timeline.window
    seen: set[TraceContext] = set(contexts)
    far = 0

    def is_wanted(span: OtlpSpan) -> bool:
        nonlocal far
        context = TraceContext(span.trace_id, span.span_id)
        overlaps = span.start_ns < window.end_ns and span.end_ns > window.start_ns
        if context in seen or not (span.trace_id == own or overlaps):
            return False
        seen.add(context)
        if not is_near(span.start_ns, span.end_ns, (window.start_ns, window.end_ns)):
            far += 1
            return False
        return True

    spans: list[OtlpSpan] = []
    problems: list[FileProblem] = []
    for path in files:
        name = f"otel/{path.name}" if path.parent == layout.otel else f"../otel/{path.name}"
        if path.suffix not in SUFFIXES:
            problems.append(
                FileProblem(
                    file=name,
                    what=f"not read: its name ends in {path.suffix!r}; allowed: {', '.join(SUFFIXES)}",
                )
            )
            continue
        far = 0
        file = read_otlp(path, is_wanted)
        if far:
            file.note(NOT_NEAR.replace("events", "spans"), far)
        spans += file.spans
        problems += [FileProblem(file=name, what=what, lines=count) for what, count in file.problems.items()]
    return spans, problems


def by_process(spans: Sequence[OtlpSpan], timeline: Timeline) -> Iterator[tuple[ProcessInfo, list[OtlpSpan]]]:
    """Yield the spans of each process by start. A process with spans of an engine is a replica."""
    of_resource: dict[Resource, list[OtlpSpan]] = {}
    for span in spans:
        of_resource.setdefault(span.resource, []).append(span)
    groups: dict[tuple[ProcessInfo, str | None], list[OtlpSpan]] = {}
    for resource, own in of_resource.items():
        serves = any(map(_is_of_engine, own))
        groups.setdefault((_info(resource, serves, timeline), resource.service), []).extend(own)
    for (info, _), own in groups.items():
        yield info, sorted(own, key=lambda span: (span.start_ns, -span.end_ns))


def _info(resource: Resource, serves: bool, timeline: Timeline) -> ProcessInfo:
    """Return the identity of a process. If the process serves requests, it gets the replica number of the
    recorded process with the same host and pid, if there is one.
    """
    host = _host(resource, timeline)
    known = (
        process.info.replica
        for process in timeline.processes
        if resource.pid == process.info.pid and host == process.info.host
    )
    service = resource.service or _UNNAMED
    named = _UNNAMED if service.startswith("unknown_service") else service
    return ProcessInfo(
        role="rollout" if serves else named,
        rank=None,
        world_size=None,
        host=host or resource.host or _UNKNOWN_HOST,
        pid=resource.pid or 0,
        replica=next(known, None) if serves else None,
    )


def _host(resource: Resource, timeline: Timeline) -> str | None:
    """Return the step's name of the resource's host, or None if it is no host of the step."""
    hosts = [process.info.host for process in timeline.processes]
    named = {host.partition(".")[0]: host for host in hosts} | {host: host for host in hosts}
    wanted = resource.host or ""
    return named.get(wanted) or named.get(wanted.partition(".")[0])


class _Placed(NamedTuple):
    span: Span
    own: TraceContext | None = None
    parent: TraceContext | None = None
    around: Span | None = None
    """The span of the request that this span is a phase of, or None if it is no phase."""


class GrowingTimeline:
    """A timeline that grows by processes of other tracers."""

    def __init__(self, timeline: Timeline, contexts: dict[TraceContext, int], *, engines: bool) -> None:
        self._timeline = timeline
        self._contexts = contexts
        self._parents: dict[int, TraceContext] = {
            index: context
            for index, span in enumerate(timeline.spans)
            if span.parent is None and (context := parse_traceparent(span.traceparent)) is not None
        }
        attributes = (span.attrs for span in timeline.spans if span.attrs)
        self._recorded = {attrs["request_id"] for attrs in attributes if "request_id" in attrs}
        """Ids of requests whose phases stepscope recorded."""
        self._alone = not (engines or self._recorded)
        """True if no engine recorded its requests."""
        self.processes = list(timeline.processes)
        self.spans = list(timeline.spans)

    def place_beside(self, processes: tuple[Process, ...]) -> None:
        """Use the clocks of these processes to place the spans of processes that are added from now on."""
        self._timeline = msgspec.structs.replace(self._timeline, processes=processes)

    def add(self, info: ProcessInfo, spans: Sequence[OtlpSpan]) -> None:
        """Add a process with its spans, in the order of their starts."""
        beside = clock_of(info.host, self._timeline.processes)
        process = len(self.processes)
        placed = [item for span in spans for item in self._place(span, process, info.role, beside)]
        placed.sort(key=lambda item: (item.span.start_ns, -(item.span.end_ns or 0)))
        index_of = {id(item.span): len(self.spans) + at for at, item in enumerate(placed)}
        for index, item in enumerate(placed, len(self.spans)):
            if item.own is not None:
                self._contexts[item.own] = index
            if item.parent is not None:
                self._parents[index] = item.parent
            if item.around is not None:
                item.span.parent = index_of[id(item.around)]
        self.spans += (item.span for item in placed)
        last_ns = max(item.span.end_ns or 0 for item in placed)
        self.processes.append(
            Process(
                name=info.role,
                info=info,
                owner=False,
                opened_ns=placed[0].span.start_ns,
                closed_ns=last_ns,
                last_ns=last_ns,
                clock=_clock(info, self._timeline) if beside is None else _same(beside),
                spans=len(placed),
                dropped=0,
                cost=None,
            )
        )

    def _place(self, span: OtlpSpan, process: int, role: str, beside: Process | None) -> Iterator[_Placed]:
        """Yield the span on the owner's clock, then its phases if the span is an engine's request."""
        start_ns, end_ns = (
            wall_ns if beside is None else wall_ns - offset_at(beside, wall_ns)
            for wall_ns in (span.start_ns, span.end_ns)
        )
        named = _naming(span, alone=self._alone)
        made = Span(
            process=process,
            parent=None,
            role=named.role or role,
            stage=named.stage,
            start_ns=start_ns,
            end_ns=end_ns,
            dur_ns=end_ns - start_ns,
            step=self._timeline.step,
            attrs=named.attrs or None,
            error=span.error,
            waits=only_waits(named.stage, None),
        )
        above = None if span.parent_id is None else TraceContext(span.trace_id, span.parent_id)
        yield _Placed(made, TraceContext(span.trace_id, span.span_id), above)
        if named.attrs.get("request_id") not in self._recorded:
            for phase in _phases(made):
                yield _Placed(phase, around=made)

    def link(self) -> None:
        """Set the parents that spans name by trace context, then pass trajectories on to the spans below."""
        self.spans = [
            msgspec.structs.replace(span) if at in self._parents else span
            for at, span in enumerate(self.spans)
        ]
        parents = [span.parent for span in self.spans]
        for index, context in self._parents.items():
            parents[index] = self._contexts.get(context)
        cut_cycles(parents)
        for span, parent in zip(self.spans, parents, strict=True):
            span.parent = parent
        for index in range(len(self.spans)):
            self._inherit(index)

    def _inherit(self, index: int) -> None:
        """Copy trajectory, turn, policy version and step of the nearest span above with a trajectory, to the
        span and to all spans between. A turn or policy version that is already set stays.
        """
        path: list[Span] = []
        at: int | None = index
        while at is not None and self.spans[at].trajectory is None:
            path.append(self.spans[at])
            at = self.spans[at].parent
        if at is None:
            return
        above = self.spans[at]
        for span in path:
            span.trajectory, span.turn = above.trajectory, above.turn if span.turn is None else span.turn
            span.policy_version = above.policy_version if span.policy_version is None else span.policy_version
            span.step = above.step

    def named(self) -> tuple[Process, ...]:
        names = names_of([process.info for process in self.processes])
        return tuple(
            process if process.name == name else msgspec.structs.replace(process, name=name)
            for process, name in zip(self.processes, names, strict=True)
        )


def _same(process: Process) -> ProcessClock:
    """Return the clock of a process on the same host as the recorded `process`."""
    alignment = "same host" if process.clock.alignment == "owner" else process.clock.alignment
    return msgspec.structs.replace(process.clock, alignment=alignment)


def _clock(info: ProcessInfo, timeline: Timeline) -> ProcessClock:
    if any(process.info.host == info.host for process in timeline.processes):
        return ProcessClock(alignment="unaligned")
    host = "no host" if info.host == _UNKNOWN_HOST else f"host {info.host}, which no process of the step has"
    note = f"its spans name {host} (`host.name`): its clock is taken to be the owner's"
    return ProcessClock(alignment="assumed", note=note)
