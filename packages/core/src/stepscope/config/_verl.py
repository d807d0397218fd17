"""verl's profiler configuration as ours: `global_profiler` and the roles' `profiler` blocks, v0.5 to v0.9.

Where a setting of verl's means something here, it is taken with that meaning. Where it is a trap there, or
has no counterpart here, the difference is named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from stepscope.config._verl_keys import OVERALL, plain, unknown, window
from stepscope.errors import ConfigError

Block = Mapping[str, Any]

_BLOCKS = {
    "actor": "actor_rollout_ref.actor.profiler",
    "rollout": "actor_rollout_ref.rollout.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "critic": "critic.profiler",
    "reward": "reward_model.profiler",
}
"""Our roles -> where verl keeps their blocks, from v0.6 on."""
_BLOCKS_0_5 = _BLOCKS | dict.fromkeys(("actor", "rollout", "ref"), "actor_rollout_ref.profiler")
_TOOLS = {"torch": "torch", "nsys": "nsys", "npu": "npu", "torch_memory": "cuda_memory"}
_TRAINING = ("actor", "critic", "ref", "reward")
_FINISH_VARIABLES = {
    "SAVE_PATH": "$STEPSCOPE_STEP_PATH",
    "RANK": "${STEPSCOPE_RANK-}",
    "PID": "$STEPSCOPE_PID",
    "ROLE": "$STEPSCOPE_ROLE",
}
"""Variables that verl's `finish_hook_cmd` reads, after VERL_PROFILE_ -> the same value here."""
_CONTENTS = {"stack": "with_stack", "shapes": "record_shapes", "memory": "profile_memory"}


def read_verl(source: object) -> tuple[dict[str, object], list[str]]:
    """Return the settings of `ProfileConfig` that equal verl's configuration, and the differences.

    Raises:
        ConfigError: this is no configuration of verl's, or it asks for what stepscope does not have.
    """
    tree = _Tree(source)
    reading = _Reading()
    steps_0_5 = tree.get("trainer.profile_steps")
    overall = tree.block("global_profiler")
    if overall is not None:
        blocks = {role: block for role, at in _BLOCKS.items() if (block := tree.block(at))}
        enabled = {role: block for role, block in blocks.items() if block.get("enable")}
        return reading.settings(overall, enabled), reading.differences
    if steps_0_5 is not None:
        blocks = {role: block for role, at in _BLOCKS_0_5.items() if (block := tree.block(at))}
        discrete = any(block.get("discrete") for block in blocks.values())
        overall = {"tool": "nsys", "steps": steps_0_5, "global_tool_config": {"nsys": {"discrete": discrete}}}
        return reading.settings(overall, blocks), reading.differences
    block, interval = tree.block("profiler"), tree.get("trainer.profile_interval")
    if block is not None and interval is not None:
        return reading.supervised(block, interval), reading.differences
    fix = "pass verl's whole configuration (what its trainer gets), or a mapping with that block"
    raise ConfigError("global_profiler", None, "verl's block of that name (v0.6 and later)", fix)


