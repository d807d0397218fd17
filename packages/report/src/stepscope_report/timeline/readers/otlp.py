"""Reader of OTLP JSON: spans that other tracers exported, as the collector's file exporter writes them.

A file holds one `ExportTraceServiceRequest` a line, or a single one over many lines. Field names are
lowerCamelCase, as the specification says. Texts are dropped unless `_TEXTS` lists them, because attributes
may contain prompts and completions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from stepscope.files.storage import MAX_BYTES, open_file
from stepscope.files.values import MAX_TEXT, AttrValue, bounded
from stepscope_report.timeline.clocks import FARTHEST_NS
from stepscope_report.timeline.sources import RecordFile

SUFFIXES = (".json", ".jsonl")
MOST_SPANS = 200_000
"""Largest number of spans that are taken from one file."""
_MOST_ATTRIBUTES = 64
_OWN_SCOPE = "stepscope"
"""Tracer name of `writers.otel`. Spans with this name are left out, because the span files have them."""
_TEXTS = frozenset(
    {
        "error.type",
        "gen_ai.agent.id",
        "gen_ai.agent.name",
        "gen_ai.conversation.id",
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.id",
        "gen_ai.request.model",
        "gen_ai.response.id",
        "gen_ai.response.model",
        "gen_ai.system",
        "gen_ai.tool.call.id",
        "gen_ai.tool.name",
        "gen_ai.tool.type",
        "http.request.method",
        "http.route",
        "llm.model_name",
        "module",
        "openinference.span.kind",
        "rid",
        "rpc.method",
        "rpc.service",
        "server.address",
        "thread_label",
        "tool.name",
        "trajectory_id",
    }
)
"""Attributes whose text is kept: names and ids. The text of any other attribute could be a user's."""
_HEX = re.compile(r"[0-9a-f]+")
Json: TypeAlias = Mapping[str, object]


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """The process that made a span, with the facts that its resource attributes state."""

    service: str | None = None
    host: str | None = None
    pid: int | None = None


class OtlpSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A span of another tracer. Times are unix ns by its host's clock."""

    resource: Resource
    scope: str | None
    """The tracer's name."""
    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attrs: dict[str, AttrValue]
    error: str | None
    """The type of the error that ended the span, or None. The message is left out, because it could quote a
    user."""


class OtlpFile(RecordFile):
    """Usable content of one file."""

    spans: list[OtlpSpan] = msgspec.field(default_factory=list)


class FieldError(ValueError):
    """A value that the specification does not allow; the message names the field."""


def read_otlp(path: Path, wanted: Callable[[OtlpSpan], bool]) -> OtlpFile:
    """Return the wanted spans of a file. Damaged parts are noted and skipped."""
    file = OtlpFile(path)
    try:
        with open_file(path) as stream:
            for request in _requests(stream, file):
                for span in _spans(request, file):
                    if not wanted(span):
                        continue
                    if len(file.spans) >= MOST_SPANS:
                        file.note(f"only the first {MOST_SPANS:,} spans of this step are used")
                        return file
                    file.spans.append(span)
    except OSError as error:
        file.note(f"cannot be read: {error.strerror or error}")
    return file


def _requests(stream: BinaryIO, file: OtlpFile) -> Iterator[Json]:
    """Yield each request: one for each line, or the whole file if its first line is not a request."""
    line = stream.readline(MAX_BYTES)
    if not line.strip():
        file.note("empty")
        return
    first = _decoded(line)
    if first is None:
        whole = line + stream.read(MAX_BYTES - len(line) + 1)
        first = _decoded(whole) if len(whole) <= MAX_BYTES else None
        if first is None:
            size = f"no JSON of at most {MAX_BYTES >> 20} MiB"
            file.note(f"{size}; write one OTLP request a line, as the collector's file exporter does")
        else:
            yield first
        return
    yield first
    while line := stream.readline(MAX_BYTES):
        request = _decoded(line) if line.strip() else {}
        if request is None:
            file.note("lines that are no OTLP request")
        else:
            yield request


def _decoded(data: bytes) -> Json | None:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _spans(request: Json, file: OtlpFile) -> Iterator[OtlpSpan]:
    try:
        resources = _objects(request, "resourceSpans")
        others = {"resourceSpans", "resourceLogs", "resourceMetrics"}
        if request and not request.keys() & others:
            raise FieldError(f"resourceSpans is missing among {', '.join(map(ascii, list(request)[:3]))}")
    except FieldError as error:
        file.note(str(error))
        return
    for group in resources:
        try:
            resource = _resource(group)
            scopes = [(_scope(scope), _objects(scope, "spans")) for scope in _objects(group, "scopeSpans")]
        except FieldError as error:
            file.note(str(error))
            continue
        for scope, span in ((name, span) for name, spans in scopes if name != _OWN_SCOPE for span in spans):
            try:
                yield _span(span, resource, scope)
            except FieldError as error:
                file.note(f"spans left out: {error}")


def _scope(spans: Json) -> str | None:
    name = _object(spans, "scope").get("name")
    return bounded(name) if isinstance(name, str) and name else None


