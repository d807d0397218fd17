"""Offline analysis of a recording by `torch_npu.profiler`, in a separate process.

In the profiled process, the analysis would disturb the training: it takes minutes, and changes the start
method of `multiprocessing`. torch_npu refuses to analyse in a daemon, such as a worker of vLLM. The separate
process is not a daemon, and has a deadline.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

from stepscope.errors import BackendError
from stepscope_npu._disk import SUFFIX
from stepscope_npu._versions import MSPROF_VARIABLES

OUTPUT = "ASCEND_PROFILER_OUTPUT"
_ANALYSED = ("trace_view.json", "ascend_pytorch_profiler*.db")
_PROGRAM = """
import inspect, sys
from torch_npu.profiler.profiler import analyse
folder, export = sys.argv[1:]
known = inspect.signature(analyse).parameters
analyse(folder, **({"export_type": export} if export and "export_type" in known else {}))
"""


def analysed(folder: Path) -> list[Path]:
    """Return the files of an analysis of `folder` that a timeline reads; empty without an analysis."""
    return [path for pattern in _ANALYSED for path in sorted((folder / OUTPUT).glob(pattern))]


def analyse(folder: Path, *, timeout_s: float, export: str | None = None) -> list[Path]:
    """Analyse a recording, or return its files if it is analysed already.

    Args:
        folder: A recording; its name ends in `_ascend_pt`.
        export: `text` or `db`, or None for the format in the recording. The oldest versions of torch_npu
            ignore it.

    Returns:
        The files that a timeline reads.

    Raises:
        BackendError: the analysis failed, or took longer than `timeout_s`. After a failure, the message has
            the last lines of its output.
    """
    files = analysed(folder)
    if files:
        return files
    had_output = (folder / OUTPUT).exists()
    try:
        code, output = _run([sys.executable, "-c", _PROGRAM, str(folder), export or ""], timeout_s)
        if code is None:
            raise BackendError(
                f"the analysis of {folder} took longer than {timeout_s:g} s and was ended. "
                "Fix: stepscope analyse --timeout <seconds>, later"
            )
        files = analysed(folder)
        if not files:
            hint = "" if shutil.which("msprof") else " (msprof is not on PATH: source CANN's set_env.sh)"
            raise BackendError(
                f"the analysis of {folder} wrote no timeline, and exited with {code}{hint}. "
                f"Its output: {output or 'none'}"
            )
    except BaseException:
        if not had_output:
            shutil.rmtree(folder / OUTPUT, ignore_errors=True)  # a partial timeline would count as complete
        raise
    return files


class NpuAnalyser:
    """Analyser of the NPU recordings below a step's folder, made by this backend, vllm-ascend or SGLang."""

    name = "npu"

    def waiting(self, folder: Path) -> list[Path]:
        hidden = (".recordings", ".export-")
        return [
            path
            for path in sorted(folder.rglob(f"*{SUFFIX}"))
            if path.is_dir()
            and any(path.glob("profiler_info*.json"))
            and not analysed(path)
            and not any(part.startswith(hidden) for part in path.relative_to(folder).parts)
        ]

    def analyse(self, recording: Path, timeout_s: float) -> str:
        names = [path.name for path in analyse(recording, timeout_s=timeout_s)]
        return ", ".join([*names, *advise(recording, timeout_s)])


def advise(folder: Path, timeout_s: float) -> list[str]:
    """Run msprof-analyze on an analysed recording, if msprof-analyze is installed.

    A failure raises nothing, because stepscope needs none of the files. The tool's output is not shown,
    because its banner contains the address of a repository with a password.

    Returns:
        The paths in `folder` of the files that the tool wrote, HTML pages first, or a message that the tool
        failed. An empty list if the tool is not installed.
    """
    tool = shutil.which("msprof-analyze")
    if tool is None:
        return []
    output = folder / "msprof_analyze"
    code, _ = _run([tool, "advisor", "all", "-d", str(folder), "-o", str(output)], timeout_s)
    files = sorted(path for path in output.rglob("*") if path.is_file())
    if not files:
        shutil.rmtree(output, ignore_errors=True)
        return [
            "msprof-analyze " + ("took too long" if code is None else f"exited with {code}, wrote nothing")
        ]
    return [str(path.relative_to(folder)) for path in sorted(files, key=lambda path: path.suffix != ".html")]


def _run(command: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Run a command and return (its exit code, its last lines of output).

    After `timeout_s`, kill the command and its children, and return (None, "").
    """
    # `import torch` must not load torch_npu by itself: the message of a broken CANN would be lost.
    env = {name: value for name, value in os.environ.items() if name not in MSPROF_VARIABLES}
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own, because the analysis starts processes
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise
    return process.returncode, " | ".join(deque(filter(str.strip, output.splitlines()), maxlen=4))
