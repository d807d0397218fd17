"""Options of vllm-ascend's own profiler, which a capture cannot change.

vllm-ascend makes torch_npu's profiler from constants in its code, which differ between releases. So stepscope
reads the constants from the installed code before the run, and from each recording after the run.
"""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from stepscope.engines import EngineCapture
from stepscope.errors import EngineError
from stepscope_vllm._driving.built_settings import FOLDER_VARIABLE
from stepscope_vllm._driving.target import Fact

log = logging.getLogger("stepscope")
_told = False
"""True if the fixed options have been logged. One writer: `check`."""
PARTS = ("profiler/torch_npu_profiler.py", "worker/worker_v1.py", "worker/worker.py")
"""Files of vllm-ascend that may create its profiler: from 0.20 on, up to 0.12, and in the releases between.
The first file that creates a profiler is used."""
_DEFAULTS = {
    "record_shapes": "False",
    "with_stack": "False",
    "with_modules": "False",
    "profile_memory": "False",
}
"""Defaults of torch_npu for arguments that vllm-ascend does not pass."""
_MARKERS = (
    "records without mstx (msprof_tx=False), so spans leave no markers in its workers' recordings: the "
    "timeline has them on the rows of whoever calls the engine. Fix: stepscope_vllm.record_request, for the "
    "queue, prefill and decode of a request"
)
_UNKNOWN = (
    "what its profiler records with is not known, because its code is not as it was up to 0.30. Fix: see "
    "profiler_info*.json in a recording"
)


class Ascend(NamedTuple):
    """The profiler of one vllm-ascend installation, or of one recording."""

    who: str
    arguments: Mapping[str, str]
    """Arguments of torch_npu's profiler as text: a constant by its last name (`Level1`, `False`), or an
    expression as in the code."""
    by_environment: bool = False
    """True if this version reads VLLM_TORCH_PROFILER_DIR and has no `ProfilerConfig`."""

    def fixed(self) -> dict[str, str]:
        """Return {option of `npu`: its value and the reason} for options that no capture can change."""
        given = self.arguments
        if not given:
            return {"npu": f"{self.who}: {_UNKNOWN}"}
        reasons = {}
        if "profiler_level" in given:
            level = given["profiler_level"]
            reasons["npu.level"] = f"{self.who} records at {level} and has no setting for it"
        if "export_type" in given:
            reasons["npu.export"] = (
                f"{self.who} writes {given['export_type'].lower()} and has no setting for it. Fix: stepscope "
                "analyse, then merge"
            )
        if "True" not in (given.get("msprof_tx"), given.get("mstx")):
            reasons["npu.markers"] = f"{self.who} {_MARKERS}"
        return reasons

    def unable(self, capture: EngineCapture) -> dict[str, str]:
        """Return {option: reason} for the options of a capture that have no effect."""
        given, reasons = {**_DEFAULTS, **self.arguments}, self.fixed()
        if not self.arguments:
            return reasons
        for option in ("record_shapes", "profile_memory"):
            if getattr(capture, option) and given[option] == "False":
                reasons[option] = f"{self.who} records none and has no setting for it"
        if capture.with_stack and given["with_stack"] == "False":
            instead = "none" if given["with_modules"] == "False" else "modules in its place"
            reasons["with_stack"] = f"{self.who} records {instead}"
        return reasons


def is_here() -> bool:
    """Return whether vllm-ascend is installed. Its engines have a profiler of their own."""
    return find_spec("vllm_ascend") is not None


@cache
def installed() -> Ascend | None:
    """Return the profiler of the installed vllm-ascend, or None if vllm-ascend is not installed.

    Each process reads the code once, without importing it.
    """
    spec = find_spec("vllm_ascend")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        release = version("vllm-ascend")
    except PackageNotFoundError:
        release = "of unknown version"
    return of_source(Path(next(iter(spec.submodule_search_locations))), f"vllm-ascend {release}")


def of_source(package: Path, who: str) -> Ascend:
    """Return the profiler's options, read from the code in a folder `vllm_ascend`.

    `arguments` is empty if the code differs from the code of all releases up to 0.30.
    """
    for part in PARTS:
        try:
            module = ast.parse((package / part).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        arguments = _arguments(module)
        if arguments:
            named = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
            by_environment = FOLDER_VARIABLE in named and "profiler_config" not in named
            return Ascend(who, arguments, by_environment)
    return Ascend(who, {})


def of_recording(folder: Path) -> Ascend | None:
    """Return the options that torch_npu wrote into one recording, or None if the recording has none."""
    for path in folder.glob("profiler_info*.json"):
        try:
            config = json.loads(path.read_bytes())["config"]
            options = {**config["common_config"], **config["experimental_config"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        given = {name.lstrip("_"): value for name, value in options.items()}
        exports = given.get("export_type")
        if isinstance(exports, list):
            given["export_type"] = ", ".join(map(str, exports))
        names = (*_DEFAULTS, "profiler_level", "export_type", "msprof_tx", "mstx")
        return Ascend("vllm-ascend", {name: str(given[name]) for name in names if name in given})
    return None


def options_of(recording: Ascend | None) -> dict[str, Fact]:
    """Return {option of `npu`: value} for the sidecar of one recording. Options that the recording does not
    state are absent.
    """
    given = {} if recording is None else recording.arguments
    options: dict[str, Fact] = {}
    for name, argument in (("level", "profiler_level"), ("export", "export_type")):
        if argument in given:
            options[name] = given[argument].lower()
    if "msprof_tx" in given:
        options["markers"] = "True" in (given["msprof_tx"], given.get("mstx"))
    return options


def check(settings: Mapping[str, object], environment: Mapping[str, object]) -> dict[str, str]:
    """Return {option: reason} for options of captures that vllm-ascend ignores; empty without vllm-ascend.

    The reasons are logged once in each process.

    Args:
        settings: Settings of the engine's profiler.
        environment: The settings that came from the environment when the engine was built.

    Raises:
        EngineError: this vllm-ascend does not read the settings that the engine was built with.
    """
    global _told
    ascend = installed()
    if ascend is None:
        return {}
    if ascend.by_environment and not environment.get("torch_profiler_dir"):
        folder = settings.get("torch_profiler_dir")
        raise EngineError(
            f"{ascend.who} takes no profiler_config: its workers look at {FOLDER_VARIABLE}, which is not "
            f"set. Fix: build the engine in `with engine_environment(config, replica):`, or export "
            f"{FOLDER_VARIABLE}={folder} before, or vllm-ascend 0.14 or later"
        )
    if not _told:
        _told = True
        log.warning("stepscope: engines of this environment: %s", "; ".join(ascend.fixed().values()))
    return ascend.fixed()


def _arguments(module: ast.Module) -> dict[str, str]:
    """Return {argument: text} of the first call `profile(experimental_config=_ExperimentalConfig(...))` in
    the code. Empty without such a call.
    """
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    arguments: dict[str, str] = {}
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        if name == "_ExperimentalConfig" or (name == "profile" and "experimental_config" in given):
            arguments |= {argument: _text(value) for argument, value in given.items()}
    return arguments


def _text(value: ast.expr) -> str:
    """Return `Level1` for `torch_npu.profiler.ProfilerLevel.Level1`, and any other expression unchanged."""
    text = ast.unparse(value)
    return text.rpartition(".")[2] if text.startswith("torch_npu.profiler.") and "(" not in text else text
