"""The room guard and the audit on real SGLang, all guards on."""

import random
import re
import threading
import time

import pytest
from pd_rig.model import echo
from pd_rig.traffic import SOON, same_room, secret

pytestmark = pytest.mark.engine

FAULTS = {"PD_RIG_FAULT": "late_status,lost_slot,slow_write"}


@pytest.fixture
def cluster(version, clusters):
    return clusters(version, guard=True, env=FAULTS)


def owned(node) -> dict[str, float]:
    found = re.findall(r'^sglang:pd_guard_owned_when_idle{kind="(\w+)".*} (\S+)$', node.metrics(), re.M)
    return {kind: float(number) for kind, number in found}


BOTH = pytest.mark.parametrize("version", [pytest.param("0.5.18", marks=pytest.mark.full), "0.5.23"], indirect=True)


@BOTH
def test_two_requests_in_one_room(cluster):
    served = 0
    for outcome in same_room(cluster, 50):
        assert outcome.leaks == []
        right = [reply.text == echo(prompt, 40) for prompt, reply in zip(outcome.prompts, outcome.decode, strict=True)]
        served += any(right)
        # Both, where the second came after the end of the first: then the room was free.
        assert sum(reply.status == 200 for reply in outcome.decode) == sum(right)
        for reply in [*outcome.prefill, *outcome.decode]:
            assert reply.status in (200, 400), reply
            assert reply.seconds < SOON
            if reply.status == 400:
                assert "is in use by another request" in reply.error
    assert served
    cluster.wait_idle()


@BOTH
@pytest.mark.parametrize(
    ("order", "served"),
    [
        ("p1 d2 d1 p2", 0),
        ("p1 d2 p2 d1", 0),
        ("d2 p1 d1 p2", 0),
        ("d2 p1 p2 d1", 0),
        ("p1 p2 d2 d1", 1),
        ("d2 d1 p1 p2", 0),
    ],
)
def test_one_room_in_each_order(cluster, order, served):
    """Requests 1 and 2 in one room reach prefill (p) and decode (d) in this order, with time between them."""
    room, prompts = random.getrandbits(62), {n: secret(500, random.Random(f"{order}{n}")) for n in "12"}
    replies, threads = {}, []

    def ask(name):
        which = "prefill" if name[0] == "p" else "decode"
        replies[name] = next(r for r in cluster.pair(prompts[name[1]], 8, room=room, which=which) if r)

    for name in order.split():
        threads.append(threading.Thread(target=ask, args=(name,)))
        threads[-1].start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    for name, reply in replies.items():
        if name[1] == str(served):
            assert reply.status == 200, (name, reply)
            assert name[0] == "p" or reply.text == echo(prompts[name[1]], 8), (name, reply)
        else:
            assert (reply.status, reply.text) == (400, None), (name, reply)
            assert "is in use by another request" in reply.error
            assert reply.seconds < SOON + 0.9
    cluster.wait_idle()


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_a_room_is_in_use_while_its_pages_are_held(cluster):
    """SGLang clears a failed receiver twice, with the pages held in between: a new request must not lose its state to that."""
    (cluster.fault_dir / "slow_write").write_text("4 20000")
    room, rng = random.getrandbits(62), random.Random(7)
    cluster.pair(secret(600, rng), 8, room=room, timeout=1)
    time.sleep(0.5)
    second = cluster.pair(secret(500, rng), 8, room=room, which="decode")[1]
    (cluster.fault_dir / "slow_write").unlink()
    assert second.status == 400 and "is in use by another request" in second.error, second
    cluster.wait_idle()
    prompt = secret(500, rng)
    _, decode = cluster.pair(prompt, 8, room=room)
    assert (decode.status, decode.text) == (200, echo(prompt, 8))


@BOTH
@pytest.mark.parametrize("node", ["prefill", "decode"])
def test_a_live_room_is_refused_and_its_owner_served(cluster, node):
    room, prompt = random.getrandbits(62), secret(500, random.Random(1))
    replies = {}

    def ask(which):
        prefill, decode = cluster.pair(prompt, 8, room=room, which=which, timeout=20)
        replies[which] = prefill or decode

    first = threading.Thread(target=ask, args=(node,))
    first.start()
    time.sleep(1)
    second = next(r for r in cluster.pair(secret(500, random.Random(2)), 8, room=room, which=node) if r)
    assert (second.status, second.text) == (400, None)
    assert f"Bootstrap room {room} is in use by another request" in second.error
    assert second.seconds < SOON
    ask("decode" if node == "prefill" else "prefill")
    first.join()
    assert replies["prefill"].status == 200
    assert (replies["decode"].status, replies["decode"].text) == (200, echo(prompt, 8))
    cluster.wait_idle()