class _Reading:
    """Builds the settings and keeps what differs."""

    def __init__(self) -> None:
        self.differences: list[str] = []

    def settings(self, overall: Block, enabled: Mapping[str, Block]) -> dict[str, object]:
        tool = self.tool(overall, enabled)
        tools: dict[str, Block] = {
            role: plain((block.get("tool_config") or {}).get(tool) or {}, tool, self.at(role, tool))
            for role, block in enabled.items()
        }
        for name in unknown(overall, enabled, _BLOCKS, tool):
            self.differ(f"{name} is no setting of verl's v0.5 to v0.9, and is left out")
        shared: Block = (overall.get("global_tool_config") or {}).get(tool) or {}
        steps = list(overall.get("steps") or ())
        if steps and not enabled:
            self.differ("no role has profiler.enable, so nothing is captured")
            steps = []
        settings: dict[str, object] = {"steps": steps, "save_path": _save_path(overall.get("save_path"))}
        if tool is not None:
            settings["tool"] = _TOOLS[tool]
        ranks: object = "first"
        if enabled:
            settings["mode"] = self.mode(tools, shared)
            roles = {role: self.role(role, block, tools, tool) for role, block in enabled.items()}
            settings["roles"] = roles
            ranks = next(iter(roles.values()))["ranks"]
            lead = next((tools[role] for role in _TRAINING if role in tools), next(iter(tools.values())))
            if not any(role in tools for role in (*_TRAINING, "*")):
                lead = {key: value for key, value in lead.items() if not key.startswith("step_")}
            settings |= self.options(tool, lead, shared, str(settings["mode"]))
            self.one_section_for_all(tools, lead)
        if overall.get("finish_hook_cmd"):
            settings["finish"] = self.finish(overall, tool, ranks)
        self.left_behind(overall)
        return settings

    def supervised(self, block: Block, interval: Any) -> dict[str, object]:
        """Return the settings of verl's SFT trainer: one block on top, and an interval with its end in it."""
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
        overall = {name: value for name, value in block.items() if name in OVERALL}
        return self.settings({**overall, "steps": steps}, {"*": block} if block.get("enable") else {})

    @staticmethod
    def at(role: str, tool: str | None) -> str:
        return f"{_BLOCKS.get(role, 'profiler')}.tool_config.{tool}"

    def differ(self, text: str) -> None:
        self.differences.append(f"verl's configuration: {text}")

    def tool(self, overall: Block, enabled: Mapping[str, Block]) -> str | None:
        named = {role: block["tool"] for role, block in enabled.items() if block.get("tool")}
        tool = next(iter(named.values()), overall.get("tool"))
        for role, other in named.items():
            if other != tool:
                fix = "give all roles one tool, and make a run per tool"
                raise ConfigError(
                    f"{_BLOCKS.get(role, 'profiler')}.tool", other, f"{tool!r}, as of the other roles", fix
                )
        if named and overall.get("tool") not in (None, tool):
            both = f"global_profiler.tool is {overall['tool']}, and that of the roles is {tool}"
            self.differ(f"{both}, which holds in verl and here")
        if tool is not None and tool not in _TOOLS:
            fix = "use one of these; stepscope has no counterpart of msprobe's precision debugger"
            raise ConfigError("global_profiler.tool", tool, ", ".join(_TOOLS), fix)
        if enabled and tool is None:
            self.differ("global_profiler.tool is null: verl records nothing then, stepscope takes torch")
        return cast("str | None", tool)

    def mode(self, tools: Mapping[str, Block], shared: Block) -> str:
        """One mode for the run: that of the training roles, whose `discrete` does the same as ours."""
        discrete_of = {
            role: bool(tool.get("discrete", shared.get("discrete"))) for role, tool in tools.items()
        }
        training = {role: discrete for role, discrete in discrete_of.items() if role in _TRAINING}
        discrete = any(training.values() if training else discrete_of.values())
        if len(set(training.values())) > 1:
            self.differ(f"discrete differs between roles {training}; there is one mode here: discrete")
        if discrete_of.get("rollout") is False:
            self.differ(
                "rollout has discrete: false, with which verl records no rollout and does not say so; "
                "stepscope records it in both modes"
            )
        return "discrete" if discrete else "continuous"

    def role(
        self, role: str, block: Block, tools: Mapping[str, Block], tool: str | None
    ) -> dict[str, object]:
        ranks = list(block.get("ranks") or ())
        if not block.get("all_ranks") and not ranks:
            self.differ(f"{role}: ranks is empty, which verl reads as rank 0; it is `ranks: first` here")
        settings: dict[str, object] = {"ranks": "all" if block.get("all_ranks") else ranks or "first"}
        if role == "rollout" and not _counts_mini_batches(tools):
            engine = self.engine(tools[role], tool)
            settings |= {"engine": engine} if engine else {}
        return settings

    def engine(self, options: Block, tool: str | None) -> dict[str, object]:
        """Return the options of the rollout's engine."""
        engine: dict[str, object] = {}
        iterations = window(options, self.at("rollout", tool))
        if iterations is not None:
            tokens = any(
                options.get(name) is not None for name in ("profile_token_start", "profile_token_end")
            )
            names = "profile_token_start and profile_token_end" if tokens else "step_start and step_end"
            self.differ(
                f"rollout: {names} count engine iterations in verl too (forward passes), not "
                f"{'tokens' if tokens else 'steps'}; they are engine.iterations here, from the start of the "
                "capture"
            )
            engine["iterations"] = {"start": iterations[0], "count": iterations[1]}
        if options.get("profile_by_stage"):
            engine["by_stage"] = True
        if options.get("merge_profiles"):
            engine["merge"] = True
        return engine

    def options(self, tool: str | None, lead: Block, shared: Block, mode: str) -> dict[str, object]:
        contents = lead.get("contents")
        if contents == [] and tool in ("torch", "npu"):
            does = "CPU and CUDA alone" if tool == "torch" else "no device activity"
            self.differ(
                f"{tool}: contents is empty, which verl documents as everything and where it records {does}; "
                "it is the default here: CPU and device, without stacks, shapes or memory"
            )
        if tool == "torch":
            return {"torch": _torch(list(contents or ()), _schedule(lead), mode)}
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
            self.differ(
                "torch_memory.memory_snapshot_num_steps: a snapshot is written per captured step here"
            )
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
        """Return verl's command as ours, with verl's variables; it knows nothing of stepscope's."""
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

    def left_behind(self, overall: Block) -> None:
        if overall.get("profile_continuous_steps"):
            self.differ(
                "profile_continuous_steps: each captured step has a folder and traces of its own here"
            )


