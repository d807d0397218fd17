"""CPU platform for verl 0.9.1. verl loads it: VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu.

No file of verl is edited. Each patch below names the place in verl that takes an accelerator for granted.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch
import wrapt
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NOTHING = (
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "set_device",
)
MEMORY = (
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
    "current_device",
)


def device_module() -> ModuleType:
    """Return `torch.cpu` with the functions that verl asks of any device."""
    device: Any = ModuleType("torch_cpu")
    vars(device).update((name, value) for name, value in vars(torch.cpu).items() if not name.startswith("__"))
    for name in NOTHING:
        setattr(device, name, lambda *_, **__: None)
    for name in MEMORY:
        setattr(device, name, lambda *_, **__: 0)
    device.device_count = lambda: 1
    device.is_available = lambda: True
    device.get_device_name = lambda *_: "cpu"
    device.mem_get_info = lambda *_: (1 << 33, 1 << 34)
    device.manual_seed = device.manual_seed_all = torch.manual_seed
    device.get_rng_state = lambda *_: torch.get_rng_state()
    device.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    return device  # type: ignore[no-any-return]  # Any above: a module takes any attribute


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):  # type: ignore[misc]  # verl has no types
    """The platform of one CPU, as one device."""

    device_name = vendor_name = "cpu"
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # for verl's `tensor.to(get_device_id())`, where 0 would be cuda:0

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def ray_resource_name(self) -> str:
        return "GPU"  # of ray.init(num_gpus=1): Ray does not look whether there is one

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_ipc_supported(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def nothing(self, *_: object) -> None:
        """Do nothing, where a CPU has nothing to do."""

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing


@wrapt.patch_function_wrapper("torch.distributed", "init_process_group")
def init_process_group(theirs: Any, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Name one backend: verl/utils/distributed.py asks for "cpu:gloo,cpu:gloo", which torch refuses."""
    if kwargs.get("backend") == "cpu:gloo,cpu:gloo":
        kwargs["backend"] = "cpu:gloo"
    theirs(*args, **kwargs)


@wrapt.patch_function_wrapper("torch", "Tensor.pin_memory")
def pin_memory(_: object, tensor: torch.Tensor, __: object, ___: object) -> torch.Tensor:
    """Return the tensor itself: verl/workers/engine/fsdp offloads the reference with pinned memory."""
    return tensor


@wrapt.when_imported("vllm.v1.engine.async_llm")
def follow_renamed_argument(module: Any) -> None:
    """Rename an argument of `pause_generation`: verl 0.9.1 was written for vLLM 0.24."""

    @wrapt.patch_function_wrapper(module, "AsyncLLM.pause_generation")
    def pause(theirs: Any, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "wait_for_inflight_requests" in kwargs:
            kwargs["mode"] = "wait" if kwargs.pop("wait_for_inflight_requests") else "abort"
        return theirs(*args, **kwargs)
