"""Recorder of the files beside it: `unshare --uts sh -c 'hostname node-a; python record.py sglang'`.

Runs a captured step with the real package, and keeps the step and what the tracer sent. Each package
needs an environment of its own; the README names the versions. Prompts, answers and results of tools contain
the word SECRET.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from google.protobuf.json_format import MessageToDict
from opentelemetry import context
from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stepscope import ProfileConfig, capture, carrier, trajectory, turn

HERE = Path(__file__).parent
SGLANG_TESTS = HERE.parents[2] / "rollout-sglang" / "tests"
PROPAGATOR = TraceContextTextMapPropagator()
STEP = 2
_CALL = {"id": "call_1", "type": "function"}
_CALLED = {**_CALL, "function": {"name": "calculator", "arguments": '{"text": "SECRET"}'}}
_USAGE = {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17}


def openinference(run: Path) -> None:
    """Record an agent with OpenInference's decorators, and an OpenAI client that asks a server of ours."""
    import openai
    from openinference.instrumentation import TracerProvider as OpenInferenceProvider
    from openinference.instrumentation.openai import OpenAIInstrumentor

    provider = _provider(OpenInferenceProvider, run / "otel" / "openinference.jsonl")
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    tracer = provider.get_tracer("agent")
    calculate = tracer.tool(name="calculator")(_calculate)

    def solve(question: str) -> None:
        messages: list[Any] = [{"role": "user", "content": question}]
        message = client.chat.completions.create(model="tiny", messages=messages).choices[0].message
        (call,) = message.tool_calls
        answer = {"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)}
        messages += [message.model_dump(exclude_none=True), answer]
        client.chat.completions.create(model="tiny", messages=messages)

    with _serving(_Model) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        with _captured(run):
            tracer.agent(name="solve")(solve)("SECRET question")
    provider.shutdown()


def pydantic_ai(run: Path) -> None:
    """Record an agent of pydantic-ai with its TestModel and a tool."""
    from pydantic_ai import Agent
    from pydantic_ai.capabilities import Instrumentation
    from pydantic_ai.models.instrumented import InstrumentationSettings
    from pydantic_ai.models.test import TestModel

    provider = _provider(TracerProvider, run / "otel" / "pydantic_ai.jsonl")
    instrumentation = Instrumentation(InstrumentationSettings(tracer_provider=provider))
    agent = Agent(
        TestModel(custom_output_text="SECRET answer"), name="solver", capabilities=[instrumentation]
    )
    agent.tool_plain(_calculate, name="calculator")
    with _captured(run):
        agent.run_sync("SECRET question")
    provider.shutdown()


def sglang(run: Path) -> None:
    """Record two requests to a real engine. The first one, which warms it up, is left out."""
    _sglang(run, "MODEL", 1)


def sglang_tp(run: Path) -> None:
    """Record as `sglang`, with two tensor-parallel ranks."""
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    _sglang(run, "SPLIT", 2, tp_size=2, dtype="float32")


def _sglang(run: Path, model: str, ranks: int, **changes: object) -> None:
    sys.path.insert(0, str(SGLANG_TESTS))
    import tiny_sglang
    from sglang import Engine

    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    with TemporaryDirectory() as folder, _serving(_Collector) as url:
        written = tiny_sglang.write_model(Path(folder), getattr(tiny_sglang, model))
        settings = tiny_sglang.settings(written, served_model_name="tiny", **changes)
        engine = Engine(**settings, enable_trace=True, otlp_traces_endpoint=f"{url}/v1/traces")

        async def ask(name: str, tokens: int) -> None:
            with trajectory(name), turn(0):
                headers = {key: value for key, value in (carrier() or {}).items() if key == "traceparent"}
                sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
                await engine.async_generate(
                    input_ids=list(range(1, 9)), sampling_params=sampling, external_trace_header=headers
                )

        async def ask_twice() -> None:
            await asyncio.gather(ask("t0", 2), ask("t1", 3))

        engine.loop.run_until_complete(ask("warm-up", 2))
        with capture(STEP, config=_config(run)) as captured:
            engine.loop.run_until_complete(ask_twice())
        captured.result.wait()
        _Collector.wait_for(requests=3, ranks=ranks)
        engine.shutdown()
    of_step = _spans_after(_Collector.received, _opened_ns(run))
    (run / "otel" / "sglang.jsonl").write_text(_without_host(json.dumps({"resourceSpans": of_step})) + "\n")


def _calculate(text: str) -> str:
    return f"SECRET {text}"


def _provider(make: Callable[..., TracerProvider], file: Path) -> TracerProvider:
    provider = make(resource=Resource.create({"service.name": "agent"}))
    provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter(str(file))))
    return provider


