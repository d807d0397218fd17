"""The offline analysis of a recording: `torch_npu.profiler`'s own, in a process of its own.

In the process that is profiled it would be in the way: it takes minutes, changes the start method of
`multiprocessing` there, and refuses to run at all in a daemon, such as a worker of vLLM. The process started
here is none, whoever starts it, and it has a deadline.
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
    """What an analysis left that a timeline is made of."""
    return [path for pattern in _ANALYSED for path in sorted((folder / OUTPUT).glob(pattern))]


def analyse(folder: Path, *, timeout_s: float, export: str | None = None) -> list[Path]:
    """Analyses one recording, unless it is analysed already.

    Args:
        folder: One that ends in `_ascend_pt`.
        export: `text` or `db`; None: as it was recorded. The oldest torch_npu know no other.

    Returns:
        The files that a timeline is made of.

    Raises:
        BackendError: it failed, or took longer than `timeout_s`; says what it printed last.
    """
    found = analysed(folder)
    if found:
        return found
    had_output = (folder / OUTPUT).exists()
    try:
        code, said = _run([sys.executable, "-c", _PROGRAM, str(folder), export or ""], timeout_s)
        if code is None:
            raise BackendError(
                f"the analysis of {folder} took longer than {timeout_s:g} s and was ended. "
                "Fix: stepscope analyse --timeout <seconds>, later"
            )
        found = analysed(folder)
        if not found:
            hint = "" if shutil.which("msprof") else " (msprof is not on PATH: source CANN's set_env.sh)"
            raise BackendError(
                f"the analysis of {folder} wrote no timeline, and exited with {code}{hint}. "
                f"It said: {said or 'nothing'}"
            )
    except BaseException:
        if not had_output:
            shutil.rmtree(folder / OUTPUT, ignore_errors=True)  # half a timeline would count as one
        raise
    return found


class NpuAnalyser:
    """The recordings below a step's folder, whoever made them: the backend, vllm-ascend, SGLang."""

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
        made = [path.name for path in analyse(recording, timeout_s=timeout_s)]
        return ", ".join([*made, *advise(recording, timeout_s)])


def advise(folder: Path, timeout_s: float) -> list[str]:
    """What msprof-analyze, where it is installed, says of an analysed recording: names of its files, a page
    first; or why there are none. Empty where it is not installed.

    It is never needed, so what it fails at is its own. Nothing that it prints is shown: its banner holds the
    address of a repository with a password in it.
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
    """(exit code, its last lines); None when it had to be ended, with all that it started."""
    # Without torch's autoload: it imports torch_npu at a moment when a broken CANN hides its own message.
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
        start_new_session=True,  # a group of its own: the analysis starts processes in its turn
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise
    return process.returncode, " | ".join(deque(filter(str.strip, said.splitlines()), maxlen=4))
