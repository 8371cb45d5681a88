"""Ownership: before attention reads a KV page, the page's tag must be the one that its reader may read.

Each page of the pool has a 64-bit tag, on the pool's device:

    0                      free
    owner, low bit clear   given to this request slot, and its KV not there yet (a transfer is to bring it)
    owner, low bit set     given to this request slot and written: by a forward pass of this node, or by a transfer
                           whose receipt says so
    negative               content: the page may be read by whoever has these tokens, from the prompt's start to the page's
                           end (with the same adapter and cache salt)

An owner names one use of one request slot; the next use of the slot has another. A page takes its content tag when its request
offers it to the prefix cache, in place, and keeps it until it is freed. A reader presents its owner for its own
pages, and for the prefix that it took from the cache the sum of the content tags of its own tokens: it cannot present a
prefix that it does not have, and one page freed, given away or replaced since changes the sum.

The tables are tensors of a fixed size: 8 bytes for each page, 20 for each request slot. Every function here queues
work on the device and waits for nothing.

Pure: nothing here imports SGLang.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Sequence

import numpy
import torch

_SLOT_BITS = 24
_SIGN = -(1 << 63)
_POSITION, _TOKEN = numpy.uint64(0x9E3779B97F4A7C15), numpy.uint64(0xC2B2AE3D27D4EB4F)

#: What a reader found in place of a page of its own.
FREED, UNWRITTEN, FOREIGN, STALE = "freed", "unwritten", "foreign", "stale"


def owner_of(slot: int, use: int) -> int:
    """The tag of the pages of request slot `slot` in its `use`-th use, written."""
    return (use << _SLOT_BITS | slot + 1) << 1 | 1


def rule(found: int, owner: int) -> str:
    """What is wrong with a page whose tag is `found` and should be `owner`."""
    if found == 0:
        return FREED
    if found == owner - 1:
        return UNWRITTEN
    same_slot = found > 0 and (found ^ owner) >> 1 & (1 << _SLOT_BITS) - 1 == 0
    return STALE if same_slot else FOREIGN


class Content:
    """The content tags of one request's tokens, page by page, computed as far as they are asked for.

    A tag is a hash of the set of (position, token) pairs from the first token to the page's end, keyed by a
    secret of this process.

    Args:
        page_size: tokens of a page.
        secret: 64 bits.
        seed: 64 bits that stand for what else the KV depends on: adapter and cache salt.
    """

    def __init__(self, page_size: int, secret: int, seed: int):
        self._page_size = page_size
        self._secret = numpy.uint64(secret)
        self._last = numpy.uint64(seed)
        self._tags = numpy.empty(0, numpy.int64)

    def tags(self, tokens: Sequence[int], pages: int) -> numpy.ndarray:
        """int64, shape (pages,).

        Args:
            tokens: the request's, at least ``pages * page_size`` of them, and the same as before as far as they were there.
        """
        have = len(self._tags)
        if pages > have:
            begin, end = have * self._page_size, pages * self._page_size
            some = numpy.frombuffer(array("q", tokens[begin:end]), numpy.uint64)
            with numpy.errstate(over="ignore"):
                place = _mix(numpy.arange(begin, end, dtype=numpy.uint64) * _POSITION + self._secret)
                sums = _mix(some * _TOKEN ^ place).reshape(-1, self._page_size).sum(1, dtype=numpy.uint64)
                sums[0] += self._last
                sums = numpy.cumsum(sums, dtype=numpy.uint64)
                new = _mix(sums ^ self._secret).view(numpy.int64) | numpy.int64(_SIGN)
            self._last = sums[-1]
            self._tags = numpy.concatenate([self._tags, new])
        return self._tags[:pages]


def _mix(words: numpy.ndarray) -> numpy.ndarray:
    """The finalizer of splitmix64, on uint64."""
    words = (words ^ words >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    return words ^ words >> numpy.uint64(31)


@dataclasses.dataclass(frozen=True)
class Tables:
    """The tags of one KV pool and what each request slot may read, on the pool's device.

    Args:
        tags: int64, shape (pages + 2,): by page, 0 being SGLang's page for padding; the last entry takes what is for no page.
        owner: int64, shape (slots,): the owner in this use of the slot.
        prefix: int32, shape (slots,): pages at the prompt's start that have content tags.
        total: int64, shape (slots,): the sum of these content tags, modulo 2**64.
        page_size: tokens of a page.
    """

    tags: torch.Tensor
    owner: torch.Tensor
    prefix: torch.Tensor
    total: torch.Tensor
    page_size: int

    @classmethod
    def for_pool(cls, pages: int, slots: int, page_size: int, device) -> Tables:
        words = {"dtype": torch.int64, "device": device}
        return cls(
            torch.zeros(pages + 2, **words),
            torch.ones(slots, **words),  # nobody, and no page has that tag
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, **words),
            page_size,
        )

    def occupy(self, slots: torch.Tensor, owners: torch.Tensor) -> None:
        """New uses of request slots. Both int64, shape (n,)."""
        self.owner[slots] = owners
        self.prefix[slots] = 0
        self.total[slots] = 0

    def grant(self, locations: torch.Tensor, slots: torch.Tensor, *, written: bool) -> None:
        """An allocator has given these token slots to these request slots. Both int64, shape (n,).

        A page is new with its first token.
        """
        page = torch.where(locations % self.page_size == 0, locations // self.page_size, len(self.tags) - 1)
        self.tags[page] = self.owner[slots] - (0 if written else 1)

    def spoil(
        self, locations: torch.Tensor, slots: torch.Tensor, wrong: torch.Tensor, tainted: torch.Tensor
    ) -> torch.Tensor:
        """A forward pass writes to these token slots for these request slots, some of which read what is not theirs.

        Args:
            wrong: bool, shape (n,): writes of such a reader. Those to pages that are not its own are returned.
            tainted: those of them that depend on what is not theirs: their pages count as not written from then on, and never take
                a content tag.
        """
        pages, owners = locations // self.page_size, self.owner[slots]
        mine = self.tags[pages] == owners
        self.tags[torch.where(tainted & mine, pages, len(self.tags) - 1)] = owners - 1
        return wrong & ~mine

    def written(self, pages: torch.Tensor, slot: int) -> None:
        """A transfer has brought these pages, int64 of shape (n,), to the request in `slot`."""
        owner, found = self.owner[slot], self.tags[pages]
        self.tags[pages] = torch.where(found == owner - 1, owner, found)

    def share(self, pages: torch.Tensor, content: torch.Tensor, slot: int) -> None:
        """The request in `slot` offers the first n pages of its prompt to the prefix cache. Both int64, shape (n,)."""
        found = self.tags[pages]
        self.tags[pages] = torch.where(found == self.owner[slot], content, found)
        self.borrow(content, slot)

    def borrow(self, content: torch.Tensor, slot: int) -> None:
        """The request in `slot` may read a prefix with these content tags, int64 of shape (n,)."""
        self.prefix[slot] = len(content)
        self.total[slot] = content.sum()

    def free(self, pages: torch.Tensor) -> None:
        self.tags[pages] = 0

    def check(self, req_to_token: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, longest: int | None = None) -> torch.Tensor:
        """Compares the tags of all pages that a batch reads with what its readers may read.

        Args:
            req_to_token: int32, shape (slots, context): SGLang's map; of each page, its first token's entry is read.
            slots: int64, shape (batch,): the readers' request slots.
            lengths: int64, shape (batch,): tokens that each reads.
            longest: the largest of them, or more; without it, a device that has no Triton is waited for.

        Returns:
            int64, shape (3, batch): 1 where a reader may not read what it is about to, else 0; the place in its row of the first page
            beyond the prefix that is not its own (-1: the prefix is at fault), and that page's tag.
        """
        if self.tags.is_cuda and (kernel := _triton()) is not None:
            return kernel.check(self, req_to_token, slots, lengths)
        if longest is None or self.tags.device.type == "cpu":
            longest = int(lengths.max())
        count = -(-longest // self.page_size)
        entries = req_to_token[:, : count * self.page_size : self.page_size].index_select(0, slots)
        pages = self._pages(entries)
        found = self.tags.index_select(0, pages.flatten()).view(pages.shape)
        place = torch.arange(count, dtype=torch.int32, device=found.device)
        live = place < torch.div(lengths + self.page_size - 1, self.page_size, rounding_mode="floor").unsqueeze(1)
        prefix = self.prefix[slots].unsqueeze(1)
        wrong = live & (place >= prefix) & (found != self.owner[slots].unsqueeze(1))
        if found.device.type == "cpu" and not wrong.any() and not prefix.any():  # nothing there is asynchronous, so asking is cheap
            return torch.zeros(3, len(slots), dtype=torch.int64)
        swapped = torch.where(live & (place < prefix), found, 0).sum(1) != self.total[slots]
        first = wrong.to(torch.int8).argmax(1)
        any_wrong = wrong.any(1)
        seen = found.gather(1, first.unsqueeze(1)).squeeze(1)
        return torch.stack([(any_wrong | swapped).long(), torch.where(any_wrong, first, -1), seen])

    def _pages(self, tokens: torch.Tensor) -> torch.Tensor:
        """The pages of these token slots; where that is no page at all, the one for padding, which is no reader's."""
        pages = torch.div(tokens, self.page_size, rounding_mode="floor")
        return torch.where((pages < 0) | (pages > len(self.tags) - 2), 0, pages)

    def check_planned(self, tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
        """The same for a backend that plans which token slots it reads: compares each of them, not only each page's first.

        Args:
            tokens: int, shape (total or more,): the token slots that the readers read from their first token on, one reader after
                the other.
            slots: int, shape (batch or more,): as for `check`.
            lengths: int, shape (batch,): tokens that each reads, which may be less than its prefix.
            total: the sum of `lengths`, or more.

        Returns:
            bool, shape (batch,): where a reader may not read what is planned for it.
        """
        slots, lengths, size = slots[: len(lengths)].long(), lengths.long(), self.page_size
        ends, place = lengths.cumsum(0), torch.arange(min(total, len(tokens)), device=tokens.device)
        reader = torch.searchsorted(ends, place, right=True)
        live = reader < len(slots)
        reader = reader.clamp(max=len(slots) - 1)
        place = place - (ends - lengths)[reader]
        tokens = tokens[: len(place)].long()
        pages = self._pages(tokens)
        found, within = self.tags[pages], place < self.prefix[slots].long()[reader] * size
        begins = place % size == 0
        page_of_first = pages[torch.arange(len(pages), device=pages.device) - torch.where(live, place % size, 0)]
        torn = (tokens % size != place % size) | (pages != page_of_first)
        wrong = live & (torn | (~within & (found != self.owner[slots][reader])))
        sums = torch.zeros_like(ends).index_add_(0, reader, torch.where(live & within & begins, found, 0))
        whole = lengths >= self.prefix[slots].long() * size
        count = torch.zeros_like(ends).index_add_(0, reader, wrong.long())
        return (count > 0) | (whole & (sums != self.total[slots]))


@functools.cache
def _triton():
    """The kernel's module, or None on a device that has no Triton."""
    try:
        from sglang_pd_guard.guards import ownership_triton
    except ImportError:
        return None
    return ownership_triton