def _config(run: Path) -> ProfileConfig:
    return ProfileConfig(save_path=str(run), steps="every:1", roles={"*": {"profiler": "off"}})


@contextmanager
def _captured(run: Path) -> Iterator[None]:
    """Capture a step of one turn, below which the OpenTelemetry spans of the block hang."""
    with capture(STEP, config=_config(run)), trajectory("t0"), turn(0):
        token = context.attach(PROPAGATOR.extract(carrier() or {}))
        yield
        context.detach(token)


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Model(_Handler):
    """An OpenAI-compatible server that first calls a tool and then answers."""

    def do_POST(self) -> None:
        asked = json.loads(self.body())
        is_answered = any(message["role"] == "tool" for message in asked["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "SECRET answer" if is_answered else None}
        if not is_answered:
            message["tool_calls"] = [_CALLED]
        choice = {"index": 0, "message": message, "finish_reason": "stop" if is_answered else "tool_calls"}
        usage = {**_USAGE, "prompt_tokens_details": {"cached_tokens": 4}}
        completion = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny"}
        content = json.dumps({**completion, "choices": [choice], "usage": usage}).encode()
        self.answer(content, "application/json")


class _Collector(_Handler):
    """A receiver of OTLP over HTTP."""

    received: ClassVar[list[dict[str, Any]]] = []
    _arrived = threading.Condition()

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.body())
        with self._arrived:
            self.received.extend(MessageToDict(request, use_integers_for_enums=True)["resourceSpans"])
            self._arrived.notify_all()
        self.answer(b"", "application/x-protobuf")

    @classmethod
    def wait_for(cls, requests: int, ranks: int) -> None:
        """Wait until the spans of so many requests arrived, and of their work in the schedulers."""

        def is_complete() -> bool:
            names = [span["name"].split()[0] for span in _all_spans(cls.received)]
            return (names.count("Req"), names.count("Scheduler")) == (requests, requests * ranks)

        with cls._arrived:
            assert cls._arrived.wait_for(is_complete, 60)


def _all_spans(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [span for group in groups for scope in group["scopeSpans"] for span in scope["spans"]]


def _spans_after(groups: Sequence[dict[str, Any]], opened_ns: int) -> list[dict[str, Any]]:
    """Return the spans that began after `opened_ns`, with ids as the specification of OTLP JSON has them."""
    for group in groups:
        for scope in group["scopeSpans"]:
            scope["spans"] = [span for span in scope["spans"] if int(span["startTimeUnixNano"]) > opened_ns]
    for owner in (
        *_all_spans(groups),
        *(link for span in _all_spans(groups) for link in span.get("links", ())),
    ):
        for key in {"traceId", "spanId", "parentSpanId"} & owner.keys():
            owner[key] = base64.b64decode(owner[key]).hex()
    return [group for group in groups if _all_spans([group])]


def _opened_ns(run: Path) -> int:
    manifest = json.loads((run / f"step_{STEP:06d}" / "manifest.json").read_text())
    return int(manifest["processes"][0]["opened"]["wall_ns"])


def _without_host(text: str) -> str:
    """Replace the id of this machine, which SGLang puts into names of spans."""
    machine = Path("/etc/machine-id").read_text().strip()
    return text.replace(machine, "a" * 32).replace(machine[:8], "a" * 8)


def main(name: str) -> None:
    """Record what `name` says into the folder of that name."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Path(folder)
        (run / "otel").mkdir()
        {recorder.__name__: recorder for recorder in (openinference, pydantic_ai, sglang, sglang_tp)}[name](
            run
        )
        shutil.rmtree(HERE / name, ignore_errors=True)
        for part in ("otel", f"step_{STEP:06d}"):
            shutil.copytree(run / part, HERE / name / part)


if __name__ == "__main__":
    main(sys.argv[1])
