"""The `nsys` backend: CUDA profiler ranges for an Nsight Systems that already records this process.

nsys starts the process (`runtime_env` on Ray, `command` elsewhere) and waits. A window is a CUDA profiler
range (`cudaProfilerStart` to `cudaProfilerStop`), and nsys turns each range into a report. nsys writes the
report after the range, at its own output path. The exporter waits until it is complete and moves it to the
step.

No real nsys has run beside it so far. Its tests use the real nvtx package, and a stand-in that follows
NVIDIA's User Guide on `--capture-range=cudaProfilerApi`.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.backends.process_lock import PROCESS_LOCK
from stepscope.backends.protocol import PendingArtifact, SpanInfo, Window
from stepscope.config import ProfileConfig
from stepscope.errors import BackendError, ProfilerBusyError, ours

if TYPE_CHECKING:
    from types import TracebackType

SESSION = "NSYS_PROFILING_SESSION_ID"
"""The environment variable that nsys sets for the processes that it records."""
DOMAIN = "stepscope"
_NOTHING = nullcontext()
_QUIET_S = 1.0
"""A report is complete once it has not grown for this long and no file of nsys' own stands beside it."""
_POLL_S = 0.2
_FIX_CUPTI = "Fix: run without torch.profiler beside nsys: CUPTI serves one of them"


def nsight_options(config: ProfileConfig) -> dict[str, str]:
    """Return the options of `nsys profile` that this backend needs, as long names without dashes."""
    return {
        "trace": ",".join(config.nsys.trace),
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat",  # many windows, and the process continues after each
        "kill": "none",
        **config.nsys.extra,
    }


def runtime_env(config: ProfileConfig) -> dict[str, object]:
    """Return the options that make Ray start an actor under nsys.

    Use it as `Worker.options(runtime_env=runtime_env(config))`, for the recorded roles and ranks alone: nsys
    costs time from the start of the process. Ray puts the reports in the session's `logs/nsight` on the
    actor's node, and the exporter moves them from there.
    """
    return {"nsight": {**nsight_options(config), "o": "'stepscope_%p'"}}


def command(config: ProfileConfig, output: str = "stepscope_%p") -> list[str]:
    """Return the words before a program that Ray does not start: `nsys profile ... python train.py`."""
    options = [f"--{name}={value}" for name, value in nsight_options(config).items()]
    return ["nsys", "profile", *options, f"--output={output}"]


