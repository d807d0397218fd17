"""Rows on torch and the profilers below it, nsys, nvtx and Ray.

As a program, this module prints facts about torch as JSON. It runs in a process of its own, because importing
torch takes seconds and may crash.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stepscope.engines.supported import numbers
from stepscope_report.doctor import DAMAGED, Row, absent, amber, damaged, green, installed, red

INJECTED = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Environment variables of a process that a tool of NVIDIA records from outside."""
DRIVER = "/proc/driver/nvidia/version"
"""File that exists if NVIDIA's driver is loaded."""
OLDEST_RAY = (2, 47)
NSYS_S = 30.0
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
SAMPLED_UP_TO = 2
"""Highest value of `perf_event_paranoid` with which nsys can sample CPUs, by its installation guide."""
_TORCH_S = 120.0
_MARK = "stepscope: "
"""Prefix of the line with the facts, because imported libraries may print lines too."""


class ProbeError(Exception):
    """The process with torch did not answer. The message has the last line that the process printed."""


def ask_torch() -> dict[str, Any]:
    """Return facts about torch on this machine: version, CUDA, devices, and the events that a short profile
    recorded.

    Raises:
        ProbeError: torch cannot be imported, or the process ended or hung.
    """
    command = [sys.executable, "-m", "stepscope_report.doctor.libraries"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TORCH_S,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {_TORCH_S:g} s") from None
    except (OSError, ValueError, TypeError) as error:  # this Python no longer exists, or is unknown
        raise ProbeError(f"{sys.executable!r} cannot be started: {error}") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise ProbeError(words[-1] if words else f"it ended with {done.returncode}")
    answers = [
        line for line in done.stdout.splitlines() if line.startswith(_MARK)
    ]  # libraries print lines too
    if not answers:
        raise ProbeError("it exited with 0 and printed no answer (is sys.stdout replaced here?)")
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix(_MARK))
    return answer


def _torch_answers() -> dict[str, Any]:
    """Profile one operator with torch.profiler and return the facts. Runs in the process with torch."""
    torch: Any = import_module("torch")
    kinds = torch.profiler.ProfilerActivity
    possible = torch.profiler.supported_activities()
    has_cuda = torch.cuda.is_available()
    wanted = [
        kind for kind in (kinds.CPU, kinds.CUDA) if kind in possible and (has_cuda or kind is kinds.CPU)
    ]
    with torch.profiler.profile(activities=wanted) as profiler:
        torch.ones(8, device="cuda" if has_cuda else "cpu").sum().item()
    events = profiler.events() or ()
    device = [event for event in events if "CUDA" in str(event.device_type)]
    return {
        "version": torch.__version__,
        "built_for": torch.version.cuda or torch.version.hip,
        "cuda": has_cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "activities": sorted(str(activity).rpartition(".")[2] for activity in possible),
        "cpu_events": len(events) - len(device),
        "device_events": len(device),
    }


def torch(environ: Mapping[str, str]) -> Iterator[Row]:
    """Yield rows on torch, on the device, and on a short profile that should record work of the CPU and the
    device.
    """
    try:
        missing = find_spec("torch") is None
    except (ImportError, ValueError) as error:
        yield _broken_torch(f"{type(error).__name__}: {error}")
        return
    if missing:
        finding = "not installed in this environment: tool torch and cuda_memory record nothing here"
        yield absent("torch", finding)
        return
    try:
        seen = ask_torch()
    except ProbeError as error:
        yield _broken_torch(str(error))
        return
    built = f"built for {seen['built_for']}" if seen["built_for"] else "a CPU build"
    yield green("torch", f"{seen['version']}, {built}")
    yield _window(seen)
    yield from _device(seen, environ)


def _broken_torch(words: str) -> Row:
    if "torch_npu" in words or "autoload" in words.lower() or "libascend" in words:
        fix = "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or source CANN's set_env.sh: torch_npu is loaded with torch"
    else:
        fix = "python -c 'import torch' shows the same; reinstall torch for this Python and driver"
    return red("torch", f"cannot be used: {words}", fix)


def _window(seen: Mapping[str, Any]) -> Row:
    if seen["cpu_events"]:
        return green("torch.profiler", f"records {seen['activities']}")
    fix = "KINETO_LOG_LEVEL=0 says why; another profiler in the process is the usual cause"
    return red("torch.profiler", "a window around one operator is empty", fix)


def _device(seen: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Row]:
    if not seen["cuda"]:
        if seen["built_for"]:
            fix = "nvidia-smi shows whether the driver sees one; in a container: --gpus all"
            yield amber("CUDA", "torch is built for it and finds no device", fix)
        else:
            yield absent("CUDA", "a CPU build of torch: traces hold CPU work alone")
        return
    yield green("CUDA", f"{len(seen['devices'])} device(s): {', '.join(sorted(set(seen['devices'])))}")
    if seen["device_events"]:
        yield green("CUPTI", "a window saw the kernels of one operator")
        return
    injected = [name for name in INJECTED if environ.get(name)]
    why = f"; {', '.join(injected)} is set: another tool records this process" if injected else ""
    fix = "CUPTI serves one subscriber: not nsys, DCGM profiling or an NCCL profiler beside torch.profiler"
    yield red("CUPTI", f"a window around a kernel holds no device activity{why}", fix)


