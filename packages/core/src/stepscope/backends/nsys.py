"""The `nsys` backend: windows of the Nsight Systems session that started this process.

`nsys launch` starts the process (`runtime_env` on Ray, `command` elsewhere) and records nothing by itself. A
window begins with `nsys start` and ends with `nsys stop` of that session. The report is complete once
`nsys stop` has exited. The report contains all processes of the session, also the children of this process.

The session of a program under `nsys profile --capture-range=...` waits for that range. `prepare` ends this
wait with `nsys stop`; windows then work as above. Tested with nsys 2022.4 and 2023.4 on a CPU.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError, ours
from stepscope.files.sidecar import NSYS_RANGES

SESSION = "NSYS_PROFILING_SESSION_ID"
"""The environment variable that nsys sets for the processes of a session."""
DOMAIN = "stepscope"
_INJECTED = ("LD_PRELOAD", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")
"""Environment variables that load nsys into a process. nsys itself must be started without these
variables."""
_ANSWER_S = 30.0
"""Longest time in seconds that a command of nsys may take. Most commands take 10 ms to 0.7 s."""
LATE_S = 5.0
"""Time in seconds that `nsys start` waits for a busy process before the recording starts without that
process, as seen in nsys 2023.4.4."""
_HOLD_S = 10.0
"""Longest time in seconds that the training waits for a recording to stop, or for the previous report to be
written."""
_NOTHING = nullcontext()
_SHARED = (
    "the nsys session of this process records already: `nsys profile` records the whole run, or another "
    "process of the session has a window, whose report holds this process too"
)
_BUSY = "not allowed in this state"
"""Part of the error of nsys while another process starts or stops a recording of the same session."""
_FIX_SESSION = (
    "Fix: raise nsys.report_seconds if reports are large; if nsys hangs, end its agent (`nsys sessions list`)"
)
_OF_START = (
    *("backtrace", "cpu-core", "cpuctxsw", "event-sampl", "export", "ftrace", "gpu-metrics", "gpuctxsw"),
    *("ib-switch", "nic-metrics", "os-events", "process-scope", "sampl", "soc-metrics", "stats"),
)
"""Beginnings of the names of options that `nsys start` accepts and `nsys launch` does not."""


def launch_options(config: ProfileConfig, *, engine: bool = False) -> dict[str, str]:
    """Return the options of `nsys launch` that this backend needs: {long name without dashes: value}.

    Args:
        engine: True for a process that builds an inference engine. CUDA graphs are then recorded kernel by
            kernel, and forked workers are recorded too.
    """
    of_engines = {"cuda-graph-trace": "node", "trace-fork-before-exec": "true"} if engine else {}
    extra = {name: value for name, value in config.nsys.extra.items() if not name.startswith(_OF_START)}
    return {"trace": ",".join(config.nsys.trace), "wait": "primary", **of_engines, **extra}


def runtime_env(config: ProfileConfig, *, engine: bool = False) -> dict[str, Any]:
    """Return the options that make Ray start an actor under nsys.

    Use `Worker.options(runtime_env=runtime_env(config))` only for the recorded roles and ranks, because nsys
    slows a process from its start. Each actor is a session of its own. The actor's node needs this process'
    Python at the same path, and `nsys` on PATH.

    Args:
        engine: As in `launch_options`. vLLM then starts its workers by `spawn`.
    """
    words = ["nsys", "launch", *_words(launch_options(config, engine=engine))]
    # Ray passes the text to a shell. The shell's process id, $$, makes the session's name unique.
    env: dict[str, Any] = {
        "py_executable": f"{shlex.join(words)} --session-new=stepscope$$ {shlex.quote(sys.executable)}"
    }
    return {**env, "env_vars": {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}} if engine else env


def command(config: ProfileConfig, *, engine: bool = False) -> list[str]:
    """Return the words to put before a program that Ray does not start: `nsys launch ... python train.py`.

    Each call returns a new session name, because two programs in one session would share windows and reports.

    Args:
        engine: As in `launch_options`.
    """
    options = {**launch_options(config, engine=engine), "session-new": f"stepscope{uuid.uuid4().hex[:8]}"}
    return ["nsys", "launch", *_words(options)]


def _words(options: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


class NsysBackend:
    """Backend that starts and stops recordings of the nsys session that this process belongs to."""

    name = "nsys"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config.nsys
        self._window: Window | None = None
        self._folder = Path()
        """Folder of the window's report and of the output of `nsys stop`; `Path()` between windows."""
        self._has_ranges = False
        """True if the window has NVTX ranges."""
        self._start_s = 0.0
        """Duration of `nsys start` of the window, in seconds."""
        self._starting: subprocess.Popen[bytes] | None = None
        self._stopping: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Raise `BackendError` if nsys did not start this process, or its session cannot have windows."""
        fix = (
            "Fix: on Ray, Worker.options(runtime_env=stepscope.backends.nsys.runtime_env(config)); elsewhere "
            f"`{shlex.join(command(ProfileConfig(nsys=self._config)))} python train.py`"
        )
        if SESSION not in os.environ:
            raise BackendError(
                f"tool is nsys, but nsys did not start this process ({SESSION} is not set). {fix}"
            )
        if PROCESS_LOCK.holder is None and _state() in ("Collection", "DelayedCollection"):
            raise BackendError(f"{_SHARED}. {fix}, once for each recorded process")

    def prepare(self) -> None:
        """Import NVTX. Under `nsys profile --capture-range`, end the wait for a range."""
        if "nvtx" in self._config.trace:
            markers()
        if _state() == "StartRange":
            _finish(_popen("stop"), "stop")

    def start(self, window: Window) -> None:
        if self._window is not None:
            raise ProfilerBusyError(f"step {self._window.step} is being recorded. Fix: stop() before start()")
        self._window = window  # set first, so that stop() cleans up
        try:
            PROCESS_LOCK.acquire(f"the nsys window of step {window.step}", by=self)
            _await_last_report()
            self._folder = Path(tempfile.mkdtemp(prefix="stepscope-nsys-"))
            extra = {name: value for name, value in self._config.extra.items() if name.startswith(_OF_START)}
            options = {"sample": "none", "cpuctxsw": "none", **extra, "output": str(self._folder / "report")}
            began_s = time.monotonic()
            self._starting = _popen("start", *_words(options))
            _finish(self._starting, "start")
            self._start_s = time.monotonic() - began_s
        except ours() as error:
            _remove(self._folder)
            self._give_back()
            if isinstance(error, _RefusedError) and (_BUSY in str(error) or _state() == "Collection"):
                raise BackendError(f"{_SHARED}. Fix: `nsys launch` once for each recorded process") from error
            if not isinstance(error, BackendError):
                raise BackendError(f"the nsys window did not start: {error}") from error
            raise

    def advance(self) -> None:
        pass

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """Return an NVTX range `<role>.<stage>`, or a null context if NVTX is not recorded. The range has a
        start and an end, because push/pop ranges of interleaved tasks would close each other.
        """
        if self._window is None or "nvtx" not in self._config.trace:
            return _NOTHING
        library = markers()
        if isinstance(library, str):
            return _NOTHING
        self._has_ranges = True
        return _Range(library, f"{span.role}.{span.stage}")

    def stop(self) -> list[PendingArtifact]:
        """End the recording. nsys converts it into the report while the training continues."""
        if self._window is None or PROCESS_LOCK.holder is None or self._starting is None:
            self._give_back()
            return []  # not started, or a forked child: the window belongs to the parent
        try:
            _synchronize()
            if self._starting.stdout is not None and not self._starting.stdout.closed:
                self._starting.communicate(timeout=_ANSWER_S)  # start() was interrupted
            if self._stopping is None:  # not None after an interrupt in stop()
                self._stopping = _stop(self._folder)
            _await_output(self._stopping, self._folder)
        except ours():
            folder = self._folder
            self._give_back()
            _remove(folder)
            raise  # after a Ctrl-C the window is kept, and a second stop() ends it
        folder, stopping, seconds = self._folder, self._stopping, self._config.report_seconds
        has_ranges = self._has_ranges
        self._give_back()
        library = markers() if "nvtx" in self._config.trace else None
        lacking = library if isinstance(library, str) else None
        if lacking is None and has_ranges and self._start_s > LATE_S:
            lacking = (
                f"nsys start took {self._start_s:.1f} s: nsys waits {LATE_S:g} s for a busy process, and "
                "then lacks the ranges that begin before the process answers"
            )

        def write(path: Path) -> None:
            shutil.move(_report(stopping, folder, seconds), path)
            _remove(folder)

        def discard() -> None:
            with suppress(subprocess.TimeoutExpired):  # else nsys would keep its raw recording
                stopping.wait(_HOLD_S)
            _remove(folder)

        return [
            PendingArtifact(
                kind="nsys_report",
                suffix=".nsys-rep",
                write=write,
                discard=discard,
                compress=False,
                lacking=lacking,
                options={"trace": ",".join(self._config.trace), NSYS_RANGES: has_ranges},
            )
        ]

    def _give_back(self) -> None:
        PROCESS_LOCK.release(by=self)
        self._folder, self._starting, self._stopping = Path(), None, None
        self._has_ranges = False
        self._window = None  # cleared last, so that a second stop() after an interrupt repeats everything


# Commands of nsys.


class _RefusedError(BackendError):
    """An nsys command ended with an error."""


_last: subprocess.Popen[bytes] | None = None
"""The latest `nsys stop` of this process, or None. The session cannot start a recording before this command
has exited. One writer: `_stop`."""


def _program() -> str:
    """Return the path of the nsys that started this process, which is beside the library that nsys loads into
    processes.
    """
    for variable in _INJECTED[1:]:
        beside = Path(os.environ.get(variable, "")).parent / "nsys"
        if variable in os.environ and beside.is_file():
            return str(beside)
    return shutil.which("nsys") or "nsys"


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _INJECTED}


def _popen(verb: str, *words: str, output: Path | None = None) -> subprocess.Popen[bytes]:
    """Run a command of nsys on this process' session."""
    session = [] if verb == "sessions" else [f"--session={os.environ[SESSION]}"]
    with open(output, "wb") if output is not None else nullcontext(subprocess.PIPE) as out:
        return subprocess.Popen(
            [_program(), verb, *session, *words],
            env=_environ(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C for the training does not end nsys
        )


def _finish(process: subprocess.Popen[bytes], verb: str) -> str:
    """Wait for the end of a command of nsys, and return its output."""
    try:
        output, _ = process.communicate(timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BackendError(f"`nsys {verb}` did not end within {_ANSWER_S:g} s. {_FIX_SESSION}") from None
    if process.returncode:
        raise _RefusedError(f"`nsys {verb}` ended with {process.returncode}: {_readable(output)}")
    return output.decode(errors="replace")


def _readable(output: bytes) -> str:
    """Return the output of nsys as one line, without progress bars."""
    lines = output.decode(errors="replace").replace("\r", "\n").splitlines()
    return "; ".join(line.strip() for line in lines if line.strip() and not line.startswith("["))


def _state() -> str | None:
    """Return the state of this process' session as nsys prints it, or None if nsys does not list the
    session.
    """
    rows = (line.split() for line in _finish(_popen("sessions", "list"), "sessions list").splitlines())
    return next((row[2] for row in rows if len(row) > 2 and row[0] == os.environ[SESSION]), None)


def _stop(folder: Path) -> subprocess.Popen[bytes]:
    global _last
    _last = _popen("stop", output=folder / "output")
    return _last


def _await_output(stopping: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until nsys prints that it converts the recording, which shows that the recording has ended."""
    until = time.monotonic() + _HOLD_S
    while stopping.poll() is None and not (folder / "output").stat().st_size and time.monotonic() < until:
        time.sleep(0.01)


def _await_last_report() -> None:
    try:
        if _last is not None:
            _last.wait(_HOLD_S)
    except subprocess.TimeoutExpired:
        fix = "Fix: select steps that lie further apart; in discrete mode fewer stages"
        raise ProfilerBusyError(f"nsys still writes the report of the window before. {fix}") from None


def _report(stopping: subprocess.Popen[bytes], folder: Path, seconds: float) -> Path:
    """Return the report in `folder`, once nsys has written all of it."""
    try:
        stopping.wait(seconds)
    except subprocess.TimeoutExpired:
        stopping.kill()
        raise BackendError(
            f"nsys wrote no complete report within {seconds:g} s (nsys.report_seconds). {_FIX_SESSION}"
        ) from None
    report, raw = folder / "report.nsys-rep", folder / "report.qdstrm"
    if raw.exists():  # nsys 2023.4 failed to convert one recording in a hundred; a second try worked
        report = _converted(raw, seconds)
    if not report.exists():
        told = _readable((folder / "output").read_bytes())
        raise BackendError(f"nsys made no report: {told}. Fix: `stepscope doctor` checks nsys")
    raw.unlink(missing_ok=True)
    return report


def _converted(raw: Path, seconds: float) -> Path:
    """Convert a raw recording with nsys' importer, and return the report."""
    importer = Path(_program()).parents[1] / "host-linux-x64" / "QdstrmImporter"
    report = raw.with_name("second")
    try:
        subprocess.run(
            [importer, "-i", raw, "-o", report],
            env=_environ(),
            timeout=seconds,
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(
            f"nsys made no complete report of {raw}, which is kept: {error}. Fix: nsys' QdstrmImporter "
            "converts it; `stepscope doctor` checks nsys"
        ) from error
    return report


def _remove(folder: Path) -> None:
    """Remove the folder of a window, except a raw recording that nsys could not convert."""
    if folder != Path() and not (folder / "report.qdstrm").exists():
        shutil.rmtree(folder, ignore_errors=True)


def _synchronize() -> None:
    """Wait for the kernels of the window, so that its report contains them."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# NVTX.


class Markers(NamedTuple):
    """The functions of an NVTX library that start and end a range."""

    start: Callable[[str], object]
    end: Callable[[Any], object]


def markers() -> Markers | str:
    """Return functions for ranges that nsys records, or the reason why no library has such functions."""
    return _markers("torch" in sys.modules)  # the training may import torch later


@cache
def _markers(with_torch: bool) -> Markers | str:
    """Find the functions for `markers`. One result is cached before the process imports torch, and another
    afterwards.

    nvtx 0.2.12 to 0.2.17 get no domain from nsys up to 2023.4, and then silently drop all ranges.
    """
    try:
        import nvtx  # type: ignore[import-untyped,unused-ignore]  # it has no types, and may be absent
    except ImportError:
        lacks = "the package nvtx is not installed (pip install 'stepscope[nsys]')"
    else:
        if type(nvtx.get_domain(DOMAIN)).__name__ != "DummyDomain":
            return Markers(partial(nvtx.start_range, domain=DOMAIN), nvtx.end_range)
        lacks = (
            "the installed nvtx gets no domain from this nsys. Fix: --trace with nvtx; with nsys up to "
            "2023.4, pip install nvtx==0.2.11"
        )
    try:
        if with_torch:  # torch's ranges need no domain
            torch: Any = sys.modules["torch"]
            torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start(DOMAIN))
            return Markers(torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end)
    except (AttributeError, RuntimeError):
        pass  # torch was built without NVTX
    return f"no markers: {lacks}"


class _Range:
    """One NVTX range, closed by its id."""

    __slots__ = ("_id", "_markers", "_name")

    def __init__(self, markers: Markers, name: str) -> None:
        self._markers = markers
        self._name = name

    def __enter__(self) -> None:
        self._id = self._markers.start(self._name)

    def __exit__(self, *_: object) -> None:
        self._markers.end(self._id)
