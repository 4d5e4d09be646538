"""A platform of verl that runs on CPUs, for tests: VERL_USE_EXTERNAL_MODULES=cpu_platform."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


MODULE = SimpleNamespace(
    current_device=lambda: "cpu",
    device_count=lambda: 1,
    empty_cache=_nothing,
    get_device_name=lambda *args: "CPU",
    get_rng_state=torch.get_rng_state,
    is_available=lambda: True,
    manual_seed=torch.manual_seed,
    max_memory_allocated=lambda *args: 0,
    max_memory_reserved=lambda *args: 0,
    mem_get_info=lambda *args: (0, 0),
    memory_allocated=lambda *args: 0,
    memory_reserved=lambda *args: 0,
    reset_peak_memory_stats=_nothing,
    set_device=_nothing,
    set_rng_state=torch.set_rng_state,
    synchronize=_nothing,
)
ANSWERS: dict[str, Any] = {
    "communication_backend_name": "gloo",
    "cudart": None,
    "current_device": "cpu",
    "device_count": 1,
    "get_device_capability": (None, None),
    "is_available": True,
    "is_ipc_supported": False,
    "is_platform_available": True,
    "ray_noset_envvars": [],
    "ray_resource_name": "CPU",
    "ray_resource_options": {"num_cpus": 1},
    "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
}
"""By name of a method: what it gives."""
SILENT = (
    "empty_cache",
    "manual_seed",
    "manual_seed_all",
    "profiler_start",
    "profiler_stop",
    "set_allocator_settings",
    "set_device",
    "synchronize",
)


def _always(answer: Any) -> Any:
    return lambda self, *args, **kwargs: answer


PlatformCPU = PlatformRegistry.register(platform="cpu")(
    type(
        "PlatformCPU",
        (PlatformBase,),
        {
            "device_name": property(lambda self: "cpu"),
            "vendor_name": property(lambda self: "none"),
            "device_module": property(lambda self: MODULE),
            "nvtx_range": lambda self, message: nullcontext(),
            **{name: _always(answer) for name, answer in ANSWERS.items()},
            **{name: _always(None) for name in SILENT},
        },
    )
)