def nsys(tool: str) -> Row:
    """Return a row on Nsight Systems. A missing nsys is red only if `tool` is nsys."""
    path = shutil.which("nsys")
    if path is None:
        if tool != "nsys":
            return absent("nsys", "not on PATH; only `tool: nsys` needs it")
        fix = "install Nsight Systems and put `nsys` on PATH, on every node"
        return red("nsys", "not on PATH, and `tool` is nsys", fix)
    broken = red if tool == "nsys" else amber
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=NSYS_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return broken("nsys", f"{path}: {error}", "run `nsys --version` by hand")
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    version = next((line for line in lines if re.search(r"version\s+\d{4}\.\d", line)), None)
    if done.returncode or version is None:
        last = lines[-1] if lines else "it printed nothing"
        fix = "it does not work here: install Nsight Systems again, or take it off PATH"
        return broken("nsys", f"{path} --version ended with {done.returncode}: {last}", fix)
    return green("nsys", f"{version.strip()}, {path}")


def nsys_report(tool: str) -> Iterator[Row]:
    """Yield rows on a report that nsys makes of a program with one NVTX range. Yield nothing unless `tool` is
    nsys.
    """
    path = shutil.which("nsys")
    if tool != "nsys" or path is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        options = ("--trace=nvtx", "--sample=none", "--cpuctxsw=none", f"--output={folder}/report")
        try:
            done = subprocess.run(
                [path, "profile", *options, sys.executable, "-c", _MARKERS],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=NSYS_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            yield red("nsys report", str(error), "run `nsys profile --trace=nvtx python --version` by hand")
            return
        if not Path(folder, "report.nsys-rep").exists():
            lines = done.stdout.decode(errors="replace").replace("\r", "\n").split("\n")
            told = next((line.strip() for line in lines if re.search("(?i)error|not found", line)), lines[-1])
            fix = "host-linux-x64 (with QdstrmImporter) must lie beside target-linux-x64: install all of nsys"
            yield red("nsys report", f"nsys makes no report: {told or 'it says nothing'}", fix)
            return
    yield green("nsys report", "nsys makes reports: it made one of a small program")
    if lacks := re.search(r"no markers: (.*?)(?: Fix: (.*))?$", done.stdout.decode(errors="replace"), re.M):
        yield red("nvtx", lacks[1], lacks[2] or "pip install 'stepscope[nsys]'")


_MARKERS = "from stepscope.backends.nsys import markers; print(markers())"


def nsys_permissions() -> Iterator[Row]:
    """Yield a row if the kernel forbids nsys to sample CPUs. CUDA and NVTX need no permission."""
    if shutil.which("nsys") is None or os.geteuid() == 0:
        return
    try:
        level = int(PARANOID.read_text())
    except (OSError, ValueError):
        return  # another system
    if level > SAMPLED_UP_TO:
        finding = f"{PARANOID} is {level}: nsys traces CUDA and NVTX here and samples no CPU"
        fix = f"sysctl kernel.perf_event_paranoid={SAMPLED_UP_TO}; or nsys: {{extra: {{sample: none}}}}"
        yield amber("nsys permissions", finding, fix)


def nvtx() -> Row:
    version = installed("nvtx")
    if version is None:
        return absent("nvtx", "not installed; only `tool: nsys` uses it")
    return damaged("nvtx") if version == DAMAGED else green("nvtx", version)


def nvml() -> Iterator[Row]:
    """Yield a row on the package that reads the counters of GPUs, if NVIDIA's driver is loaded."""
    if not os.path.exists(DRIVER):
        return
    package = "nvidia-ml-py"
    version = installed(package)
    if version is None:
        finding = "not installed: captures have no counters of GPUs"
        yield amber(package, finding, "pip install 'stepscope[counters]'")
    else:
        yield damaged(package) if version == DAMAGED else green(package, version)


def ray() -> Row:
    version = installed("ray")
    if version is None:
        return absent("ray", "not installed; capture(workers=...) of actors needs it")
    if version == DAMAGED or not numbers(version):
        return damaged("ray")
    if numbers(version) < OLDEST_RAY:
        return red("ray", version, "pip install 'ray>=2.47': older ones lose the spans of async actors")
    return green("ray", version)


def recorded_from_outside(environ: Mapping[str, str]) -> Iterator[Row]:
    """Yield a row for each variable that lets a tool of NVIDIA record this process."""
    for name in INJECTED:
        value = environ.get(name)
        if not value:
            continue
        if name.endswith("_PATH") and not os.path.exists(value):
            fix = f"unset {name}: every CUDA and NVTX call of a process uses that path and may crash"
            yield red(name, f"{value} is not there", fix)
        else:
            fix = "one at a time: torch.profiler sees no kernels while nsys records"
            yield amber(name, f"{value}: nsys records processes of this shell", fix)


if __name__ == "__main__":
    print(f"\n{_MARK}{json.dumps(_torch_answers())}")  # noqa: T201  # the answer, to the process that asked
