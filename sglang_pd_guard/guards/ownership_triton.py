"""`Tables.check` as one Triton kernel, for devices that have Triton. One program looks at one reader's pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _look(entries, stride, slots, lengths, tags, pages, owners, prefixes, totals, out, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    reader, batch = tl.program_id(0), tl.num_programs(0)
    slot = tl.load(slots + reader)
    count = tl.cdiv(tl.load(lengths + reader), PAGE)
    owner, prefix = tl.load(owners + slot), tl.load(prefixes + slot)
    row = entries + slot * stride
    total = tl.zeros((), tl.int64)
    first = tl.full((), _NONE, tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        live = place < count
        entry = tl.load(row + place * PAGE, mask=live, other=0)
        page = entry // PAGE
        found = tl.load(tags + page, mask=live & (entry >= 0) & (page <= pages), other=0)
        shared = live & (place < prefix)
        total += tl.sum(tl.where(shared, found, 0))
        first = tl.minimum(first, tl.min(tl.where(live & (place >= prefix) & (found != owner), place, _NONE)))
    wrong = first != _NONE
    entry = tl.load(row + tl.where(wrong, first, 0) * PAGE)
    seen = tl.load(tags + entry // PAGE, mask=(entry >= 0) & (entry // PAGE <= pages), other=0)
    tl.store(out + reader, (wrong | (total != tl.load(totals + slot))).to(tl.int64))
    tl.store(out + batch + reader, tl.where(wrong, first, -1))
    tl.store(out + 2 * batch + reader, seen)


def check(tables, req_to_token: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """See `Tables.check`; the longest length is not needed."""
    out = torch.empty(3, len(slots), dtype=torch.int64, device=slots.device)
    _look[(len(slots),)](
        req_to_token, req_to_token.stride(0), slots, lengths, tables.tags, len(tables.tags) - 2, tables.owner, tables.prefix, tables.total, out,
        PAGE=tables.page_size, BLOCK=_BLOCK,
    )  # fmt: skip
    return out