def _resource(group: Json) -> Resource:
    attrs = dict(_attributes(_object(group, "resource")))
    pid = attrs.get("process.pid", attrs.get("vllm.process_id"))
    pid = int(pid) if isinstance(pid, str) and pid.isdecimal() and len(pid) < 12 else pid
    service, host = attrs.get("service.name"), attrs.get("host.name")
    return Resource(
        service=bounded(service) if isinstance(service, str) and service else None,
        host=bounded(host) if isinstance(host, str) and host else None,
        pid=pid if type(pid) is int and 0 < pid < 1 << 32 else None,
    )


def _span(span: Json, resource: Resource, scope: str | None) -> OtlpSpan:
    start_ns, end_ns = _time(span, "startTimeUnixNano"), _time(span, "endTimeUnixNano")
    if end_ns < start_ns:
        raise FieldError(f"endTimeUnixNano is {end_ns}, before startTimeUnixNano")
    name = span.get("name")
    if not isinstance(name, str):
        raise FieldError(f"name is {_shown(name)}, no text")
    return OtlpSpan(
        resource=resource,
        scope=scope,
        trace_id=_id(span, "traceId", 32) or _missing("traceId"),
        span_id=_id(span, "spanId", 16) or _missing("spanId"),
        parent_id=_id(span, "parentSpanId", 16),
        name=bounded(name),
        start_ns=start_ns,
        end_ns=end_ns,
        attrs=_kept(span),
        error=_error(span),
    )


def _kept(span: Json) -> dict[str, AttrValue]:
    """Return {name: value} of the span's attributes, without any text that could be a user's."""
    kept: dict[str, AttrValue] = {}
    for key, value in _attributes(span):
        if len(kept) == _MOST_ATTRIBUTES:
            break
        if isinstance(value, str):
            if key in _TEXTS:
                kept[key] = value[:MAX_TEXT]
        elif len(key) <= MAX_TEXT:
            kept[key] = value
    return kept


def _error(span: Json) -> str | None:
    if _object(span, "status").get("code") not in (2, "STATUS_CODE_ERROR"):
        return None
    of_events = (pair for event in _objects(span, "events") for pair in _attributes(event))
    for key, value in (*_attributes(span), *of_events):
        if key in ("error.type", "exception.type") and isinstance(value, str):
            return value[:MAX_TEXT]
    return "error"


def _attributes(owner: Json) -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield (name, value) of the attributes whose value is a text, a number or a truth value."""
    for pair in _objects(owner, "attributes"):
        key, value = pair.get("key"), _object(pair, "value")
        if not isinstance(key, str):
            raise FieldError(f"attributes.key is {_shown(key)}, no text")
        for kind, read in _VALUES.items():
            given = value.get(kind)
            plain = None if given is None else read(key, given)
            if plain is not None:
                yield key, plain
                break


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise FieldError(f"{key}.stringValue is {_shown(value)}, no text")
    return value


def _int(key: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value) else value
    if type(number) is not int or abs(number) >= 1 << 63:
        raise FieldError(f"{key}.intValue is {_shown(value)}, no int64")
    return number


def _double(key: str, value: object) -> float | None:
    if value in ("NaN", "Infinity", "-Infinity"):
        return None
    if type(value) not in (int, float):
        raise FieldError(f"{key}.doubleValue is {_shown(value)}, no number")
    number = float(value)  # type: ignore[arg-type]  # by the line above
    return number if math.isfinite(number) else None


def _bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise FieldError(f"{key}.boolValue is {_shown(value)}, neither true nor false")
    return value


_VALUES: Mapping[str, Callable[[str, object], str | int | float | bool | None]] = {
    "stringValue": _text,
    "intValue": _int,
    "doubleValue": _double,
    "boolValue": _bool,
}


def _time(span: Json, name: str) -> int:
    value = span.get(name)
    time_ns = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,19}", value) else value
    if type(time_ns) is not int or not 0 < time_ns < FARTHEST_NS:
        raise FieldError(f"{name} is {_shown(value)}, no unix time in ns")
    return time_ns


def _id(span: Json, name: str, digits: int) -> str | None:
    """Return an id in lower-case hexadecimal digits; None if it is absent, empty or zero."""
    value = span.get(name)
    if value in (None, ""):
        return None
    text = value.lower() if isinstance(value, str) else ""
    if len(text) != digits or _HEX.fullmatch(text) is None:
        raise FieldError(f"{name} is {_shown(value)}, not {digits} hexadecimal digits")
    return text if text.strip("0") else None


def _missing(name: str) -> str:
    raise FieldError(f"{name} is missing or zero")


def _object(owner: Json, name: str) -> Json:
    value = owner.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FieldError(f"{name} is {_shown(value)}, no object")
    return value


def _objects(owner: Json, name: str) -> list[Json]:
    value = owner.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise FieldError(f"{name} is {_shown(value)}, no list of objects")
    return value


def _shown(value: object) -> str:
    return ascii(value)[:40] if isinstance(value, str | int | float | bool | None) else type(value).__name__
