"""SGLang's paged KV allocator without Triton, for releases that know no other way (up to 0.5.21).

Later releases run ``alloc_extend_naive`` by themselves where a platform has no Triton; here the two kernels that the
allocator launches are replaced by callables of the same shape, so that the allocator itself stays SGLang's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


class _Launch:
    """Stands in for a Triton kernel: ``kernel[grid](*args)`` calls a function."""

    def __init__(self, function: Callable[..., None]):
        self._function = function

    def __getitem__(self, grid):
        return self._function


def _padded(free_pages: torch.Tensor, at_least: int) -> torch.Tensor:
    """The free pages, with page 0 appended until there are enough.

    The kernels run before the allocator checks that the pool is large enough: where it is not, it throws the result
    away, so what is written then is of no account, but it must not raise.
    """
    missing = at_least - free_pages.numel()
    return torch.cat([free_pages, free_pages.new_zeros(missing)]) if missing > 0 else free_pages


def _extend_with(naive: Callable[..., None]) -> Callable[..., None]:
    def extend(prefix_lens, seq_lens, last_loc, free_pages, out, bs, page_size, *_, **__):
        pages = _padded(free_pages, out.numel() // page_size + 2 * len(seq_lens))
        naive(prefix_lens, seq_lens, last_loc, pages, out, page_size, out.device)

    return extend


def _decode(seq_lens, last_loc, free_pages, out, bs, page_size, *_, **__):
    """One more token for each sequence: the next slot, or a fresh page for those whose last page is full."""
    pages = _padded(free_pages, len(seq_lens))
    wants_page = (seq_lens - 1) % page_size == 0
    rank = torch.cumsum(wants_page, 0) - wants_page.long()
    out.copy_(torch.where(wants_page, pages[rank] * page_size, last_loc + 1))


def paged_allocator_cls() -> type:
    """SGLang's own paged allocator, made to run without Triton."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    module = sys.modules[PagedTokenToKVPoolAllocator.__module__]
    module.alloc_extend_kernel = _Launch(_extend_with(module.alloc_extend_naive))
    module.alloc_decode_kernel = _Launch(_decode)
    return PagedTokenToKVPoolAllocator
