"""Places in stacks: the user's code, the library call that it is in, and the kind of wait that this is."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import PurePath

from stepscope.files.states import Frame, Task, Thread

_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", "<frozen")
_COLLECTIVES = "torch/distributed/"
"""A frame of these files is a collective, in which a process waits for others."""
_ENGINES = ("/vllm/", "/sglang/")
_CLIENTS = ("/httpx/", "/aiohttp/", "/openai/", "/requests/", "/http/client.py", "/urllib/")
"""Frames in these files are calls of an engine; a client's only in the role `rollout`."""
_RAY = "/ray/_private/worker.py"
_SKIPPED = ("_wrapper", "wrapper", "inner", "_call_impl")
"""Functions of torch.distributed that say nothing of the collective."""


def ends_in_code(task: Task) -> bool:
    return any(not is_library(frame) for frame in task.frames)


def is_polling(thread: Thread) -> bool:
    """Return whether a thread runs an event loop that waits for something to happen."""
    return thread.in_loop or (bool(thread.frames) and thread.frames[0].file.endswith("selectors.py"))


def say_where(frames: Sequence[Frame]) -> str:
    """Return the innermost frame of the user's code, and the library call that it is in."""
    own = next((frame for frame in frames if not is_library(frame)), None)
    if own is None:
        return "" if not frames else _place(frames[0])
    inner = frames[0]
    return _place(own) if inner is own else f"{_place(own)}, in {inner.function} ({_short(inner.file)})"


def _place(frame: Frame) -> str:
    return f"{frame.function} at {_short(frame.file)}:{frame.line}"


def _short(file: str) -> str:
    return "/".join(PurePath(file).parts[-2:])


def is_library(frame: Frame) -> bool:
    if "/stepscope/" in frame.file or frame.file.startswith("<profile_step"):
        return True
    packages = _LIBRARIES[1] in frame.file or _LIBRARIES[2] in frame.file
    return packages or frame.file.startswith((_LIBRARIES[0], _LIBRARIES[3]))


def collective_of(frames: Sequence[Frame]) -> str | None:
    inside = [frame for frame in frames if _COLLECTIVES in frame.file]
    named = [frame.function for frame in inside if frame.function not in _SKIPPED]
    return named[0] if named else (inside[0].function if inside else None)


def asks_ray(frames: Sequence[Frame]) -> bool:
    """Return whether a stack waits in Ray, as `ray.get` and `ray.wait` do."""
    return any(_RAY in frame.file for frame in frames)


def asks_engine(frames: Sequence[Frame], role: str) -> bool:
    files = [frame.file for frame in frames]
    parts = (*_ENGINES, *_CLIENTS) if role == "rollout" else _ENGINES
    return any(part in file for file in files for part in parts)
