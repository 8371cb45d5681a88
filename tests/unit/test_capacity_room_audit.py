import pytest

from sglang_pd_guard.guards import room
from sglang_pd_guard.guards.audit import EVERY_S, Audit
from sglang_pd_guard.guards.capacity import ALLOW, Limits, compare


@pytest.mark.parametrize(
    ("prefill", "decode", "rule"),
    [
        (Limits(4030), Limits(4030), None),
        (Limits(4030), Limits(4031), "capacity"),
        (Limits(8000), Limits(4030), None),
        (Limits(4030), Limits(0), None),  # a decode that does not say
        (Limits(0), Limits(4030), None),  # hisparse: not known
        (Limits(4030, True), Limits(4030, False), "auto-truncate"),
        (Limits(4030, False), Limits(4030, True), "auto-truncate"),
        (Limits(4030, True), Limits(4031, True), "capacity"),
    ],
)
def test_capacity(prefill, decode, rule):
    found = compare(prefill, decode)
    assert (found and found.rule) == rule
    if rule == "capacity":
        assert (found.prefill, found.decode) == (prefill.longest, decode.longest)
        assert str(prefill.longest) in found.verdict.message and str(decode.longest) in found.verdict.message
    if found:
        assert found.verdict.status == 503 and ALLOW in found.verdict.message


def test_the_words_of_the_room_guard_say_what_to_do():
    assert room.in_use(17).status == 400 and "Bootstrap room 17 is in use" in room.in_use(17).message
    assert "Send 3 requests with n=1" in room.several_samples(3).message


def test_audit_believes_what_it_sees_twice_and_says_it_once():
    now = [0.0]
    audit = Audit(clock=lambda: now[0])
    assert audit.due() and not audit.due()
    now[0] += EVERY_S
    assert audit.due()
    leak, nothing = {"pages": 3, "rooms": 0}, {"pages": 0, "rooms": 0}
    assert audit.look(nothing) is None
    assert audit.look(nothing) is None  # never owned anything: nothing to say
    assert audit.look(leak) is None  # may be in passing
    audit.busy()
    assert audit.look(leak) is None
    assert audit.look(leak) == leak
    assert audit.look(leak) is None
    audit.busy()
    assert audit.look(nothing) == nothing  # at once: an alert stands on what was reported
    assert audit.look(nothing) is None
