"""Probe of torch in a process of its own, because importing it takes seconds and may crash.

Run as a program it prints one JSON object. The program runs a profiler window around one small operation,
also on the device if there is one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from typing import Any

TIMEOUT_S = 120.0
_MARK = "stepscope: "
"""Prefix of the answer, because an imported library may print too."""


class ProbeError(Exception):
    """Failure of the process to answer, with its last line of output."""


def ask() -> dict[str, Any]:
    """Return facts of torch on this machine: version, CUDA, devices, and the events of one window.

    Raises:
        ProbeError: torch cannot be imported, or the process ended or hung.
    """
    command = [sys.executable, "-m", "stepscope_report.doctor.torch_probe"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {TIMEOUT_S:g} s") from None
    except (OSError, ValueError, TypeError) as error:  # no such Python any more, or none that is named
        raise ProbeError(f"{sys.executable!r} cannot be started: {error}") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise ProbeError(words[-1] if words else f"it ended with {done.returncode}")
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]  # others print there too
    if not answers:
        raise ProbeError("it exited with 0 and printed no answer (is sys.stdout replaced here?)")
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix(_MARK))
    return answer


def answer() -> dict[str, Any]:
    """Record one operator with torch.profiler and return the facts. Runs in the process of the probe."""
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


if __name__ == "__main__":
    print(f"\n{_MARK}{json.dumps(answer())}")  # noqa: T201  # the answer, to the process that asked
