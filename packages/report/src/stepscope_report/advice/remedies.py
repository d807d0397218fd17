"""Settings that the rules of advice suggest to change, with the new value and the predicted saving.

`REMEDIES` lists the knobs of each rule. A knob is the name that frameworks share for a setting of the same
meaning; a step's manifest has the framework's own name and the present value. A new value is suggested only
if a measured number leads to it. Otherwise the advice states only a direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import NamedTuple

from stepscope.files.counters import KV_CACHE
from stepscope.files.manifest import Knob, Setting, Value
from stepscope_report.advice import FULL, Direction, Evidence, SettingChange
from stepscope_report.whatif.changes import Options
from stepscope_report.whatif.prediction import Saving

_MULTIPLE = 8
"""A suggested number of requests is rounded to a multiple of this number if it is at least twice this
number."""
_MOST_MEMORY = 0.95
_CUT_TAIL = Options(cut_tail="p90")
"""What-if change for the rule `long-tail`: the step does not wait for the last tenth of the trajectories."""


class Case(NamedTuple):
    """A step, and the process in it, for which advice is given."""

    evidence: Evidence
    process: str | None
    """The process that the advice is about, or None."""

    def number(self, knob: Knob) -> float | None:
        """Return the present value of a knob, or None if it is unknown or not a number."""
        located = self.evidence.settings.get(knob)
        value = None if located is None else located.setting.value
        return value if isinstance(value, (int, float)) else None

    def is_on(self, knob: Knob) -> bool:
        return self.number(knob) is True


class Remedy(NamedTuple):
    """A change of a knob that a rule suggests."""

    knob: Knob
    direction: Direction
    value: Callable[[Case, Setting], float | None] = lambda case, setting: None
    """Function that returns the value to which measured numbers lead, or None. A value that is not in
    `direction` means that the setting is not the cause."""
    options: Options | Callable[[Case, float], Options | None] | None = None
    """The corresponding change for what-if, or a function that returns it for the suggested value. None if
    what-if cannot make this change."""
    applies: Callable[[Case], bool] = lambda case: True


def changes(rule: str, evidence: Evidence, process: str | None = None) -> tuple[SettingChange, ...]:
    """Return the settings that a rule suggests to change.

    Args:
        rule: A key of `REMEDIES`. The result is empty for other rules.
        process: Name of the process that the advice is about, for settings of memory. Otherwise None.
    """
    case = Case(evidence, process)
    made = (_change(remedy, case) for remedy in REMEDIES.get(rule, ()))
    return tuple(change for change in made if change is not None)


def _change(remedy: Remedy, case: Case) -> SettingChange | None:
    """Return the change, or None if the setting is unknown or not the cause."""
    located = case.evidence.settings.get(remedy.knob)
    if located is None or not remedy.applies(case):
        return None
    setting = located.setting
    suggested = setting.better if remedy.direction == "on" else remedy.value(case, setting)
    if not _is_a_change(remedy.direction, setting.value, suggested):
        return None
    saving = _saving(remedy, case, setting, suggested)
    return SettingChange(
        framework=located.framework.framework,
        version=located.framework.version,
        setting=setting.name,
        present=setting.value,
        suggested=suggested,
        direction=remedy.direction,
        predicted_saving_ns=None if saving is None else saving.saving_ns,
        error_ns=None if saving is None else saving.error_ns,
    )


def _is_a_change(direction: Direction, present: Value, suggested: Value) -> bool:
    if direction == "on":
        return suggested is not None
    if not (isinstance(present, (int, float)) and isinstance(suggested, (int, float))):
        return True
    return suggested > present if direction == "higher" else suggested < present


def _saving(remedy: Remedy, case: Case, setting: Setting, suggested: Value) -> Saving | None:
    if suggested is None:
        return None
    number = suggested if isinstance(suggested, (int, float)) else 0
    options = remedy.options(case, number) if callable(remedy.options) else remedy.options
    saving = None if options is None else case.evidence.what_if(options)
    return saving if saving is not None and saving.saving_ns > 0 else None


# Values.


def _requests_that_fit(case: Case, setting: Setting) -> int | None:
    fit = case.evidence.demand.fitting_requests
    if fit is None or not _has_one_engine(case):
        return None
    return fit if fit < 2 * _MULTIPLE else fit // _MULTIPLE * _MULTIPLE


def _requests_at_once(case: Case, setting: Setting) -> int | None:
    """Return the largest number of requests that one replica had at once, limited to what its KV cache can
    hold. None if unknown.
    """
    wanted, present = case.evidence.demand.requests_at_once, setting.value
    if wanted is None or not _has_one_engine(case):
        return None
    if wanted >= 2 * _MULTIPLE:
        wanted = ceil(wanted / _MULTIPLE) * _MULTIPLE
    used = max((row.most for row in case.evidence.counter_rows if row.name == KV_CACHE), default=0)
    if used and isinstance(present, int):
        wanted = min(wanted, int(present * FULL / used))
    return wanted


def _has_one_engine(case: Case) -> bool:
    """Return True if each replica has one engine. Otherwise the counters are sums over engines, and cannot be
    compared with a limit of one engine.
    """
    return (case.number("data_parallel") or 1) == 1


def _one_more(case: Case, setting: Setting) -> int | None:
    return setting.value + 1 if isinstance(setting.value, int) else None


def _one_engine_more(case: Case, setting: Setting) -> float | None:
    size = case.number("tensor_parallel")
    return setting.value + size if isinstance(setting.value, int) and size else None


def _a_ninth_more(case: Case, setting: Setting) -> int | None:
    """Return a number of prompts of which nine tenths are one batch."""
    batch = case.number("rollout_batch")
    return None if batch is None else ceil(batch * 10 / 9)


def _twice(case: Case, setting: Setting) -> int | None:
    """Return twice the present value. None if twice the peak would not fit into the memory of the process'
    device.
    """
    part = _part_of_memory(case)
    fits = isinstance(setting.value, int) and part is not None and 2 * part <= _MOST_MEMORY
    return 2 * int(setting.value or 0) if fits else None


def _half(case: Case, setting: Setting) -> int | None:
    return max(1, setting.value // 2) if isinstance(setting.value, int) else None


def _part_of_memory(case: Case) -> float | None:
    """Return the largest share (0 to 1) of a device's memory that the process reserved. None if unknown."""
    rows = [row for row in case.evidence.memory if row.process == case.process]
    return max((row.reserved_bytes / row.capacity_bytes for row in rows if row.capacity_bytes), default=None)


