"""Comparison of a capture's options with the options that the engine was built with."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope_vllm import _versions
from stepscope_vllm._driving.ascend_profiler import Ascend
from stepscope_vllm._versions import Dialect

_TORCH = {
    "with_stack": "torch_profiler_with_stack",
    "record_shapes": "torch_profiler_record_shapes",
    "profile_memory": "torch_profiler_with_memory",
}
"""{option of a capture: option of vLLM that is fixed when the engine is built}."""
_NEVER = {
    "by_stage": "vLLM records prefill and decode in one trace; its annotations tell them apart",
    "merge": "vLLM joins no traces; `stepscope merge` does",
}
_STACKS = (
    "the engine was built with torch_profiler_with_stack=True (vLLM's default): an idle second gives 2.7 "
    "million events, and stop takes minutes"
)
OTHER_THREAD = (
    "the worker lives in this process, where generation is on another thread than the profiler, and torch "
    "reports memory on the profiler's own"
)
_BY_NSYS = "nsys records what it was started with"
_NSYS_SESSION = "NSYS_PROFILING_SESSION_ID"
"""Variable that nsys sets for the processes that it records."""
FIX = "Fix: build it with **stepscope_vllm.engine_args(config, replica)"


def refuse_disabled(settings: Mapping[str, object]) -> None:
    """Raise EngineError, with the fix, if the engine was built without a profiler that stepscope can use."""
    if settings.get("profiler") is None:
        raise EngineError(
            "this engine was built without its profiler, and it cannot be added later. Fix: "
            "AsyncEngineArgs(..., **stepscope_vllm.engine_args(config, replica)), which is "
            "profiler_config={'profiler': 'torch', 'torch_profiler_dir': '/a/folder', "
            "'torch_profiler_with_stack': False, 'ignore_frontend': True}; for a framework that nobody edits "
            "`stepscope run` does it, in each process that it starts"
        )
    if settings["profiler"] == "cuda":
        if _NSYS_SESSION not in os.environ:
            raise EngineError(
                "this engine was built with profiler='cuda', which opens ranges for Nsight Systems. But nsys "
                f"did not start this process ({_NSYS_SESSION} is not set). Fix: start the process that "
                "builds the engine under nsys (stepscope.backends.nsys: runtime_env, command), or build it "
                "with profiler='torch'"
            )
        return
    if settings["profiler"] != "torch":
        raise EngineError(
            f"this engine was built with profiler={settings['profiler']!r}, whose files nobody has read yet. "
            "Fix: profiler='torch', or 'cuda' under nsys"
        )
    folder = str(settings.get("torch_profiler_dir") or "")
    if "://" in folder:
        raise EngineError(
            f"this engine writes to {folder}, where files cannot be told apart. Fix: a folder of its host"
        )


def unable(
    capture: EngineCapture,
    settings: Mapping[str, object],
    dialect: Dialect,
    version: str,
    *,
    aimed: bool,
    ascend: Ascend | None = None,
) -> dict[str, str]:
    """Return {option: reason} for the options of a capture that have no effect.

    Args:
        settings: Settings that the engine was built with; empty for a server, whose settings are unknown.
        aimed: True if each capture can set the workers' options, as with stepscope's extension or for a
            worker in this process.
        ascend: The engine's profiler if it is vllm-ascend's, else None.

    Raises:
        EngineError: `extra` has an option that this vLLM lacks.
    """
    if settings.get("profiler") == "cuda":
        return {option: _BY_NSYS for option in (*_TORCH, *_NEVER, "ranks") if getattr(capture, option)} | {
            "artifacts": "CUDA profiler ranges were opened and closed. The engine is in the report of the "
            "nsys session that started it: that of the window of the process that built it"
        }
    reasons = {option: why for option, why in _NEVER.items() if getattr(capture, option)}
    if not aimed:
        reasons.update(_fixed(capture, settings))
        reasons.update(_iterations(capture, settings, dialect))
    reasons.update(_extra(capture, settings, version, aimed=aimed))
    if ascend is not None:
        reasons.update(ascend.unable(capture))
    why = _versions.untried(version)
    if why is not None:
        reasons["version"] = why
    return reasons


def _fixed(capture: EngineCapture, settings: Mapping[str, object]) -> dict[str, str]:
    reasons = {}
    for option, field in _TORCH.items():
        wanted, built = bool(getattr(capture, option)), settings.get(field)
        if built is None and wanted:
            reasons[option] = f"what the server was built with is not known. Fix: serve it with {field} set"
        elif built is not None and wanted and not built:
            reasons[option] = f"the engine was built with {field}=False. {FIX}"
        elif option == "with_stack" and built and not wanted:
            reasons[option] = f"{_STACKS}. {FIX}"
    return reasons


def _iterations(capture: EngineCapture, settings: Mapping[str, object], dialect: Dialect) -> dict[str, str]:
    wanted = (capture.iterations.start, capture.iterations.count or 0)
    built = (settings.get("delay_iterations", 0), settings.get("max_iterations", 0))
    if dialect.bounds or wanted == built:
        return {}
    if wanted == (0, 0):
        return {"iterations": f"the engine was built to skip {built[0]} iterations and record {built[1]}"}
    return {
        "iterations": f"a start of this vLLM takes none{_versions.since('delay_iterations')}. Fix: give the "
        "engine our worker extension: engine_args does"
    }


def _extra(
    capture: EngineCapture, settings: Mapping[str, object], version: str, *, aimed: bool
) -> dict[str, str]:
    reasons = {}
    for option, value in capture.extra.items():
        if option in settings:
            free = aimed and option == "torch_profiler_with_flops"
            if settings[option] != value and not free:
                reasons[option] = f"the engine was built with {option}={settings[option]!r}. {FIX}"
        elif option in _versions.ADDED and settings:
            raise EngineError(f"vLLM {version} has no option {option!r}{_versions.since(option)}")
        elif not settings and option in _versions.KNOWN:
            reasons[option] = "what the server was built with is not known"
        else:
            known = sorted(settings or _versions.KNOWN)
            raise EngineError(f"vLLM has no profiler option {option!r}; it has: {', '.join(known)}")
    return reasons