class NsysBackend:
    """Switch for the nsys that started this process."""

    name = "nsys"

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config.nsys
        self._window: Window | None = None
        self._output = Path()
        """The output path of nsys at the start of the window."""
        self._before: set[Path] = set()
        """The reports that existed at that time."""
        self._lacking: str | None = None

    def check(self) -> None:
        """Raise `BackendError` if nsys does not record this process, or does not obey profiler ranges."""
        if SESSION not in os.environ:
            raise BackendError(
                f"tool is nsys, but nsys did not start this process ({SESSION} is not set). Fix: on Ray, "
                "Worker.options(runtime_env=stepscope.backends.nsys.runtime_env(config)); elsewhere "
                f"`{shlex.join(command(ProfileConfig(nsys=self._config)))} python train.py`"
            )
        launched = launched_with()
        ranged = None if launched is None else option(launched.words, "capture-range", "c")
        if launched is not None and ranged != "cudaProfilerApi":
            raise BackendError(
                f"nsys records this process all the time, because it has --capture-range={ranged or 'none'}. "
                "Fix: --capture-range=cudaProfilerApi --capture-range-end=repeat"
            )
        _profiler_api()
        self._output_path()

    def prepare(self) -> None:
        pass

    def start(self, window: Window) -> None:
        if self._window is not None:
            raise ProfilerBusyError(f"step {self._window.step} is being recorded. Fix: stop() before start()")
        api, output = _profiler_api(), self._output_path()
        self._window = window  # first: if an interrupt follows, stop() ends what has begun
        try:
            PROCESS_LOCK.acquire(f"the nsys range of step {window.step}", by=self)
            self._output, self._before = output, set(_reports(output))
            _call(api.cudaProfilerStart, "cudaProfilerStart")
        except ours() as error:
            self._give_back()
            if not isinstance(error, BackendError):
                raise BackendError(f"the nsys range did not start: {error}") from error
            raise

    def advance(self) -> None:
        pass

    def range(self, span: SpanInfo) -> AbstractContextManager[None]:
        """Return an NVTX start/end range, because push/pop ranges of interleaved tasks close each other."""
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
            return []  # not started, or the child of a fork: the range belongs to the parent
        try:
            _synchronize()
            _call(_profiler_api().cudaProfilerStop, "cudaProfilerStop")
        except ours():
            self._give_back()
            raise  # a Ctrl-C keeps the window: a second call stops the range
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
        self._window = None  # last: after an earlier interrupt, a second stop() repeats everything

    def _await_report(self, output: Path, before: set[Path]) -> Path:
        """Return the report that is new since the window began, once nsys has written all of it."""
        until = time.monotonic() + self._config.report_seconds
        sizes: dict[Path, tuple[int, float]] = {}
        while time.monotonic() < until:
            for path in sorted(set(_reports(output)) - before):
                size = path.stat().st_size
                last_size, since = sizes.get(path, (-1, 0.0))
                if size != last_size:
                    sizes[path] = (size, time.monotonic())
                elif size and time.monotonic() - since >= _QUIET_S and not _unfinished(path):
                    return path
            time.sleep(_POLL_S)
        raise BackendError(
            f"nsys wrote no complete report {output}*.nsys-rep within {self._config.report_seconds:g} s "
            "(nsys.report_seconds). Fix: read the output of nsys; `nsys import` turns a .qdstrm file beside "
            "that path into a report"
        )

    def _output_path(self) -> Path:
        """Return the output path of nsys, without the suffix.

        Raises:
            BackendError: neither the configuration nor the command line of nsys contains the path.
        """
        if self._config.output is not None:
            return Path(self._config.output)
        launched = launched_with()
        output = None if launched is None else option(launched.words, "output", "o")
        if launched is None or output is None:
            raise BackendError("the output path of nsys for this process is unknown. Fix: set nsys.output")
        return Path(launched.folder, output.removesuffix(".nsys-rep"))


def _reports(output: Path) -> list[Path]:
    """Return the reports of this process that exist now."""
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
    """Its working directory, which a relative --output starts from."""


def launched_with() -> Launch | None:
    """Return the nsys above this process, or None if /proc does not show one."""
    process = os.getpid()
    while process > 1:
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(Path(word).name == "nsys" for word in words[:2]) and "profile" in words[:4]:
                return Launch(words, os.readlink(f"/proc/{process}/cwd"))
            status = Path(f"/proc/{process}/stat").read_text(errors="replace")
        except ours(OSError):
            return None
        process = int(status.rpartition(")")[2].split()[1])  # its parent
    return None


def option(words: list[str], long: str, short: str) -> str | None:
    """Return the value of an option of `nsys profile`, in any of its spellings."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in (f"--{long}", f"-{short}"):
            return following
        for start in (f"--{long}=", f"-{short}="):
            if word.startswith(start):
                return word.removeprefix(start)
    return None


def _unfinished(report: Path) -> bool:
    """Return whether nsys is still converting its raw recording into this report."""
    return report.with_suffix(".qdstrm").exists()


# CUDA and NVTX.


def _profiler_api() -> Any:
    """Return the CUDA runtime that this process uses: torch's if torch has one."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        return torch.cuda.cudart()
    try:
        return ctypes.CDLL("libcudart.so")
    except ours(OSError) as error:
        raise BackendError(
            f"tool is nsys, but this process has no CUDA runtime to mark ranges with ({error}). Fix: import "
            "a CUDA build of torch before the capture, or put libcudart.so on LD_LIBRARY_PATH"
        ) from error


def _call(function: Callable[[], object], name: str) -> None:
    answer = function()
    code = answer if isinstance(answer, int) else int(getattr(answer, "value", 0))  # ctypes, or torch's enum
    if code:
        raise BackendError(f"{name} returned {code}. {_FIX_CUPTI}")


def _synchronize() -> None:
    """Wait for the kernels of the window, so that its report contains them."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _nvtx() -> Any:
    try:
        import nvtx  # type: ignore[import-untyped,unused-ignore]  # it has no types, and may be absent
    except ImportError:
        return None
    return nvtx
