"""A state machine against `Admissions`: rooms are used, refused and used again in any order.

The invariants are the guard's promises: a refused room's decode always gets the verdict of this very use, an admitted
room's decode never gets one, and memory is bounded.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_pd_guard.guards.admission import Admissions, Verdict

ROOMS = st.integers(1, 4)
ENDPOINTS = st.sampled_from([("10.0.0.1", 1), ("10.0.0.2", 2)])
CAPACITY = 8


class Rooms(RuleBasedStateMachine):
    """Each use of a room has one decode rank with a fresh nonce, and one decision by prefill."""

    @initialize()
    def start(self):
        self.now = 0.0
        self.admissions = Admissions(capacity=CAPACITY, clock=lambda: self.now)
        self.nonces = iter(range(1, 10**9))
        self.use: dict[int, dict] = {}

    def begin(self, room):
        """The room's current use; a use that has ended gives way to a new one."""
        use = self.use.get(room)
        if use is None or (use["decided"] is not None and use["nonce"] is not None):
            use = self.use[room] = {"nonce": None, "endpoint": None, "decided": None, "verdict": None}
        return use

    @rule(room=ROOMS, endpoint=ENDPOINTS)
    def hello(self, room, endpoint):
        use = self.begin(room)
        if use["nonce"] is not None:
            return
        use["nonce"], use["endpoint"] = next(self.nonces), endpoint
        answer = self.admissions.hello(room, endpoint, use["nonce"])
        if use["decided"] == "refused":
            assert answer == use["verdict"]
        elif use["decided"] == "admitted":
            assert answer is None
        # Undecided: prefill has yet to see this use. Nothing but an untold verdict of a former use may be returned.

    @rule(room=ROOMS)
    def refuse(self, room):
        use = self.begin(room)
        if use["decided"] is not None:
            return
        verdict = Verdict(400, f"use {next(self.nonces)}")
        use["decided"], use["verdict"] = "refused", verdict
        told = self.admissions.refuse(room, verdict)
        if use["nonce"] is not None and (use["endpoint"], use["nonce"]) not in told:
            # Only where the hello itself was answered already, by a verdict left over from a use that nobody asked for.
            assert self.admissions.refused(room) == verdict
        assert self.admissions.refused(room) == verdict

    @rule(room=ROOMS)
    def admit(self, room):
        use = self.begin(room)
        if use["decided"] is not None:
            return
        use["decided"], use["number"] = "admitted", next(self.nonces)
        self.admissions.admit(room, use["number"])
        assert self.admissions.refused(room) is None

    @rule(room=ROOMS)
    def refuse_the_admitted(self, room):
        """A request fails after it was admitted: its own decode rank is told, the next use starts afresh."""
        use = self.use.get(room)
        if use is None or use["decided"] != "admitted" or use["nonce"] is None:
            return
        assert self.admissions.asked_with(room, use["nonce"])
        told = self.admissions.refuse(room, Verdict(500, "later"), admitted=True)
        assert (use["endpoint"], use["nonce"]) in told
        assert not self.admissions.asked_with(room, use["nonce"])
        self.use.pop(room)
        following = self.begin(room)
        following["nonce"], following["endpoint"] = next(self.nonces), use["endpoint"]
        assert self.admissions.hello(room, use["endpoint"], following["nonce"]) is None

    @rule(room=ROOMS)
    def release(self, room):
        """The admitted request is gone: nothing of it stays, whoever asks for the room's next use keeps asking."""
        use = self.use.get(room)
        if use is None or use["decided"] != "admitted" or use["nonce"] is None:
            return
        before = self.admissions.rooms()["asked"]
        self.admissions.release(room, 0)  # a former use's finalizer, late
        assert self.admissions.rooms()["asked"] == before
        self.admissions.release(room, use["number"])
        assert self.admissions.rooms()["asked"] == before - 1
        self.use.pop(room)

    @rule(room=ROOMS)
    def hello_again(self, room):
        """A repeated introduction of the same use changes nothing."""
        use = self.use.get(room)
        if use is None or use["nonce"] is None or use["decided"] is None:
            return
        answer = self.admissions.hello(room, use["endpoint"], use["nonce"])
        assert answer == use["verdict"]

    @rule(room=ROOMS)
    def peer(self, room):
        verdict = Verdict(400, "peer")
        self.admissions.peer_refused(room, verdict)
        assert self.admissions.take_peer_verdict(room) == verdict
        assert self.admissions.take_peer_verdict(room) is None

    @rule()
    def time_passes(self):
        self.now += 3601
        self.use.clear()
        assert all(self.admissions.refused(room) is None for room in range(1, 5))

    @invariant()
    def bounded(self):
        if hasattr(self, "admissions"):
            assert all(n <= CAPACITY for n in self.admissions.rooms().values())


