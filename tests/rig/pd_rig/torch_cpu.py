"""CPU stand-ins for what SGLang asks of ``torch.cuda`` on paths that a CPU run takes as well.

SGLang's prefill scheduler records a CUDA event before it hands pages to the transfer engine, and several places ask
for pinned host memory without asking whether there is a device to pin for. Both raise where CUDA is absent.
"""

from __future__ import annotations

import functools

import torch

_FACTORIES = ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like", "arange")


class CpuEvent:
    """An event on a device that runs everything in order: it has always happened already."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None) -> None:
        pass

    def wait(self, stream=None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event) -> float:
        return 0.0


def _without_pinning(factory):
    @functools.wraps(factory)
    def create(*args, **kwargs):
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def install() -> None:
    """Put the stand-ins in place, once; nothing is touched where CUDA works."""
    if torch.cuda.is_available() or torch.cuda.Event is CpuEvent:
        return
    for name in _FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.cuda.Event = CpuEvent
    torch.cuda.current_stream = lambda device=None: torch.cpu.current_stream()
