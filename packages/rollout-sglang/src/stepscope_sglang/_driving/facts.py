"""Facts of one SGLang engine: its version, its device, its parallel layout."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stepscope import name_settings
from stepscope.engines.artifacts import Option
from stepscope.files.manifest.settings import Knob, Named, is_number

SETTINGS: Mapping[Knob, tuple[str, bool]] = {
    "cuda_graphs": ("disable_cuda_graph", False),
    "data_parallel": ("dp_size", True),
    "kv_memory": ("mem_fraction_static", True),
    "max_requests": ("max_running_requests", True),
    "mixed_prefill": ("enable_mixed_chunk", True),
    "prefix_caching": ("disable_radix_cache", False),
    "tensor_parallel": ("tp_size", True),
}
"""Knob -> (field of `ServerArgs`, the value that turns it on)."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one engine: one TokenizerManager with its schedulers."""

    version: str | None
    options: frozenset[str]
    """Options that a start of its profiler takes."""
    device: str
    tp: int
    dp: int
    pp: int
    dp_attention: bool
    """The data-parallel ranks share the GPUs of the tensor-parallel ones."""
    sleep_on_idle: bool
    """Otherwise an idle scheduler spins, and every turn is recorded."""
    speculative: bool
    disaggregation: str | None
    """`prefill` or `decode` for a server that does only this."""
    metrics: bool
    """Answers carry times."""
    forced_off: frozenset[str] = frozenset()
    """Options that the engine's environment switches off."""
    profile_v2: bool = False
    """It is known to run SGLang's second profiler (SGLANG_PROFILE_V2)."""
    rpd: bool | None = None
    """The library of the activity RPD is installed where the engine runs; None: unknown."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * (1 if self.dp_attention else self.dp)

    def sidecar(self) -> dict[str, Option]:
        return {
            "device": self.device,
            "tp_size": self.tp,
            "dp_size": self.dp,
            "pp_size": self.pp,
            "dp_attention": self.dp_attention,
            "sleep_on_idle": self.sleep_on_idle,
            "disaggregation_mode": self.disaggregation,
        }


def facts_of(
    settings: Mapping[str, object],
    *,
    version: str | None,
    options: frozenset[str],
    forced_off: frozenset[str] = frozenset(),
    profile_v2: bool = False,
    rpd: bool | None = None,
) -> EngineFacts:
    """Read the facts from an engine's resolved `ServerArgs`, and name its settings for advice."""
    name_settings("sglang", settings_of(settings), version=version, engine=True)
    mode = settings.get("disaggregation_mode")
    return EngineFacts(
        version=version,
        options=options,
        device=str(settings.get("device") or "cuda"),
        tp=_size(settings, "tp_size"),
        dp=_size(settings, "dp_size"),
        pp=_size(settings, "pp_size"),
        dp_attention=bool(settings.get("enable_dp_attention")),
        sleep_on_idle=bool(settings.get("sleep_on_idle")),
        speculative=settings.get("speculative_algorithm") is not None,
        disaggregation=str(mode) if mode in ("prefill", "decode") else None,
        metrics=bool(settings.get("enable_metrics")),
        forced_off=forced_off,
        profile_v2=profile_v2,
        rpd=rpd,
    )


def settings_of(settings: Mapping[str, object]) -> dict[Knob, Named]:
    """Return the settings that advice may name. Other versions lack some."""
    named: dict[Knob, Named] = {}
    for knob, (field, better) in SETTINGS.items():
        value = settings.get(field)
        if field in settings and is_number(value):
            named[knob] = (field, value, better)
    return named


def _size(settings: Mapping[str, object], name: str) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else 1
