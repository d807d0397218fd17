"""Settings of an engine's profiler that came from the environment when the engine was built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

CUDA_VARIABLE = "VLLM_TORCH_CUDA_PROFILE"
"""Variable that makes vLLM 0.11.1 to 0.12 open CUDA profiler ranges. Later versions use
`ProfilerConfig(profiler="cuda")`."""

FOLDER_VARIABLE = "VLLM_TORCH_PROFILER_DIR"

VARIABLES = {
    "torch_profiler_with_stack": "VLLM_TORCH_PROFILER_WITH_STACK",
    "torch_profiler_record_shapes": "VLLM_TORCH_PROFILER_RECORD_SHAPES",
    "torch_profiler_with_memory": "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY",
    "torch_profiler_with_flops": "VLLM_TORCH_PROFILER_WITH_FLOPS",
}
"""{field of `ProfilerConfig`: variable that sets it in vLLM 0.12 and older, which has no such class}. Before
0.10.2 only `FOLDER_VARIABLE` existed."""


_built_in: WeakKeyDictionary[object, Mapping[str, object]] = WeakKeyDictionary()
"""{engine: settings of its profiler}. One writer: `building`."""


@contextmanager
def building(owned: Callable[[], list[object]]) -> Iterator[None]:
    """Remember the settings in the environment for each engine that is built in this block.

    Args:
        owned: Function that returns the engines that live in this process.
    """
    earlier = owned()
    yield
    settings = settings_of_environment()
    for engine in owned():
        if all(engine is not other for other in earlier):
            _built_in[engine] = settings


def settings_of(engine: object) -> Mapping[str, object]:
    """Return the settings that were in the environment when an engine was built. If these are unknown, return
    the settings in the current environment.
    """
    known = _built_in.get(engine)
    return settings_of_environment() if known is None else known


def settings_of_environment() -> dict[str, object]:
    """Return the settings in the current environment, under the names of `ProfilerConfig`."""
    if os.environ.get(CUDA_VARIABLE) == "1":
        return {"profiler": "cuda"}
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return {}
    settings: dict[str, object] = {"profiler": "torch", "torch_profiler_dir": os.path.abspath(folder)}
    for field, variable in VARIABLES.items():
        default = "1" if field == "torch_profiler_with_stack" else "0"
        settings[field] = os.environ.get(variable, default) != "0"
    return settings
