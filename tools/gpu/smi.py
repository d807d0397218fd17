"""Readings of nvidia-smi, which are independent of the Python package that stepscope uses for NVML."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Sequence

Reading = dict[str, float | None]


def query(smi: Sequence[str], fields: Sequence[str], gpu: str | None = None) -> list[dict[str, str]]:
    """Return {field: value} for each GPU, or only for the GPU with number or UUID `gpu`.

    Raises:
        OSError: nvidia-smi does not start, or fails.
    """
    command = [*smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += [] if gpu is None else [f"--id={gpu}"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if answer.returncode:
        raise OSError(f"nvidia-smi exited with {answer.returncode}: {answer.stdout}{answer.stderr}".strip())
    rows = [line.split(",") for line in answer.stdout.splitlines() if line.strip()]
    return [dict(zip(fields, map(str.strip, row), strict=True)) for row in rows]


def number(text: str) -> float | None:
    """Return a value as a number, or None for `[N/A]` and similar texts."""
    try:
        return float(text)
    except ValueError:
        return None


class Readings:
    """Readings of one GPU, which a thread takes until the end of the block."""

    def __init__(self, smi: Sequence[str], fields: Sequence[str], gpu: str, interval_s: float) -> None:
        self.rows: list[tuple[int, Reading]] = []
        """(unix ns, {field: value}) of each reading."""
        self.error: str | None = None
        self._arguments = (list(smi), list(fields), gpu)
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="nvidia-smi", daemon=True)

    def __enter__(self) -> Readings:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(20)

    def median(self, field: str, start_ns: int, end_ns: int) -> float | None:
        """Return the median of a field between two times, or None without a reading."""
        values = [row[field] for at_ns, row in self.rows if start_ns <= at_ns <= end_ns]
        numbers = [value for value in values if value is not None]
        return statistics.median(numbers) if numbers else None

    def _read(self) -> None:
        while self._read_once() and not self._over.wait(self._interval_s):
            pass

    def _read_once(self) -> bool:
        began_ns = time.time_ns()
        try:
            (row,) = query(*self._arguments)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.error = f"{type(error).__name__}: {error}"
            return False
        middle_ns = (began_ns + time.time_ns()) // 2
        self.rows.append((middle_ns, {field: number(text) for field, text in row.items()}))
        return True
