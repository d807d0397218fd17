"""The `nsys` backend: tells Nsight Systems, which already records this process, when to keep what it sees.

nsys starts the process (`runtime_env` on Ray, `command` elsewhere) and waits. A window is a CUDA profiler
range (`cudaProfilerStart` to `cudaProfilerStop`), and each range becomes a report. nsys writes it after the
range, to where it was told, so the exporter waits until it is whole and moves it to the step.

Never run beside a real nsys so far: its tests hold it against a stand-in that does what NVIDIA's User Guide
says of `--capture-range=cudaProfilerApi`, and against the real nvtx package.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError

if TYPE_CHECKING:
    from types import TracebackType

SESSION = "NSYS_PROFILING_SESSION_ID"
"""What nsys sets for the processes that it records."""
DOMAIN = "stepscope"
_NOTHING = nullcontext()
_SETTLED_S = 1.0
"""A report that has not grown for so long, with nothing of nsys' own beside it, is whole."""
_POLL_S = 0.2
_AS_IF_TORCH_RECORDED = "Fix: run without torch.profiler beside nsys: CUPTI serves one of them"


def nsight_options(config: ProfileConfig) -> dict[str, str]:
    """Options of `nsys profile` for a process that this backend is to record, long names without dashes."""
    return {
        "trace": ",".join(config.nsys.trace),
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat",  # a window after a window; the process lives on
        "kill": "none",
        **config.nsys.extra,
    }


def runtime_env(config: ProfileConfig) -> dict[str, object]:
    """What Ray starts an actor under nsys with: `Worker.options(runtime_env=runtime_env(config))`.

    For the roles and ranks that are to be recorded, and no others: nsys costs from the process' start on. Ray
    names the reports in the session's `logs/nsight` on the actor's node; they are moved from there.
    """
    return {"nsight": {**nsight_options(config), "o": "'stepscope_%p'"}}


def command(config: ProfileConfig, output: str = "stepscope_%p") -> list[str]:
    """The words to put before a program that is not started by Ray: `nsys profile ... python train.py`."""
    options = [f"--{name}={value}" for name, value in nsight_options(config).items()]
    return ["nsys", "profile", *options, f"--output={output}"]


class NsysBackend:
    """Switches the nsys that started this process on and off."""

    name = "nsys"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config.nsys
        self._window: Window | None = None
        self._output = Path()
        """Where nsys writes, as seen when the window began."""
        self._before: set[Path] = set()
        """The reports that were there then."""
        self._lacking: str | None = None

    def check(self) -> None:
        """Raises `BackendError` when nsys does not record this process, or cannot be told when to."""
        if SESSION not in os.environ:
            raise BackendError(
                f"tool is nsys, and nsys did not start this process ({SESSION} is not set). Fix: on Ray, "
                "Worker.options(runtime_env=stepscope.backends.nsys.runtime_env(config)); elsewhere "
                f"`{shlex.join(command(ProfileConfig(nsys=self._config)))} python train.py`"
            )
        launched = launched_with()
        ranged = None if launched is None else option(launched.words, "capture-range", "c")
        if launched is not None and ranged != "cudaProfilerApi":
            raise BackendError(
                f"nsys records this process with --capture-range={ranged or 'none'}, and so all the time. "
                "Fix: --capture-range=cudaProfilerApi --capture-range-end=repeat"
            )
        _profiler_api()
        self._where()

    def prepare(self) -> None:
        pass

    def start(self, window: Window) -> None:
        if self._window is not None:
            raise ProfilerBusyError(f"step {self._window.step} is being recorded. Fix: stop() before start()")
        api, output = _profiler_api(), self._where()
        self._window = window  # first: interrupted from here on, stop() ends what has begun
        try:
            PROCESS_LOCK.acquire(f"the nsys range of step {window.step}", by=self)
            self._output, self._before = output, set(_reports(output))
            _call(api.cudaProfilerStart, "cudaProfilerStart")
        except Exception as error:
            self._give_back()
            if not isinstance(error, BackendError):
                raise BackendError(f"the nsys range did not start: {error}") from error
            raise

    def advance(self) -> None:
        pass

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """An NVTX start/end range, so that interleaved tasks do not close each other's."""
        if self._window is None:
            return _NOTHING
        nvtx = _nvtx()
        if nvtx is None:
            self._lacking = "no markers: the package nvtx is not installed (pip install 'stepscope[nsys]')"
            return _NOTHING
        return _Range(nvtx, f"{span.role}.{span.stage}")

    def stop(self) -> list[PendingArtifact]:
        window = self._window
        if window is None or PROCESS_LOCK.holder is None:
            self._window = None
            return []  # not started; or the child of a fork, where the range is the parent's
        try:
            _synchronize()
            _call(_profiler_api().cudaProfilerStop, "cudaProfilerStop")
        except Exception:
            self._give_back()
            raise  # and not after a Ctrl-C: a second call stops the range
        self._give_back()
        output, before = self._output, self._before
        lacking, self._lacking = self._lacking, None

        def write(path: Path) -> None:
            shutil.move(self._await_report(output, before), path)

        return [
            PendingArtifact(
                kind="nsys_report",
                suffix=".nsys-rep",
                write=write,
                compress=False,
                lacking=lacking,
                options={"trace": ",".join(self._config.trace)},
            )
        ]

    def _give_back(self) -> None:
        PROCESS_LOCK.release(by=self)
        self._window = None  # last: interrupted before, a second stop() does all of it

    def _await_report(self, output: Path, before: set[Path]) -> Path:
        """The report that was not there before the window, once nsys has written all of it."""
        until = time.monotonic() + self._config.report_seconds
        sizes: dict[Path, tuple[int, float]] = {}
        while time.monotonic() < until:
            for path in sorted(set(_reports(output)) - before):
                size = path.stat().st_size
                seen, since = sizes.get(path, (-1, 0.0))
                if size != seen:
                    sizes[path] = (size, time.monotonic())
                elif size and time.monotonic() - since >= _SETTLED_S and not _unfinished(path):
                    return path
            time.sleep(_POLL_S)
        raise BackendError(
            f"nsys wrote no whole report {output}*.nsys-rep within {self._config.report_seconds:g} s "
            "(nsys.report_seconds). Fix: look there for .qdstrm files, which `nsys import` turns into one, "
            "and at nsys' own output"
        )

    def _where(self) -> Path:
        """Where nsys writes, without the ending.

        Raises:
            BackendError: nothing says.
        """
        if self._config.output is not None:
            return Path(self._config.output)
        launched = launched_with()
        found = None if launched is None else option(launched.words, "output", "o")
        if launched is None or found is None:
            raise BackendError(
                "it cannot be seen where nsys writes the reports of this process. Fix: set nsys.output"
            )
        return Path(launched.folder, found.removesuffix(".nsys-rep"))


