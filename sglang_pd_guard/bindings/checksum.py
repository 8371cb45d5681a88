"""An optional checksum of the KV that one rank transfers: prefill's goes into the receipt, decode computes its own.

A weighted sum over 32-bit words, each with an odd weight of its own, modulo 2**64, on the device that holds the KV. One changed word always
changes it; it guards against mistakes, not against a peer that lies. Where prefill and decode shard the KV differently the two are
not of the same words.
"""

from __future__ import annotations

from sglang_pd_guard.bindings.node import slot_of

_MASK = (1 << 63) - 1
_COLUMN, _ROW, _BUFFER = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_TOKENS = 4096  # at a time, so that the copy that is summed stays small


def buffers(scheduler) -> list:
    """The tensors of this rank's KV pool, of shape (token slots, ...).

    Raises:
        TypeError: a pool that has more than one index space, or none that is known.
    """
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for names in (("k_buffer", "v_buffer"), ("kv_buffer",)):
        found = [getattr(pool, name, None) for name in names]
        if all(isinstance(tensors, list | tuple) for tensors in found):
            return [tensor for tensors in found for tensor in tensors]
    raise TypeError(f"--pd-guard-checksum does not know the KV pool {type(pool).__name__}: leave it out on both nodes")


def of_request(scheduler, req, begin: int, end: int) -> int:
    """The checksum, from 1 to 2**63 - 1, of the KV of the request's tokens `begin` to `end`."""
    return of_slots(buffers(scheduler), scheduler.req_to_token_pool.req_to_token[slot_of(req), begin:end])


def of_slots(tensors: list, slots) -> int:
    """The same of the KV in these token slots, in this order."""
    import torch

    total = torch.zeros((), dtype=torch.int64, device=slots.device)
    rows = _odd(torch.arange(len(slots), device=slots.device), _ROW)
    for tensor in tensors:
        part = torch.zeros_like(total)
        for start in range(0, len(slots), _TOKENS):
            some = slots[start : start + _TOKENS]
            words = tensor[some].reshape(len(some), -1).view(torch.uint8)
            if words.shape[1] % 4 == 0:
                words = words.view(torch.int32)
            columns = _odd(torch.arange(words.shape[1], device=slots.device), _COLUMN)
            part += ((words * columns).sum(1) * rows[start : start + _TOKENS]).sum()
        total = total * _signed(_BUFFER) + part
    return int(total.item()) & _MASK or 1


def _odd(count, factor: int):
    return (2 * count + 1) * _signed(factor)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
