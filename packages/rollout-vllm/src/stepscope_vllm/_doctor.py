"""A row of `stepscope doctor` about the profiler of vLLM."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from stepscope_vllm._driving.built_settings import FOLDER_VARIABLE

if TYPE_CHECKING:
    from stepscope_report.doctor import Row


def doctor_rows() -> list[Row]:
    """Return a row on how to switch vLLM's profiler on, or no row if vLLM is not installed."""
    from stepscope_report.doctor import Row  # imported here: only `stepscope doctor` needs it

    if find_spec("vllm") is None:
        return []
    folder = os.environ.get(FOLDER_VARIABLE)
    state = (
        f"{FOLDER_VARIABLE}={folder} switches it on"
        if folder
        else "on where `engine_args` or `server_args` made the engine: prepare() looks"
    )
    return [Row(subject="vllm profiler", state="green", found=state)]
