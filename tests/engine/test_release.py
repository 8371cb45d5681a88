"""The release guard on real SGLang: a write of an aborted transfer that arrives late."""

import random
import signal
import threading
import time

import pytest
from pd_rig.client import get, run_concurrently
from pd_rig.model import echo
from pd_rig.traffic import (
    LARGE_WRITE,
    LATE_WRITES,
    LEAK,
    SOON,
    aborts,
    late_write,
    room_of_a_queued_chunk,
    secret,
    shared_run,
    until_its_write_waits,
)

pytestmark = pytest.mark.engine


def small(clusters, version, guard, env=LATE_WRITES):
    return clusters(
        version, guard=guard, env=env, decode_tokens=2560, decode_args=["--num-reserved-decode-tokens", "16"]
    )


@pytest.mark.parametrize(
    "version", ["0.5.18", *(pytest.param(v, marks=pytest.mark.full) for v in ("0.5.19", "0.5.20", "0.5.21", "0.5.22")), "0.5.23"], indirect=True
)
def test_unguarded_a_late_write_lands_in_the_next_owners_pages(clusters, version):
    cluster = small(clusters, version, False)
    assert "wrong" in [outcome for seed in range(3) for outcome in late_write(cluster, seed)]
    assert "slow_write: " in cluster.prefills[0].log_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("version", "aborted_at"), [("0.5.20", "both"), ("0.5.20", "prefill"), ("0.5.23", "prefill")], indirect=["version"]
)
def test_unguarded_while_sglang_itself_holds_the_pages(clusters, version, aborted_at):
    """With its deferred release on and its 30 s: the late write lands in nobody's pages."""
    deferred = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    cluster = small(clusters, version, False, env=LATE_WRITES | {deferred: "1", f"{deferred}_TIMEOUT": "30"})
    assert "wrong" not in [outcome for seed in range(3) for outcome in late_write(cluster, seed, aborted_at)]
    assert "slow_write: " in cluster.prefills[0].log_text()


@pytest.mark.parametrize("version", ["0.5.18", pytest.param("0.5.20", marks=pytest.mark.full), "0.5.23"], indirect=True)
def test_guarded_it_lands_where_nobody_reads(clusters, version):
    cluster = small(clusters, version, True)
    for seed in range(2):
        assert late_write(cluster, seed) == ["exact", "exact"]
    cluster.wait_idle()
    assert "slow_write: " in cluster.prefills[0].log_text()
    prompts = [secret(300, random.Random(i)) for i in range(8)]
    calls = [lambda p=p: cluster.complete(p, 24, timeout=60) for p in prompts]
    assert [reply.text for reply in run_concurrently(calls)] == [echo(p, 24) for p in prompts]
    answered, wrong = aborts(cluster, 100, seed=9)
    assert wrong == []
    assert answered > 50
    cluster.wait_idle()
    for node in cluster.nodes:
        assert "pd-guard fault" not in node.log_text()


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_a_room_used_again_right_after_an_abort(clusters, version):
    """The old write and the old word never touch the new use: it is refused until the old one is over, then served."""
    cluster = small(clusters, version, True)
    rng, room = random.Random(5), 77
    delay = cluster.fault_dir / "slow_write"
    delay.write_text(f"2 {LARGE_WRITE}")
    cluster.pair(secret(1000, rng), 8, room=room, timeout=1)
    statuses = []
    for _ in range(40):
        prompt = secret(500, rng)
        _, decode = cluster.pair(prompt, 8, room=room, timeout=10)
        statuses.append(decode.status)
        if decode.status == 200:
            assert decode.text == echo(prompt, 8)
            break
        assert decode.status == 400 and "is in use by another request" in decode.error, decode
        time.sleep(0.1)
    delay.unlink()
    assert statuses[0] == 400 and statuses[-1] == 200
    cluster.wait_idle()