@BOTH
def test_a_room_is_free_right_after_its_end(cluster):
    room = random.getrandbits(62)
    for i in range(10):
        prompt = secret(300 + i, random.Random(i))
        prefill, decode = cluster.pair(prompt, 1 + i % 3, room=room)
        assert (prefill.status, decode.status, decode.text) == (200, 200, echo(prompt, 1 + i % 3))


@BOTH
def test_several_samples_are_refused_at_once(cluster):
    prompt = secret(300, random.Random(3))
    replies = cluster.pair(prompt, 8, extra={"sampling_params": {"n": 2}})
    for reply in [*replies, cluster.complete(prompt, 8, samples=2)]:
        assert (reply.status, reply.text) == (400, None), reply
        assert "Send 2 requests with n=1" in reply.error
        assert reply.seconds < SOON
    cluster.wait_idle(SOON)


@BOTH
def test_late_messages_for_a_retired_room_change_nothing(cluster):
    rng = random.Random(4)
    (cluster.fault_dir / "late_status").write_text("on")
    rooms = [rng.getrandbits(62) for _ in range(3)]
    for room in rooms * 2:
        prompt = secret(400, rng)
        _, decode = cluster.pair(prompt, 8, room=room)
        assert (decode.status, decode.text) == (200, echo(prompt, 8))
        time.sleep(0.2)
    (cluster.fault_dir / "late_status").unlink()
    assert cluster.decode.log_text().count("late_status: sent") >= 6
    cluster.wait_idle()
    time.sleep(4)
    assert owned(cluster.decode).get("rooms", 0) == 0


@BOTH
def test_the_audit_finds_a_lost_slot_and_its_return(cluster):
    prompt = secret(300, random.Random(5))
    cluster.pair(prompt, 8)
    time.sleep(4)
    for node in cluster.nodes:
        assert not any(owned(node).values()), owned(node)
    for words, count in (("x x", 2.0), (None, 0.0)):
        path = cluster.fault_dir / "lost_slot"
        path.write_text(words) if words else path.unlink()
        _, decode = cluster.pair(prompt, 8)
        assert decode.text == echo(prompt, 8)
        time.sleep(4)
        for node in cluster.nodes:
            assert owned(node)["metadata_slots"] == count
            assert owned(node)["pages"] == owned(node)["request_slots"] == owned(node)["rooms"] == 0
    log = cluster.decode.log_text()
    assert "idle node owns pages=0 request_slots=0 metadata_slots=2 rooms=0" in log


@pytest.mark.versions("0.5.18", "0.5.23")
def test_requests_that_prefill_aborts_leave_no_room(clusters, version):
    """While it computes chunks of them, and before: both nodes own nothing when idle, and the room numbers can be used again."""
    cluster = clusters(version, guard=True, overlap=True, common_args=["--chunked-prefill-size", "128"])
    rng = random.Random(5)
    rooms = [rng.getrandbits(62) for _ in range(12)]
    replies = []

    def ask(rid: int) -> None:
        replies.append(cluster.pair(secret(3900, rng), 8, room=rooms[rid], rid=f"gone-{rid}", timeout=30)[1])

    for first in range(0, len(rooms), 2):  # two at a time: the second waits for the first
        threads = [threading.Thread(target=ask, args=(rid,)) for rid in (first, first + 1)]
        for thread in threads:
            thread.start()
        time.sleep(0.25 + 0.02 * first)
        for rid in (first, first + 1):
            cluster.prefills[0].post("/abort_request", {"rid": f"gone-{rid}"})
        for thread in threads:
            thread.join()
    assert sum(reply.status != 200 for reply in replies) >= 4, replies
    assert all(reply.status is not None and reply.seconds < SOON for reply in replies), replies
    cluster.wait_idle()
    time.sleep(4)
    for node in cluster.nodes:
        assert not any(owned(node).values()), owned(node)
    for room in rooms:
        prompt = secret(200, rng)
        for reply in cluster.pair(prompt, 4, room=room, timeout=15):
            assert reply.status == 200, reply
        assert reply.text == echo(prompt, 4)
