"""The keys and contents of verl's profiler blocks, v0.5 to v0.9, and those of the SGLang follow-up.

The follow-up (verl #5025, commit 11f14a729; undone by #5121) let a rollout's tool name `step_start`,
`step_end` and the contents `profile-by-stage` and `merge-profiles`. Forks have them still.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.errors import ConfigError

_FINISH = {"relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks"}
OVERALL = _FINISH | {"tool", "steps", "save_path", "profile_continuous_steps", "global_tool_config"}
"""Keys of `global_profiler`."""
_BLOCK = _FINISH | {
    "tool", "enable", "all_ranks", "ranks", "save_path", "tool_config", "global_tool_config", "discrete",
}  # fmt: skip
_ENGINE_KEYS = {"step_start", "step_end", "profile_by_stage", "merge_profiles"}
_TOKENS = {"profile_token_start", "profile_token_end"}
_TOOL = {
    "torch": {"contents", "discrete", "schedule", "manual_save"} | _ENGINE_KEYS | _TOKENS,
    "npu": {"contents", "discrete", "level", "analysis"} | _ENGINE_KEYS | _TOKENS,
    "nsys": {"discrete"},
    "torch_memory": {"trace_alloc_max_entries", "stack_depth", "memory_snapshot_num_steps"},
}
_SHARED = {
    "torch": _TOOL["torch"],
    "npu": _TOOL["npu"],
    "nsys": {"discrete", "controller_nsight_options", "worker_nsight_options"},
    "torch_memory": _TOOL["torch_memory"] | {"context", "stacks", "kw_args"},
}
_ENGINE_CONTENTS = {"profile_by_stage", "merge_profiles"}
_CONTENTS = {
    "torch": ("cuda", "cpu", "memory", "shapes", "stack"),
    "npu": ("npu", "cpu", "memory", "shapes", "module", "stack"),
}


def plain(tool: Mapping[str, Any], tool_name: str | None, at: str) -> dict[str, Any]:
    """Return a tool's block with underscores in its keys, and the engine's contents as keys of their own.

    Raises:
        ConfigError: a content that verl refuses.
    """
    block = {str(key).replace("-", "_"): value for key, value in tool.items()}
    allowed = _CONTENTS.get(tool_name or "")
    contents = block.get("contents")
    if contents is None or allowed is None:
        return block
    kept = []
    for content in contents:
        name = str(content).replace("-", "_")
        if name in _ENGINE_CONTENTS:
            block[name] = True
        elif content in allowed:
            kept.append(content)
        else:
            listed = ", ".join((*allowed, "profile-by-stage", "merge-profiles"))
            raise ConfigError(f"{at}.contents", content, listed, "take it out: verl refuses it too")
    if len(kept) == len(contents) or kept:
        return block | {"contents": kept}
    del block["contents"]  # nothing but the engine's: not the empty list, which verl reads in its own way
    return block


def window(tool: Mapping[str, Any], at: str) -> tuple[int, int | None] | None:
    """Return the engine iterations that a rollout's tool records, as (left out, recorded).

    Raises:
        ConfigError: a window that verl refuses.
    """
    first, last = tool.get("profile_token_start"), tool.get("profile_token_end")
    if first is not None or last is not None:
        for name, value in (("start", first), ("end", last)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ConfigError(
                    f"{at}.profile_token_{name}", value, "a whole number >= 0", "verl refuses it"
                )
        if last is not None and last <= (first or 0):
            allowed = f"a number above profile_token_start ({first or 0})"
            raise ConfigError(f"{at}.profile_token_end", last, allowed, "verl refuses it too")
        return first or 0, None if last is None else last - (first or 0)
    first, last = tool.get("step_start"), tool.get("step_end")
    for name, value in (("step_start", first), ("step_end", last)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{at}.{name}", value, "a whole number", "write a number; verl refuses it too")
    count = None if last is None or last <= (first or 0) else last - max(first or 0, 0)
    if tool.get("profile_by_stage") and count is None:
        allowed = "a number above step_start: profile_by_stage needs a count of iterations"
        raise ConfigError(f"{at}.step_end", last, allowed, "set step_end; verl refuses it too")
    return None if count is None and not first else (max(first or 0, 0), count)


def unknown(
    overall: Mapping[str, Any],
    blocks: Mapping[str, Mapping[str, Any]],
    places: Mapping[str, str],
    tool: str | None,
) -> Iterator[str]:
    """Yield the dotted names of keys that no release of verl knows."""
    yield from _beside(overall, OVERALL, "global_profiler")
    shared = (overall.get("global_tool_config") or {}).get(tool) or {}
    yield from _beside(shared, _SHARED.get(tool or "", set()), f"global_profiler.global_tool_config.{tool}")
    for role, block in blocks.items():
        at = places.get(role, "profiler")
        yield from _beside(block, _BLOCK, at)
        options = (block.get("tool_config") or {}).get(tool) or {}
        yield from _beside(options, _TOOL.get(tool or "", set()), f"{at}.tool_config.{tool}")


def _beside(block: Mapping[str, Any], known: set[str], at: str) -> Iterator[str]:
    for key in block:
        if str(key).replace("-", "_") not in known | {"_target_", "name"}:
            yield f"{at}.{key}"