def _save_path(given: object) -> str:
    path = "outputs/profile" if given is None else given
    if not isinstance(path, str):
        raise ConfigError("global_profiler.save_path", given, "the path of a folder", "write a path")
    return os.path.abspath(os.path.expanduser(path))  # verl's is relative to each worker's own folder


def _counts_mini_batches(tools: Mapping[str, Block]) -> bool:
    """Return whether the rollout's block is the actor's, which counts mini-batches (v0.6, v0.7.0)."""
    rollout = tools.get("rollout")
    return rollout is not None and rollout == tools.get("actor") and "contents" not in rollout


def _schedule(lead: Block) -> Block:
    """Return the schedule over mini-batches; up to v0.7.0 `step_start` and `step_end` bound one."""
    start, end = lead.get("step_start"), lead.get("step_end")
    given: Block = lead.get("schedule") or {}
    if given or "contents" in lead or not isinstance(start, int) or not isinstance(end, int):
        return given
    if not 0 <= start < end:
        return given
    return {"wait": max(start - 1, 0), "warmup": min(start, 1), "active": end - start}


def _torch(contents: list[str], schedule: Block, mode: str) -> dict[str, object]:
    settings: dict[str, object] = {option: True for name, option in _CONTENTS.items() if name in contents}
    if contents and "cuda" not in contents:
        settings["activities"] = ["cpu"]  # verl's torch records the CPU whatever `contents` says
    if (schedule.get("active") or 0) > 0:
        names = ("skip_first", "wait", "warmup", "active", "repeat")
        walked = {name: int(schedule.get(name) or 0) for name in names}
        if mode == "continuous":
            walked["repeat"] = walked["repeat"] or 1  # as in verl: one cycle per step
        settings["schedule"] = walked
    return settings


class _Tree:
    """verl's configuration. Only what is asked for is resolved: `${...}` may stand anywhere else."""

    def __init__(self, source: object) -> None:
        if isinstance(source, str | os.PathLike):
            from stepscope.config._yaml import load

            source = load(source, "verl's configuration")
        if not isinstance(source, Mapping) and not _is_omegaconf(source):
            fix = "pass the configuration that verl's trainer gets"
            raise ConfigError("from_verl(source)", source, "a mapping, an OmegaConf, or a YAML file", fix)
        self._root: Any = source

    def get(self, path: str) -> Any:
        """Return the value at `path` as plain data, with references filled in; None if there is none."""
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