Rooms.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestRooms = Rooms.TestCase


def test_memory_is_bounded():
    admissions = Admissions(capacity=16)
    for room in range(1000):
        admissions.hello(room, ("10.0.0.1", 1), room)
        admissions.refuse(room + 10**6, Verdict(400, "no"))
        admissions.peer_refused(room, Verdict(400, "no"))
    assert admissions.rooms() == {"asked": 16, "refused": 16, "peer": 16}
    assert admissions.refused(10**6 + 999) == Verdict(400, "no")
    assert admissions.refused(10**6) is None


def test_release_takes_no_lock():
    """A finalizer runs at any point, also while the same thread is inside."""
    admissions = Admissions(on_change=lambda rooms: admissions.release(1, 7))
    admissions.hello(1, ("10.0.0.1", 1), 5)
    admissions.admit(1, 7)
    admissions.hello(2, ("10.0.0.1", 1), 6)  # the number of rooms changes, so the finalizer runs inside
    assert admissions.rooms()["asked"] == 1


A, B = ("10.0.0.1", 1), ("10.0.0.2", 2)
BUSY = Verdict(400, "in use")


def test_a_double_is_told_by_its_prompt_and_its_owner_never():
    admissions = Admissions()
    admissions.admit(1, 7, prompt=11)
    admissions.double(1, 12, BUSY)
    assert admissions.hello(1, A, 5, prompt=11) is None  # the owner's decode
    assert admissions.hello(1, A, 6, prompt=12) == BUSY
    assert admissions.turned_away(1, A) and not admissions.turned_away(1, A)
    assert admissions.hello(1, B, 6, prompt=12) == BUSY  # another rank of the same decode
    assert admissions.hello(1, A, 8, prompt=13) is None
    assert not admissions.turned_away(1, A)


def test_of_two_equal_prompts_in_one_room_the_first_to_ask_is_the_owner():
    admissions = Admissions()
    admissions.admit(1, 7, prompt=11)
    admissions.double(1, 11, BUSY)
    assert admissions.hello(1, A, 5, prompt=11) is None
    assert admissions.hello(1, A, 5, prompt=11) is None
    assert admissions.hello(1, A, 6, prompt=11) == BUSY


def test_a_double_that_both_nodes_refused_leaves_nothing_behind():
    admissions = Admissions()
    admissions.double(1, 12, BUSY)
    admissions.peer_double(1, 12, BUSY)
    assert admissions.hello(1, A, 5, prompt=12) is None
    assert admissions.admit(1, 8, prompt=12) is None
    admissions.peer_double(2, 12, BUSY)
    admissions.double(2, 12, BUSY)
    assert admissions.admit(2, 9, prompt=12) is None


def test_a_double_that_only_decode_refused_is_told_to_prefill():
    admissions = Admissions()
    admissions.peer_double(1, 12, BUSY)
    assert admissions.admit(1, 7, prompt=11) is None
    assert admissions.admit(1, 8, prompt=12) == BUSY
    assert admissions.admit(1, 9, prompt=12) is None


