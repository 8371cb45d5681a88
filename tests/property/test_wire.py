"""Nothing that arrives on a control socket can raise in the guard."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_pd_guard.guards import wire
from sglang_pd_guard.guards.admission import Verdict

rooms = st.integers(0, 2**64 - 1)
verdicts = st.builds(Verdict, st.integers(400, 599), st.text(max_size=3000), st.none() | st.text(max_size=50))
messages = st.one_of(
    st.builds(wire.Hello, rooms, rooms, st.just("10.0.0.1"), st.integers(1, 65535), st.sampled_from(["enforce", "observe"]), st.booleans()),
    st.builds(wire.Refusal, rooms, rooms, st.booleans(), verdicts),
    st.builds(wire.Wake, rooms),
    st.builds(wire.Drain, rooms, rooms, st.just("10.0.0.1"), st.integers(1, 65535), st.just("10.0.0.2"), st.integers(1, 65535)),
    st.builds(wire.Drained, rooms, rooms, st.just("10.0.0.2"), st.integers(1, 65535), st.booleans()),
)


@given(messages)
def test_round_trip(message):
    frames = wire.encode(message)
    assert wire.is_guard_message(frames)
    assert wire.decode(frames) == message
    assert wire.metadata_sender(frames) is None


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_any_frames(frames):
    wire.metadata_sender(frames)
    assert wire.decode(frames) is None or wire.is_guard_message(frames)


@given(st.sampled_from([b"HELLO", b"REFUSAL", b"WAKE", b"DRAIN", b"DRAINED", b"x"]), st.binary(max_size=200))
def test_any_body(kind, body):
    wire.decode([wire.TAG, kind, body])


@given(st.integers(), st.text(max_size=4000))
def test_a_verdict_is_always_an_error_in_one_printable_line(status, message):
    verdict = Verdict(status, message)
    assert 400 <= verdict.status <= 599
    assert len(verdict.message) <= 2000
    assert all(c.isprintable() for c in verdict.message)
