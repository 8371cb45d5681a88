"""State machines against the release guard's ledgers, beside a simple model of who may still write where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_pd_guard.guards.release import MAX_BLOCKS, Holds, Writes, batches, no_room_left

WRITERS = [("10.0.0.1", 1), ("10.0.0.1", 2), ("10.0.0.2", 1)]
PATIENCE = 30.0


class Decode(RuleBasedStateMachine):
    """Requests reserve pages, fail and are held; words arrive late, twice, for others, or never."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.holds = Holds(PATIENCE)
        self.next = 1
        self.model: dict[int, dict] = {}
        self.released: set[int] = set()

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule(pages=st.integers(1, 9), writers=st.sets(st.sampled_from(WRITERS), min_size=1))
    def fail(self, pages, writers):
        self.holds.hold(self.next, pages, writers, self.now)
        self.holds.hold(self.next, 1000, [], self.now + 1)  # the same one again
        self.model[self.next] = {"pages": pages, "may_write": set(writers), "since": self.now, "unknown": False}
        self.next += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), writer=st.sampled_from(WRITERS))
    def word(self, data, writer):
        nonce = self.some(data)
        assert self.holds.drained(nonce, writer) == (writer in self.model[nonce]["may_write"])
        self.model[nonce]["may_write"].discard(writer)

    @rule(writer=st.sampled_from(WRITERS))
    def late_word(self, writer):
        for nonce in [*self.released, self.next]:
            assert not self.holds.drained(nonce, writer)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), writer=st.sampled_from(WRITERS))
    def cannot_know(self, data, writer):
        nonce = self.some(data)
        self.holds.unknown(nonce, writer)
        self.model[nonce]["unknown"] |= writer in self.model[nonce]["may_write"]

    @rule(writer=st.sampled_from(WRITERS))
    def process_gone(self, writer):
        self.holds.gone(writer)
        for entry in self.model.values():
            entry["may_write"].discard(writer)

    @rule(seconds=st.floats(0, 1e6))
    def time_passes(self, seconds):
        self.now += seconds
        for nonce, entry in self.model.items():
            assert self.holds.missing(nonce) == entry["may_write"]
            too_long = bool(entry["may_write"]) and self.now - entry["since"] > PATIENCE
            assert self.holds.quarantined(nonce, self.now) == (too_long or bool(entry["may_write"] and entry["unknown"]))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data):
        nonce = self.some(data)
        if self.model[nonce]["may_write"]:
            with pytest.raises(ValueError):
                self.holds.release(nonce, self.now)
            return
        assert self.holds.release(nonce, self.now) == self.now - self.model.pop(nonce)["since"]
        self.released.add(nonce)
        with pytest.raises(KeyError):
            self.holds.release(nonce, self.now)

    @invariant()
    def every_page_is_accounted_for(self):
        pages = self.holds.pages()
        assert sum(pages.values()) == sum(entry["pages"] for entry in self.model.values())
        waiting = sum(entry["pages"] for entry in self.model.values() if entry["may_write"])
        assert pages["quarantined"] <= waiting


class Prefill(RuleBasedStateMachine):
    """Chunks go through two workers' queues in order."""

    def __init__(self):
        super().__init__()
        self.writes = Writes(capacity=3)
        self.queues = {"a": [], "b": []}
        self.in_hand: dict[str, int] = {}
        self.unknown: set[int] = set()
        self.overflowed = False

    def left(self, request):
        return sum(queue.count(request) for queue in self.queues.values()) + [*self.in_hand.values()].count(request)

    @rule(request=st.integers(1, 6), worker=st.sampled_from("ab"))
    def queue(self, request, worker):
        self.writes.queued(request)
        self.queues[worker].append(request)

    @rule(worker=st.sampled_from("ab"))
    def next(self, worker):
        former = self.in_hand.pop(worker, None)
        ended = self.writes.finished(worker)
        assert ended == (former if former is not None and not self.left(former) else None)
        if self.queues[worker]:
            self.in_hand[worker] = self.queues[worker].pop(0)
            self.writes.taken(worker, self.in_hand[worker])

    @rule()
    def error(self):
        self.writes.failed()
        self.unknown.update(self.in_hand.values())
        self.overflowed |= len(self.unknown) > 3

    @invariant()
    def as_in_the_queues(self):
        for request in range(1, 7):
            assert self.writes.returned(request) == (not self.left(request))
            if request in self.unknown or self.overflowed:
                assert self.writes.unknown(request)
            else:
                assert not self.writes.unknown(request)


Decode.TestCase.settings = Prefill.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestDecode = Decode.TestCase
TestPrefill = Prefill.TestCase


def test_what_waits_too_long_or_cannot_be_known_is_quarantined_until_the_word_comes():
    holds = Holds(patience=10)
    writer = WRITERS[0]
    holds.hold(1, 7, [writer], 0.0)
    holds.hold(2, 5, [writer], 5.0)
    assert holds.pages() == {"held": 12, "quarantined": 0}
    assert [holds.quarantined(nonce, 10.5) for nonce in (1, 2, 3)] == [True, False, False]
    assert holds.pages() == {"held": 5, "quarantined": 7}
    holds.unknown(2, writer)
    assert holds.pages() == {"held": 0, "quarantined": 12}
    assert holds.drained(1, writer)
    assert [holds.missing(nonce) for nonce in (1, 2)] == [frozenset(), frozenset([writer])]
    assert not holds.quarantined(1, 10.5)
    holds.gone(writer)
    assert holds.release(2, 20.0) == 15.0
    assert holds.pages() == {"held": 7, "quarantined": 0}


def test_a_node_admits_until_more_than_the_limit_is_quarantined():
    assert no_room_left(0, 128, 0.0) is None
    assert no_room_left(32, 128, 0.25) is None
    refusal = no_room_left(33, 128, 0.25)
    assert refusal.status == 503
    assert "33 of this decode node's 128 KV pages" in refusal.message


@given(st.integers(0, 3 * MAX_BLOCKS), st.integers(0, 60), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_batches_write_the_same_bytes_in_the_same_order(count, max_bytes, random):
    """Each byte by its source and target address."""
    blocks = [(random.getrandbits(40), random.getrandbits(40), random.randint(1, 50)) for _ in range(count)]
    got = list(batches(*([block[i] for block in blocks] for i in range(3)), max_bytes))

    def flat(blocks):
        return [(source + i, target + i) for source, target, length in blocks for i in range(length)]

    assert flat([block for batch in got for block in zip(*batch, strict=True)]) == flat(blocks)
    for batch in got:
        assert 0 < len(batch[0]) <= MAX_BLOCKS
        assert not max_bytes or sum(batch[2]) <= max_bytes
    if not max_bytes:
        assert len(got) == -(-len(blocks) // MAX_BLOCKS)  # no more writes than that takes