def test_the_newest_introduction_names_the_use():
    admissions = Admissions()
    assert admissions.nonce(1) == 0
    admissions.hello(1, A, 5)
    admissions.hello(1, B, 6)
    assert admissions.nonce(1) == 6
    admissions.hello(1, A, 7)
    assert admissions.nonce(1) == 7
    admissions.admit(1, 3)
    assert admissions.nonce(1) == 7


def test_a_double_that_asks_ahead_of_the_owner_is_told():
    admissions = Admissions()
    admissions.admit(1, 7, prompt=11)
    admissions.double(1, 12, BUSY)
    assert admissions.hello(1, A, 6, prompt=12) == BUSY
    assert admissions.hello(1, A, 5, prompt=11) is None


CLASH = Verdict(400, "other prompt")


def test_a_stranger_in_an_admitted_room_is_told_and_ends_a_request_that_nobody_asked_for():
    admissions = Admissions()
    admissions.admit(1, 7, prompt=11)
    assert admissions.stranger(1, A, 6, 12, CLASH) is True
    assert admissions.turned_away(1, A)
    assert admissions.hello(1, A, 5, prompt=11) == CLASH  # decode sees the other one after all
    admissions.ended(1, 7)
    assert admissions.admit(1, 8, prompt=12) == CLASH  # and so does prefill


def test_a_stranger_does_not_end_a_request_that_its_own_decode_asked_for():
    admissions = Admissions()
    admissions.hello(1, A, 5, prompt=11)
    admissions.admit(1, 7, prompt=11)
    assert admissions.strangers(1, CLASH) == []
    assert admissions.stranger(1, B, 6, 12, CLASH) is False
    assert admissions.stranger(1, A, 8, 11, CLASH) is False  # the same prompt, another request
    assert admissions.stranger(1, A, 5, 11, CLASH) is None
    assert admissions.nonce(1) == 5


def test_who_asked_before_the_admission_with_another_prompt_is_a_stranger():
    admissions = Admissions()
    admissions.hello(1, A, 6, prompt=12)
    admissions.admit(1, 7, prompt=11)
    assert admissions.strangers(1, CLASH) == [(A, 6)]
    assert admissions.turned_away(1, A)
    assert admissions.hello(1, A, 9, prompt=11) == CLASH
    admissions.ended(1, 7)
    assert admissions.admit(1, 8, prompt=12) == CLASH


def test_a_prompt_that_is_not_said_is_nobody_s():
    admissions = Admissions()
    admissions.hello(1, A, 6)
    admissions.admit(1, 7, prompt=11)
    assert admissions.strangers(1, CLASH) == []
    admissions = Admissions()
    admissions.admit(1, 7, prompt=11)
    assert admissions.stranger(1, A, 6, 0, CLASH) is None


def test_after_the_end_the_room_s_next_use_begins():
    admissions = Admissions()
    admissions.hello(1, A, 5, prompt=11)
    admissions.admit(1, 7, prompt=11)
    admissions.ended(1, 6)  # a former use's
    assert admissions.stranger(1, B, 6, 12, CLASH) is False
    admissions.ended(1, 7)
    assert admissions.stranger(1, A, 6, 12, CLASH) is None
    assert admissions.hello(1, A, 6, prompt=12) is None
    admissions.admit(1, 8, prompt=12)
    assert admissions.strangers(1, CLASH) == [] and admissions.nonce(1) == 6
    assert admissions.refuse(1, Verdict(500, "later"), admitted=True) == [(A, 6)]


def test_who_asks_between_the_end_and_its_verdict_is_told():
    admissions = Admissions()
    admissions.admit(1, 7, prompt=11)
    admissions.ended(1, 7)
    assert admissions.hello(1, A, 5, prompt=11) is None
    assert admissions.hello(1, B, 6, prompt=12) is None
    assert admissions.refuse(1, Verdict(500, "failed"), admitted=True) == [(A, 5)]