@pytest.mark.parametrize("version", [*(pytest.param(v, marks=pytest.mark.full) for v in ("0.5.18", "0.5.20")), "0.5.23"], indirect=True)
@pytest.mark.parametrize("guarded", [pytest.param(False, marks=pytest.mark.full), True])
def test_source_pages_of_a_request_aborted_between_two_chunks(clusters, version, guarded):
    """Prefill keeps them while the first chunk is being written; unguarded it gives them back."""
    cluster = clusters(version, guard=guarded, overlap=True, env=LATE_WRITES, common_args=["--chunked-prefill-size", "128"])
    rng = random.Random(8)
    prefill, replies = cluster.prefills[0], []
    asked = until_its_write_waits(cluster, lambda: replies.extend(cluster.pair(secret(3900, rng), 8, rid="chunked", timeout=30)), 10_000)
    prefill.post("/abort_request", {"rid": "chunked"})
    used = []
    for _ in range(24):  # past its last chunk as well
        time.sleep(0.25)
        used.append(prefill.used_pages())
    (cluster.fault_dir / "slow_write").unlink()
    asked.join()
    assert [reply.status for reply in replies] != [200, 200]
    assert (min(used) > 0) == guarded, used
    cluster.wait_idle(30)
    prompt = secret(700, rng)
    _, decode = cluster.pair(prompt, 8)
    assert (decode.status, decode.text) == (200, echo(prompt, 8))


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.parametrize("guarded", [False, True])
def test_a_chunk_that_is_queued_when_its_room_is_used_again(clusters, version, guarded):
    """Prefill's worker finds an aborted request's chunk in the queue, and its room alive: unguarded, it writes it for the room's next use."""
    cluster = small(clusters, version, guarded)
    former, following, decode = room_of_a_queued_chunk(cluster, room=78)
    if guarded:
        assert decode.status == 400 and "is in use by another request" in decode.error, decode
        _, decode = cluster.pair(following, 256, room=78)
        assert (decode.status, decode.text) == (200, echo(following, 256))
        cluster.wait_idle()
    else:
        assert decode.status == 200
        assert len(shared_run(decode.text, former)) >= LEAK


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_a_peer_that_hangs_and_peers_that_are_killed(clusters, version):
    """No page is given back early, none is lost for good, no answer is wrong; a decode that has too much of its pool in
    quarantine admits nothing, and says so.
    """
    env = LATE_WRITES | {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"}
    cluster = clusters(version, guard=["--pd-guard-max-quarantined", "0.1"], env=env, fresh=True)
    rng = random.Random(6)
    delay = cluster.fault_dir / "slow_write"

    def sound() -> None:
        cluster.wait_idle(90)
        for _ in range(3):
            prompt = secret(500, rng)
            deadline = time.monotonic() + 30
            while (decode := cluster.pair(prompt, 8, timeout=10)[1]).status != 200 and time.monotonic() < deadline:
                time.sleep(1)
            assert decode.text == echo(prompt, 8)
        cluster.wait_idle()

    def admits() -> bool:
        reply = get(f"{cluster.decode.url}/health", timeout=30)
        assert reply.status_code == 200 or (reply.status_code, "The PD guard admits no requests" in reply.text) == (503, True)
        return reply.status_code == 200

    def in_flight() -> None:
        delay.write_text(f"60 {LARGE_WRITE}")
        threading.Thread(target=cluster.pair, args=(secret(1000, rng), 8), kwargs={"timeout": 4}).start()
        time.sleep(2)

    in_flight()
    cluster.prefills[0].signal(signal.SIGSTOP)
    for _ in range(20):
        time.sleep(1)
        assert cluster.decode.used_pages() == 16
    cluster.prefills[0].signal(signal.SIGCONT)
    delay.unlink()
    sound()

    in_flight()
    cluster.kill(cluster.prefills[0])
    assert admits()
    deadline = time.monotonic() + 60
    while admits():
        assert cluster.decode.used_pages() == 16
        assert time.monotonic() < deadline
        time.sleep(1)
    _, decode = cluster.pair(secret(100, rng), 8, which="decode")
    assert (decode.status, decode.seconds < SOON) == (503, True), decode
    assert "16 of this decode node's 128 KV pages are quarantined" in decode.error
    assert cluster.decode.used_pages() == 16
    metrics = cluster.decode.metrics()
    assert 'sglang:pd_guard_held_pages{role="decode",state="quarantined"} 16.0' in metrics
    assert 'sglang:pd_guard_admitting{role="decode"} 0.0' in metrics
    assert "pd-guard quarantined guard=release role=decode rid=" in cluster.decode.log_text()
    delay.unlink()
    cluster.restart(cluster.prefills[0])
    sound()
    assert admits()
    assert 'sglang:pd_guard_admitting{role="decode"} 1.0' in cluster.decode.metrics()

    in_flight()
    cluster.kill(cluster.decode)
    delay.unlink()
    cluster.restart(cluster.decode)
    sound()
