"""Translation of verl's profiler configuration: `global_profiler` and the `profiler` block of each role.

Keys of verl 0.7.1 to 0.9 are known. The tool of a rollout may also have four keys of verl's pull request
5025, which pull request 5121 reverted but forks still have: `step_start`, `step_end`, `profile_by_stage`,
`merge_profiles`. A setting that behaves differently in verl, or has no counterpart here, is reported as a
difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from stepscope.errors import ConfigError

Block = Mapping[str, Any]

_BLOCKS = {
    "actor": "actor_rollout_ref.actor.profiler",
    "rollout": "actor_rollout_ref.rollout.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "critic": "critic.profiler",
}
"""{role: path of its block in verl's configuration}."""
_OLD = {
    "trainer.profile_steps": ("0.5", "write global_profiler.steps"),
    "actor_rollout_ref.profiler": ("0.5", "write one under actor_rollout_ref.actor, .rollout and .ref"),
    "reward_model.profiler": ("0.5 to 0.7.0", "take it out: later releases profile no reward model"),
}
"""{key of older releases: (the releases, the fix)}."""
_TOOLS = {"torch": "torch", "nsys": "nsys", "npu": "npu", "torch_memory": "cuda_memory"}
_TRAINING = ("actor", "critic", "ref")
_FINISH_VARIABLES = {
    "SAVE_PATH": "$STEPSCOPE_STEP_PATH",
    "RANK": "${STEPSCOPE_RANK-}",
    "PID": "$STEPSCOPE_PID",
    "ROLE": "$STEPSCOPE_ROLE",
}
"""{variable of verl's `finish_hook_cmd`, without VERL_PROFILE_: stepscope's variable with the same value}."""
_CONTENTS = {
    "torch": ("cuda", "cpu", "memory", "shapes", "stack"),
    "npu": ("npu", "cpu", "memory", "shapes", "module", "stack"),
}
_TORCH_OPTIONS = {"stack": "with_stack", "shapes": "record_shapes", "memory": "profile_memory"}
_ENGINE_CONTENTS = ("profile_by_stage", "merge_profiles")
_FINISH = {"relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks"}
_OVERALL = _FINISH | {"tool", "steps", "save_path", "profile_continuous_steps", "global_tool_config"}
_BLOCK = _FINISH | {"tool", "enable", "all_ranks", "ranks", "save_path", "tool_config", "global_tool_config"}
_OPTIONS = {
    "contents", "discrete", "schedule", "level", "analysis", "profile_token_start", "profile_token_end",
    "step_start", "step_end", *_ENGINE_CONTENTS, "trace_alloc_max_entries", "stack_depth",
    "memory_snapshot_num_steps", "context", "stacks", "kw_args", "controller_nsight_options",
    "worker_nsight_options",
}  # fmt: skip
"""Known keys of `tool_config.<tool>` in verl."""


def read_verl(source: object) -> tuple[dict[str, object], list[str]]:
    """Translate verl's configuration. Return settings of `ProfileConfig`, and a text for each difference.

    Raises:
        ConfigError: `source` is not a configuration of verl, has keys of a release before 0.7.1, or asks for
            a tool that stepscope does not have.
    """
    tree = _Tree(source)
    for path, (releases, fix) in _OLD.items():
        value = tree.get(path)
        if value is not None and not (isinstance(value, Mapping) and value.get("enable") is False):
            raise ConfigError(path, value, f"the keys of verl 0.7.1 to 0.9; this is one of {releases}", fix)
    overall, reading = tree.block("global_profiler"), _Reading()
    if overall is not None:
        blocks = {role: tree.block(at) or {} for role, at in _BLOCKS.items()}
        enabled = {role: block for role, block in blocks.items() if block.get("enable")}
        return reading.settings(overall, enabled), reading.differences
    block, interval = tree.block("profiler"), tree.get("trainer.profile_interval")
    if block is not None and interval is not None:
        return reading.supervised(block, interval), reading.differences
    fix = "pass verl's whole configuration (what its trainer gets), or a mapping with that block"
    raise ConfigError("global_profiler", None, "verl's block of that name", fix)


class _Reading:
    """Translator of one configuration: methods return settings, and add to `differences`."""

    def __init__(self) -> None:
        self.differences: list[str] = []

    def differ(self, text: str) -> None:
        self.differences.append(f"verl's configuration: {text}")

    def settings(self, overall: Block, enabled: Mapping[str, Block]) -> dict[str, object]:
        tool = self.tool(overall, enabled)
        self.name_unknown(overall, enabled, tool)
        tools = {role: _options(role, block, tool) for role, block in enabled.items()}
        steps = overall.get("steps") or []
        if steps and not enabled:
            self.differ("no role has profiler.enable, so nothing is captured")
            steps = []
        settings: dict[str, object] = {"steps": steps, "save_path": _save_path(overall.get("save_path"))}
        if tool is not None:
            settings["tool"] = _TOOLS[tool]
        ranks: object = "first"
        if enabled:
            shared: Block = (overall.get("global_tool_config") or {}).get(tool) or {}
            mode = self.mode(tools, shared)
            roles = {role: self.role(role, block, tools[role], tool) for role, block in enabled.items()}
            ranks = next(iter(roles.values()))["ranks"]
            lead = next((tools[role] for role in _TRAINING if role in tools), next(iter(tools.values())))
            settings |= {"mode": mode, "roles": roles, **self.options(tool, lead, shared, mode)}
            self.one_section_for_all(tools, lead)
        if overall.get("finish_hook_cmd"):
            settings["finish"] = self.finish(overall, tool, ranks)
        if overall.get("profile_continuous_steps"):
            self.differ(
                "profile_continuous_steps: each captured step has a folder and traces of its own here"
            )
        return settings

    def supervised(self, block: Block, interval: Any) -> dict[str, object]:
        """Translate the configuration of verl's SFT trainer: one `profiler` block, and an interval of steps
        that includes its end.
        """
        if not isinstance(interval, list | tuple) or len(interval) != 2 or interval[1] < interval[0]:
            fix = "write [start, end], or [-1, -1] for none; verl refuses it too"
            raise ConfigError("trainer.profile_interval", interval, "two step numbers in order", fix)
        first, last = interval
        if last > first >= 0:
            self.differ(
                f"trainer.profile_interval: verl records steps {first} to {last} in one trace; each captured "
                "step has traces of its own here"
            )
        steps = [] if first < 0 else [f"{first}:{last + 1}"]
        overall = {name: value for name, value in block.items() if name in _OVERALL}
        return self.settings({**overall, "steps": steps}, {"*": block} if block.get("enable") else {})

    def tool(self, overall: Block, enabled: Mapping[str, Block]) -> str | None:
        named = {role: block["tool"] for role, block in enabled.items() if block.get("tool")}
        tool = next(iter(named.values()), overall.get("tool"))
        for role, other in named.items():
            if other != tool:
                fix = "give all roles one tool, and make a run per tool"
                raise ConfigError(f"{_at(role)}.tool", other, f"{tool!r}, as of the other roles", fix)
        if named and overall.get("tool") not in (None, tool):
            both = f"global_profiler.tool is {overall['tool']}, and that of the roles is {tool}"
            self.differ(f"{both}, which holds in verl and here")
        if tool is not None and tool not in _TOOLS:
            fix = "use one of these; stepscope has no counterpart of msprobe's precision debugger"
            raise ConfigError("global_profiler.tool", tool, ", ".join(_TOOLS), fix)
        if enabled and tool is None:
            self.differ("global_profiler.tool is null: verl records nothing then, stepscope takes torch")
        return cast("str | None", tool)

    def name_unknown(self, overall: Block, enabled: Mapping[str, Block], tool: str | None) -> None:
        blocks = [("global_profiler", overall, _OVERALL)]
        blocks += [(_at(role), block, _BLOCK) for role, block in enabled.items()]
        for at, block, known in list(blocks):
            for kind in known & {"tool_config", "global_tool_config"}:
                blocks.append((f"{at}.{kind}.{tool}", (block.get(kind) or {}).get(tool) or {}, _OPTIONS))
        for at, block, known in blocks:
            for key in block:
                if str(key).replace("-", "_") not in known | {"_target_", "name"}:
                    self.differ(f"{at}.{key} is no setting of verl's, and is left out")

    def mode(self, tools: Mapping[str, Block], shared: Block) -> str:
        """Return `discrete` if a training role sets `discrete`, else `continuous`. The setting has the same
        meaning in verl. Without training roles, all roles count.
        """
        discrete_of = {
            role: bool(tool.get("discrete", shared.get("discrete"))) for role, tool in tools.items()
        }
        training = {role: discrete for role, discrete in discrete_of.items() if role in _TRAINING}
        if len(set(training.values())) > 1:
            self.differ(f"discrete differs between roles {training}; there is one mode here: discrete")
        if discrete_of.get("rollout") is False:
            self.differ(
                "rollout has discrete: false, with which verl records no rollout and does not say so; "
                "stepscope records it in both modes"
            )
        return "discrete" if any((training or discrete_of).values()) else "continuous"

    def role(self, role: str, block: Block, options: Block, tool: str | None) -> dict[str, object]:
        ranks = list(block.get("ranks") or ())
        if not block.get("all_ranks") and not ranks:
            self.differ(f"{role}: ranks is empty, which verl reads as rank 0; it is `ranks: first` here")
        settings: dict[str, object] = {"ranks": "all" if block.get("all_ranks") else ranks or "first"}
        engine = self.engine(options, f"{_at(role)}.tool_config.{tool}") if role == "rollout" else {}
        return settings | ({"engine": engine} if engine else {})

    def engine(self, options: Block, at: str) -> dict[str, object]:
        """Return settings of `engine` for the rollout; empty if verl's configuration sets none."""
        first, last, names = _window(options, at)
        engine: dict[str, object] = {}
        if first or last is not None:
            self.differ(
                f"rollout: {names} count engine iterations in verl too (forward passes); they are "
                "engine.iterations here, from the start of the capture"
            )
            engine["iterations"] = {"start": first, "count": None if last is None else last - first}
        if options.get("profile_by_stage"):
            if last is None:
                allowed = "a number above step_start: profile_by_stage needs a count of iterations"
                raise ConfigError(f"{at}.step_end", last, allowed, "set step_end; verl refuses it too")
            engine["by_stage"] = True
        if options.get("merge_profiles"):
            engine["merge"] = True
        return engine

    def options(self, tool: str | None, lead: Block, shared: Block, mode: str) -> dict[str, object]:
        contents = lead.get("contents")
        if contents == [] and tool in _CONTENTS:
            does = "CPU and CUDA alone" if tool == "torch" else "no device activity"
            self.differ(
                f"{tool}: contents is empty, which verl documents as everything and where it records {does}; "
                "it is the default here: CPU and device, without stacks, shapes or memory"
            )
        if tool == "torch":
            return {"torch": _torch(list(contents or ()), lead.get("schedule") or {}, mode)}
        if tool == "npu":
            taken = {name: lead[name] for name in ("level", "analysis") if name in lead}
            return {"npu": taken | ({"contents": list(contents)} if contents else {})}
        if tool == "torch_memory":
            return {"cuda_memory": self.memory({**shared, **lead})}
        if tool == "nsys":
            self.differ("nsys: the options of controller and workers are not taken over")
        return {}

    def memory(self, options: Block) -> dict[str, object]:
        if options.get("stack_depth", 32) != 32:
            self.differ("torch_memory.stack_depth has no counterpart: cuda_memory.stacks says which are kept")
        if options.get("memory_snapshot_num_steps", 1) != 1:
            self.differ("torch_memory.memory_snapshot_num_steps: each captured step has a snapshot here")
        entries = options.get("trace_alloc_max_entries")
        return {} if entries is None else {"max_entries": entries}

    def one_section_for_all(self, tools: Mapping[str, Block], lead: Block) -> None:
        names = ("contents", "schedule", "level", "analysis")
        others = [
            role
            for role, tool in tools.items()
            if any(tool.get(name) not in (None, lead.get(name)) for name in names)
        ]
        if others:
            self.differ(
                f"the tool's options of {', '.join(others)} differ; the first role's hold for all here"
            )

    def finish(self, overall: Block, tool: str | None, ranks: object) -> dict[str, object]:
        """Return settings of `finish`: verl's command with verl's variables, and the ranks that run the
        command.
        """
        self.differ(
            "finish_hook_cmd runs after each captured step here, with that step's folder as "
            "VERL_PROFILE_SAVE_PATH; verl runs it once, after the last, for all of save_path"
        )
        if overall.get("finish_hook_all_ranks"):
            ranks = "all"
        elif overall.get("finish_hook_ranks"):
            ranks = list(overall["finish_hook_ranks"])
        variables = " ".join(f'VERL_PROFILE_{name}="{value}"' for name, value in _FINISH_VARIABLES.items())
        command = f"export VERL_PROFILE_TOOL={tool or ''} {variables}\n{overall['finish_hook_cmd']}"
        return {"command": command, "ranks": ranks}


def _at(role: str) -> str:
    return _BLOCKS.get(role, "profiler")


def _options(role: str, block: Block, tool: str | None) -> Block:
    """Return the options of a role's tool. Keys have underscores. Items of `contents` that concern an engine
    become keys.

    Raises:
        ConfigError: verl refuses an item of the contents, or a key is from an older release.
    """
    given: Block = (block.get("tool_config") or {}).get(tool) or {}
    options = {str(key).replace("-", "_"): value for key, value in given.items()}
    at = f"{_at(role)}.tool_config.{tool}"
    for key, default in (("step_start", 0), ("step_end", -1)):
        if role != "rollout" and options.get(key) not in (None, default):
            allowed = "the keys of verl 0.7.1 to 0.9; this is one of 0.6 to 0.7.0"
            fix = f"write {at}.schedule, which counts mini-batches (wait, warmup, active)"
            raise ConfigError(f"{at}.{key}", options[key], allowed, fix)
    allowed_contents = _CONTENTS.get(tool or "")
    if not allowed_contents or not options.get("contents"):
        return options
    kept = []
    for content in options.pop("contents"):
        name = str(content).replace("-", "_")
        if name in _ENGINE_CONTENTS:
            options[name] = True
        elif content in allowed_contents:
            kept.append(content)
        else:
            listed = ", ".join((*allowed_contents, *_ENGINE_CONTENTS))
            raise ConfigError(f"{at}.contents", content, listed, "take it out: verl refuses it too")
    return {**options, "contents": kept} if kept else options


def _window(options: Block, at: str) -> tuple[int, int | None, str]:
    """Return (first engine iteration to record, the iteration after the last or None for no end, names of
    both keys).

    Raises:
        ConfigError: verl refuses these numbers.
    """
    tokens = options.get("profile_token_start") is not None or options.get("profile_token_end") is not None
    prefix = "profile_token" if tokens else "step"
    first, last = options.get(f"{prefix}_start"), options.get(f"{prefix}_end")
    for name, value in (("start", first), ("end", last)):
        whole = value is None or (isinstance(value, int) and not isinstance(value, bool))
        if not whole or (tokens and value is not None and value < 0):
            allowed = "a whole number >= 0" if tokens else "a whole number"
            raise ConfigError(f"{at}.{prefix}_{name}", value, allowed, "write a number; verl refuses it too")
    first = max(first or 0, 0)
    if last is not None and last <= first:
        if tokens:
            allowed = f"a number above profile_token_start ({first})"
            raise ConfigError(f"{at}.profile_token_end", last, allowed, "verl refuses it too")
        last = None  # -1, the default of the pull request, means all iterations
    return first, last, f"{prefix}_start and {prefix}_end"


def _torch(contents: list[str], schedule: Block, mode: str) -> dict[str, object]:
    settings: dict[str, object] = {
        option: True for name, option in _TORCH_OPTIONS.items() if name in contents
    }
    if contents and "cuda" not in contents:
        settings["activities"] = ["cpu"]  # verl's torch profiler always records the CPU
    if (schedule.get("active") or 0) > 0:
        names = ("skip_first", "wait", "warmup", "active", "repeat")
        walked = {name: int(schedule.get(name) or 0) for name in names}
        if mode == "continuous":
            walked["repeat"] = walked["repeat"] or 1  # as in verl: one cycle per step
        settings["schedule"] = walked
    return settings


def _save_path(given: object) -> str:
    path = "outputs/profile" if given is None else given
    if not isinstance(path, str):
        raise ConfigError("global_profiler.save_path", given, "the path of a folder", "write a path")
    # In verl, a relative path starts at each worker's working directory.
    return os.path.abspath(os.path.expanduser(path))


class _Tree:
    """verl's configuration. Only values that are read are resolved, because an unread `${...}` may be
    unresolvable.
    """

    def __init__(self, source: object) -> None:
        if isinstance(source, str | os.PathLike):
            from stepscope.config._yaml import load

            source = load(source, "verl's configuration")
        if not isinstance(source, Mapping) and not _is_omegaconf(source):
            fix = "pass the configuration that verl's trainer gets"
            raise ConfigError("from_verl(source)", source, "a mapping, an OmegaConf, or a YAML file", fix)
        self._root: Any = source

    def get(self, path: str) -> Any:
        """Return the value at `path` as plain data with `${...}` resolved, or None if there is no value."""
        value = self._root
        for name in path.split("."):
            if not isinstance(value, Mapping) and not _is_omegaconf(value):
                return None
            value = value.get(name)
        if _is_omegaconf(value):
            from omegaconf import OmegaConf

            return OmegaConf.to_container(value, resolve=True)
        if any(isinstance(leaf, str) and "${" in leaf for leaf in _leaves(value)):
            return self._resolved(path, value)
        return value

    def block(self, path: str) -> Block | None:
        block = self.get(path)
        if block is None or isinstance(block, Mapping):
            return block
        raise ConfigError(path, block, "a mapping", "see verl's trainer configuration")

    def _resolved(self, path: str, value: object) -> Any:
        try:
            from omegaconf import OmegaConf
        except ImportError:
            fix = "pip install omegaconf, which fills references in, or pass what verl's trainer gets"
            raise ConfigError(path, value, "values, not references to other settings", fix) from None
        self._root = OmegaConf.create(self._root)
        return self.get(path)


def _is_omegaconf(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "omegaconf"


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(inner)
    else:
        yield value
