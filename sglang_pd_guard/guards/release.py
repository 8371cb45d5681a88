"""Release: pages of a failed transfer stay where they are until nobody can write to them any more.

One-sided writes cannot be recalled. `Holds` is decode's ledger: which requests wait, and for whose word. `Writes` is
prefill's: which rooms have writes that are queued or under way, so that it can give that word.

A hold's life::

    held ---- every prefill rank has said that its writes ended ----> released
      |                                                                  ^
      +-- a rank cannot know, or does not answer in time --> quarantined +
                                                  a late word, or the rank's process is gone

No timer leads to released. Pure: nothing here imports SGLang. Thread-safe: scheduler, control and transfer threads call it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

from sglang_pd_guard.guards.admission import Endpoint, Verdict

#: Blocks in one write. Mooncake's TCP transport rejects a write of several thousand ("TCP lane queue-full").
MAX_BLOCKS = 1024


@dataclasses.dataclass
class _Hold:
    pages: int
    since: float
    waits_for: set[Endpoint]
    quarantined: bool = False


class Holds:
    """decode's ledger of failed transfers, one entry for each, by the nonce of its request.

    Bounded by the pool: every entry holds a request slot and its pages.

    Args:
        patience: seconds after which a hold without every word counts as quarantined.
    """

    def __init__(self, patience: float = 30.0):
        self._patience = patience
        self._lock = threading.Lock()
        self._holds: dict[int, _Hold] = {}

    def hold(self, nonce: int, pages: int, writers: Iterable[Endpoint], now: float) -> None:
        """Pages reserved for request `nonce`, to which the prefill ranks `writers` may write, are to be given back once they
        cannot. Again for the same request: no change.
        """
        with self._lock:
            self._holds.setdefault(nonce, _Hold(pages, now, set(writers)))

    def drained(self, nonce: int, writer: Endpoint) -> bool:
        """`writer` says that its writes for request `nonce` have ended. False where nobody waits for that."""
        with self._lock:
            hold = self._holds.get(nonce)
            if hold is None or writer not in hold.waits_for:
                return False
            hold.waits_for.discard(writer)
            return True

    def unknown(self, nonce: int, writer: Endpoint) -> None:
        """`writer` says that it cannot know whether its writes have ended."""
        with self._lock:
            hold = self._holds.get(nonce)
            if hold is not None and writer in hold.waits_for:
                hold.quarantined = True

    def gone(self, writer: Endpoint) -> None:
        """The process behind `writer` has ended, and its transfer session with it."""
        with self._lock:
            for hold in self._holds.values():
                hold.waits_for.discard(writer)

    def missing(self, nonce: int) -> frozenset[Endpoint]:
        """Whose word is missing for request `nonce`. Once nobody's is, nobody writes to its pages any more: then `release` it."""
        with self._lock:
            hold = self._holds.get(nonce)
            return frozenset(hold.waits_for if hold is not None else ())

    def quarantined(self, nonce: int, now: float) -> bool:
        """Whether a word is missing for request `nonce` and has been for too long, or its writer cannot know."""
        with self._lock:
            hold = self._holds.get(nonce)
            if hold is None or not hold.waits_for:
                return False
            hold.quarantined |= now - hold.since > self._patience
            return hold.quarantined

    def release(self, nonce: int, now: float) -> float:
        """The pages go back to the pool. Returns the seconds they were held.

        Raises:
            KeyError: there is no such hold, or no longer.
            ValueError: someone may still write to them.
        """
        with self._lock:
            if self._holds[nonce].waits_for:
                raise ValueError(f"pages of {nonce} wait for {self._holds[nonce].waits_for}")
            return now - self._holds.pop(nonce).since

    def pages(self) -> dict[str, int]:
        """Pages by state: ``held`` and ``quarantined``."""
        with self._lock:
            found = {"held": 0, "quarantined": 0}
            for hold in self._holds.values():
                found["quarantined" if hold.quarantined and hold.waits_for else "held"] += hold.pages
            return found


def no_room_left(quarantined: int, pool: int, limit: float) -> Verdict | None:
    """Said to every new request of a decode that has lost more than a `limit` (0 to 1) of its `pool` of KV pages to quarantine."""
    if quarantined <= limit * pool:
        return None
    return Verdict(
        503,
        f"Refused by the PD guard: {quarantined} of this decode node's {pool} KV pages are quarantined, since a prefill node that "
        "may still write to them does not answer. Send the request to another decode node. Operator: start that prefill again "
        f"at its address, or restart this node (--pd-guard-max-quarantined is {limit:g}).",
    )


def batches(
    sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int], max_bytes: int
) -> Iterator[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
    """One write of many blocks (addresses, and bytes each) as several of at most `max_bytes` and `MAX_BLOCKS` each, in order.

    A block that is larger than that is cut. No limit on bytes where `max_bytes` is 0.
    """
    total = sum(lengths)
    max_bytes = max_bytes or total
    if 0 < total <= max_bytes and len(lengths) <= MAX_BLOCKS:
        yield sources, targets, lengths
        return
    batch: tuple[list[int], list[int], list[int]] = ([], [], [])
    free = max_bytes
    for source, target, length in zip(sources, targets, lengths, strict=True):
        done = 0
        while done < length:
            if not free or len(batch[0]) == MAX_BLOCKS:
                yield batch
                batch, free = ([], [], []), max_bytes
            size = min(length - done, free)
            for values, value in zip(batch, (source + done, target + done, size), strict=True):
                values.append(value)
            done += size
            free -= size
    if batch[0]:
        yield batch


class Writes:
    """prefill's ledger of writes, by request: a chunk counts from when it is queued until its worker asks for the next one.

    Bounded by the chunks in the queues and, for requests whose writes failed, by `capacity`; beyond it all are unknown.
    """

    def __init__(self, capacity: int = 65536):
        self._lock = threading.Lock()
        self._open: Counter[Hashable] = Counter()
        self._in_hand: dict[Hashable, Hashable] = {}
        self._unknown: set[Hashable] = set()
        self._capacity = capacity
        self._all_unknown = False

    def queued(self, request: Hashable) -> None:
        """A chunk of `request` is about to enter a transfer queue."""
        with self._lock:
            self._open[request] += 1

    def taken(self, worker: Hashable, request: Hashable) -> None:
        """`worker` has got a chunk of `request`."""
        with self._lock:
            self._in_hand[worker] = request

    def finished(self, worker: Hashable) -> Hashable | None:
        """`worker` asks for its next chunk. Returns the request of which this ended the last write, if it did."""
        with self._lock:
            request = self._in_hand.pop(worker, None)
            if request is None:
                return None
            self._open[request] -= 1
            if self._open[request]:
                return None
            del self._open[request]
            return request

    def in_hand(self, worker: Hashable) -> Hashable | None:
        """The request whose chunk `worker` has got."""
        return self._in_hand.get(worker)

    def failed(self) -> None:
        """A write returned an error: parts of it may still be posted, of any request that is being written now."""
        with self._lock:
            self._unknown.update(self._in_hand.values())
            if len(self._unknown) > self._capacity:
                self._unknown.clear()
                self._all_unknown = True

    def returned(self, request: Hashable) -> bool:
        """Whether no write of `request` is queued or under way on this side."""
        with self._lock:
            return not self._open.get(request)

    def unknown(self, request: Hashable) -> bool:
        """Whether a write of `request` failed, so that nobody here knows when it ends over there."""
        with self._lock:
            return self._all_unknown or request in self._unknown