# Changes of what-if.


def _tool_pool(case: Case, suggested: float) -> Options | None:
    present = case.number("tool_pool")
    return Options(tool_pool=f"x{suggested / present:.3f}") if present else None


def _more_requests(case: Case, suggested: float) -> Options | None:
    return Options(max_requests=str(int(suggested)))


def _cut_tail_alone(case: Case, suggested: float) -> Options | None:
    """Return `_CUT_TAIL`. None if the framework needs another setting to begin more trajectories than a batch
    has.
    """
    return None if "oversampling" in case.evidence.settings else _CUT_TAIL


# Conditions.


def _has_own_devices(case: Case) -> bool:
    return not case.is_on("colocated")


def _packs_tokens(case: Case) -> bool:
    return case.is_on("dynamic_batch")


def _counts_samples(case: Case) -> bool:
    return not case.is_on("dynamic_batch")


def _has_several_devices(case: Case) -> bool:
    return (case.number("tensor_parallel") or 2) > 1


def _may_have_a_device(case: Case) -> bool:
    return not case.evidence.profiling.on_cpu


def _has_memory_left(case: Case) -> bool:
    return (case.number("kv_memory") or 0) < _MOST_MEMORY


_MORE_REQUESTS = Remedy("max_requests", "higher", _requests_at_once, _more_requests)
_MORE_REPLICAS = (
    Remedy("replicas", "higher", _one_more, Options(replicas="+1"), _has_own_devices),
    Remedy("rollout_devices", "higher", _one_engine_more, Options(replicas="+1"), _has_own_devices),
)
_MORE_TOOLS = Remedy("tool_pool", "higher", lambda case, _: case.evidence.demand.tools_at_once, _tool_pool)
_MORE_TRAJECTORIES = Remedy("trajectories", "higher")
_EVEN_BATCHES = (Remedy("balance_batch", "on"), Remedy("dynamic_batch", "on"))

REMEDIES: Mapping[str, tuple[Remedy, ...]] = {
    "collectives: rollout": (Remedy("tensor_parallel", "lower", applies=_has_several_devices),),
    "collectives: training": (Remedy("overlap_gradients", "on"),),
    "collectives: late": _EVEN_BATCHES,
    "full-kv-cache": (
        Remedy("max_requests", "lower", _requests_that_fit),
        Remedy("kv_memory", "higher", applies=_has_memory_left),
    ),
    "idle-device: rollout": (Remedy("cuda_graphs", "on"),),
    "idle-device: training": (
        Remedy("micro_batch", "higher", _twice, applies=_counts_samples),
        Remedy("micro_tokens", "higher", _twice, applies=_packs_tokens),
    ),
    "idle-while-tools-run": (_MORE_TOOLS, _MORE_TRAJECTORIES),
    "late-event-loop: agent_loop": (Remedy("agent_workers", "higher"),),
    "late-event-loop: reward": (Remedy("reward_workers", "higher"),),
    "long-tail: generation": (
        Remedy("oversampling", "higher", _a_ninth_more, _CUT_TAIL),
        Remedy("partial_rollout", "on", options=_cut_tail_alone),
        Remedy("async_rollout", "on", options=Options(staleness=1), applies=_has_own_devices),
        Remedy("response_length", "lower"),
    ),
    "long-tail: later": (_MORE_TRAJECTORIES,),
    "long-tail: queue": (_MORE_REQUESTS, *_MORE_REPLICAS),
    "long-tail: reward": (Remedy("reward_workers", "higher"),),
    "long-tail: tool": (_MORE_TOOLS,),
    "memory-nearly-full: rollout": (Remedy("kv_memory", "lower"),),
    "memory-nearly-full: training": (
        Remedy("micro_batch", "lower", _half, applies=_counts_samples),
        Remedy("micro_tokens", "lower", applies=_packs_tokens),
        Remedy("checkpointing", "on"),
    ),
    "prefill-alone": (Remedy("prefix_caching", "on"), Remedy("mixed_prefill", "on")),
    "queueing": (_MORE_REQUESTS, *_MORE_REPLICAS),
    "slow-tools": (_MORE_TOOLS,),
    "straggler: rollout": (Remedy("balance_requests", "on", options=Options(balance="load")),),
    "straggler: training": _EVEN_BATCHES,
    "weight-sync": (
        Remedy("fast_weights", "on", applies=_may_have_a_device),
        Remedy("weight_bucket", "higher"),
    ),
}
"""Changes of knobs by rule, with the case of the rule after a colon."""
