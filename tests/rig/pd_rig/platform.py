"""An out-of-tree SGLang platform that runs the whole server on plain PyTorch for CPU.

SGLang's own CPU engine needs kernels that are not in the wheel; its platform interface allows a device of one's own,
and every layer falls back to its native PyTorch form on it. Chosen by ``SGLANG_PLATFORM=cpu_rig``.
"""

from __future__ import annotations

from multiprocessing import context

import psutil
import torch
from packaging.version import Version
from sglang.srt.platforms import interface
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from sglang.version import __version__ as sglang_version

from pd_rig import torch_cpu


class CpuRigPlatform(SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device=None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, local_rank: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device) -> None:
        pass

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0):
        return None

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def support_cuda_graph(self) -> bool:
        return False

    def support_piecewise_cuda_graph(self) -> bool:
        return False


class LegacyCpuRigPlatform(CpuRigPlatform):
    """For releases without ``PlatformCapabilities`` (up to 0.5.21), where a platform must name its pool classes."""

    def get_paged_allocator_cls(self) -> type:
        from pd_rig.allocator_cpu import paged_allocator_cls

        return paged_allocator_cls()

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool


def _give_included_routers_a_path() -> None:
    """SGLang's metrics middleware, before 0.5.18, reads ``path`` from whatever route matches.

    In the FastAPI of the rig an included router is such a route and has none, so that ``/v1/loads`` answered 500.
    """
    from fastapi import routing

    included = getattr(routing, "_IncludedRouter", None)
    if included is not None and not hasattr(included, "path"):
        included.path = ""


def _fork_the_detokenizer() -> None:
    """SGLang spawns its processes, and each imports everything anew: ten seconds of a core. Schedulers stay so, for a guard must get into
    them; the detokenizer, where no guard runs, is forked instead.
    """
    spawn = context.Process._Popen

    def popen(process):
        is_detokenizer = getattr(process._target, "__name__", "") == "run_detokenizer_process"
        return (context.ForkProcess._Popen if is_detokenizer else spawn)(process)

    context.Process._Popen = staticmethod(popen)


def activate() -> str:
    """Entry point of the group ``sglang.srt.platforms``: prepare PyTorch, name the platform class."""
    torch_cpu.install()
    _fork_the_detokenizer()
    if Version(sglang_version) < Version("0.5.18"):
        _give_included_routers_a_path()
    platform = CpuRigPlatform if hasattr(interface, "PlatformCapabilities") else LegacyCpuRigPlatform
    return f"{platform.__module__}.{platform.__qualname__}"