def _reports(output: Path) -> list[Path]:
    """Reports of this process that are there now."""
    name = re.sub(r"%[a-zA-Z](\{[^}]*\})?", "*", output.name.replace("%p", str(os.getpid())))
    return sorted(output.parent.glob(f"{name}*.nsys-rep"))


class _Range:
    """One NVTX range, closed by its id."""

    __slots__ = ("_id", "_name", "_nvtx")

    def __init__(self, nvtx: Any, name: str) -> None:
        self._nvtx = nvtx
        self._name = name

    def __enter__(self) -> None:
        self._id = self._nvtx.start_range(message=self._name, domain=DOMAIN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nvtx.end_range(self._id)


# The process that started this one.


class Launch(NamedTuple):
    """The nsys that started this process."""

    words: list[str]
    """Its command line."""
    folder: str
    """Where it runs: what a relative --output is relative to."""


def launched_with() -> Launch | None:
    """The nsys above this process; None when it cannot be seen."""
    process = os.getpid()
    while process > 1:
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(Path(word).name == "nsys" for word in words[:2]) and "profile" in words[:4]:
                return Launch(words, os.readlink(f"/proc/{process}/cwd"))
            status = Path(f"/proc/{process}/stat").read_text(errors="replace")
        except OSError:
            return None
        process = int(status.rpartition(")")[2].split()[1])  # its parent
    return None


def option(words: list[str], long: str, short: str) -> str | None:
    """The value of an option of `nsys profile`, in any of the ways to write one."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in (f"--{long}", f"-{short}"):
            return following
        for start in (f"--{long}=", f"-{short}="):
            if word.startswith(start):
                return word.removeprefix(start)
    return None


def _unfinished(report: Path) -> bool:
    """Whether nsys is still turning its raw recording into this report."""
    return report.with_suffix(".qdstrm").exists()


# CUDA and NVTX.


class _ProfilerApi(Protocol):
    @property
    def cudaProfilerStart(self) -> Callable[[], object]: ...  # noqa: N802  # CUDA's name
    @property
    def cudaProfilerStop(self) -> Callable[[], object]: ...  # noqa: N802


def _profiler_api() -> _ProfilerApi:
    """The CUDA runtime that this process uses: torch's, where torch has one."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        api: _ProfilerApi = torch.cuda.cudart()
        return api
    try:
        library: Any = ctypes.CDLL("libcudart.so")
    except OSError as error:
        raise BackendError(
            f"tool is nsys, and there is no CUDA runtime to mark ranges with ({error}). Fix: import a CUDA "
            "build of torch before the capture, or put libcudart.so on LD_LIBRARY_PATH"
        ) from error
    loaded: _ProfilerApi = library
    return loaded


def _call(function: Callable[[], object], name: str) -> None:
    answer = function()
    code = answer if isinstance(answer, int) else int(getattr(answer, "value", 0))  # ctypes, or torch's enum
    if code:
        raise BackendError(f"{name} returned {code}. {_AS_IF_TORCH_RECORDED}")


def _synchronize() -> None:
    """Kernels of the window that still run are to be in its report."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _nvtx() -> Any:
    try:
        import nvtx  # type: ignore[import-untyped,unused-ignore]  # it has no types, and may be absent
    except ImportError:
        return None
    return nvtx
