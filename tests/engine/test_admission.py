"""The admission guard on real SGLang, one guarded pair per version, through the real router where a client would be."""

import random
import threading
import time

import pytest
import requests
from pd_rig.client import run_concurrently
from pd_rig.model import echo
from pd_rig.traffic import SOON, attack, healthy, secret

pytestmark = pytest.mark.engine


#: The supported releases that answer such an attack with a victim's text (test_faults.py).
LEAKY = ("0.5.12.post1", "0.5.15.post1", "0.5.18", "0.5.19")


@pytest.fixture
def cluster(version, clusters):
    return clusters(version, guard=True)


def too_long(size: int, limit: int) -> str:
    return (
        f"Input length ({size} tokens) exceeds the maximum allowed length ({limit} tokens). "
        "Use a shorter input or enable --allow-auto-truncate."
    )


def threads(node) -> int:
    return len(node.scheduler().threads())


def exact(cluster, prompt: str, n: int = 24, **kwargs) -> None:
    prefill, decode = cluster.pair(prompt, n, **kwargs)
    assert prefill.status == 200
    assert (decode.status, decode.text) == (200, echo(prompt, n))


@pytest.mark.each
def test_attacks_are_refused_and_leak_nothing(cluster, version):
    attacks = 50 if version in LEAKY else 15
    campaign = attack(cluster, attacks)
    assert campaign.leaks == []
    assert campaign.wrong == []
    assert len(campaign.refusals) == attacks
    for reply in campaign.refusals:
        assert reply.status == 400, reply
        assert reply.text is None
        assert (
            "exceeds the maximum allowed length (4090 tokens)" in reply.error  # prefill's words
            or "can never be scheduled in this decode's KV pool of 8192 tokens" in reply.error
        )
        assert reply.seconds < SOON
    cluster.wait_idle()


@pytest.mark.every
def test_healthy_traffic_is_exact(cluster):
    assert healthy(cluster, 200) == []
    cluster.wait_idle()


@pytest.mark.parametrize("size", [4030, 4031, 4089, 4090, 4091])
def test_the_limit_itself(cluster, size):
    """The longest prompt that can be scheduled is served; those that SGLang admits and never schedules are refused by
    the guard (unguarded they hang, and everyone behind them), from 4090 on by SGLang itself; always on both nodes."""
    prompt = secret(size, random.Random(size))
    prefill, decode = cluster.pair(prompt, 8, timeout=10)
    if size <= 4030:
        assert (prefill.status, decode.status, decode.text) == (200, 200, echo(prompt, 8))
    else:
        words = too_long(size, 4090) if size >= 4090 else "can never be scheduled in this prefill's KV pool of 4096 tokens"
        for reply in (prefill, decode):
            assert reply.status == 400 and words in reply.error, reply
            assert reply.seconds < SOON
    cluster.wait_idle(SOON)
    exact(cluster, secret(300, random.Random(1)))


@pytest.mark.each
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_whoever_comes_first(cluster, first):
    """decode's metadata may reach prefill long before or after the reject."""
    room = random.getrandbits(62)
    replies = {}

    def ask(which):
        prefill, decode = cluster.pair("0" * 5000, 8, room=room, which=which, timeout=20)
        replies[which] = prefill or decode

    second = "decode" if first == "prefill" else "prefill"
    early = threading.Thread(target=ask, args=(first,))
    early.start()
    time.sleep(1.5)
    ask(second)
    early.join()
    for reply in replies.values():
        assert (reply.status, reply.error) == (400, too_long(5000, 4090))
    assert replies[second].seconds < SOON
    cluster.wait_idle(SOON)


def test_a_room_number_is_usable_again_after_a_reject(cluster):
    rng = random.Random(5)
    room = rng.getrandbits(62)
    for _ in range(3):
        for reply in cluster.pair("0" * 4500, 8, room=room):
            assert (reply.status, reply.error) == (400, too_long(4500, 4090))
        # From 0.5.21 on decode sends its own ABORT for the failed room, which has no use of the room on it:
        # it must have arrived before the number is used again.
        cluster.wait_idle(SOON)
        exact(cluster, secret(700, rng), room=room)
    cluster.wait_idle(SOON)


def test_decode_refuses_what_prefill_accepts(cluster):
    """The mirror image: prefill keeps neither the room nor a page, and its client gets decode's own words."""
    prefill, decode = cluster.pair("0" * 8500, 8, prefill_prompt=secret(3000, random.Random(6)))
    for reply in (prefill, decode):
        assert (reply.status, reply.error) == (400, too_long(8500, 8186))
        assert reply.seconds < SOON
    cluster.wait_idle(SOON)


def test_decode_refuses_before_prefill_has_the_request(cluster):
    room = random.getrandbits(62)
    _, decode = cluster.pair("0" * 8500, 8, room=room, which="decode")
    time.sleep(0.5)
    prefill, _ = cluster.pair("0" * 500, 8, room=room, which="prefill")
    for reply in (prefill, decode):
        assert (reply.status, reply.error) == (400, too_long(8500, 8186))
    cluster.wait_idle(SOON)


#: Requests that one node refuses for a reason of its own; the other, asked without it, would serve them.
PRODUCERS = {
    "grammar": {"sampling_params": {"json_schema": '{"type": "object"}'}},
    "session": {"session_params": {"id": "no-such-session", "rid": None}},
    "logprob_start": {"return_logprob": True, "logprob_start_len": 100_000},
}


@pytest.mark.each
@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_every_producer_of_rejects(cluster, producer, side):
    prompt = secret(1500, random.Random(7))
    extra, plain = PRODUCERS[producer], {"sampling_params": {"json_schema": None}, "session_params": None,
                                         "return_logprob": False, "logprob_start_len": -1}  # fmt: skip
    if side == "prefill":
        prefill, decode = cluster.pair(prompt, 8, prefill_extra=extra)
    else:
        prefill, decode = cluster.pair(prompt, 8, extra=extra, prefill_extra={k: plain[k] for k in extra})
    culprit = prefill if side == "prefill" else decode
    assert culprit.status == 400, culprit
    for reply in (prefill, decode):
        assert (reply.status, reply.error) == (400, culprit.error)
        assert reply.seconds < SOON
    cluster.wait_idle(SOON)
    exact(cluster, prompt)


@pytest.mark.each
def test_a_long_refusal_reaches_the_peer(cluster):
    """SGLang quotes the client; escaped, it becomes twelve times as long."""
    prefill, decode = cluster.pair("a" * 300, 8, prefill_extra={"session_params": {"id": "\N{GRINNING FACE}" * 1990, "rid": None}}, timeout=20)
    assert (prefill.status, decode.status) == (400, 400), (prefill, decode)
    assert decode.seconds < SOON
    cluster.wait_idle(SOON)


@pytest.mark.each
@pytest.mark.parametrize("room", [-5, 0, 2**63])
def test_a_number_that_is_no_room(cluster, room):
    """Unguarded, a negative one ends the prefill's scheduler."""
    replies = cluster.pair("a" * 300, 8, room=room, timeout=20)
    for reply in replies:
        assert (reply.status, reply.text) == (400, None), replies
        assert "from 1 to 2**63 - 1" in reply.error
        assert reply.seconds < SOON
    cluster.wait_idle(SOON)
    exact(cluster, "b" * 300)


FAKE = "2.2.2.2"  # SGLang's own host, for which nothing is transferred


@pytest.mark.each
@pytest.mark.parametrize("size", [2, 500, 1500])
def test_a_client_that_names_the_host_of_health_checks(cluster, size):
    """On decode it would be answered from pages that hold whatever was there before: see test_faults."""
    exact(cluster, secret(1000, random.Random(12)))
    _, reply = cluster.pair("!" * size, 40, extra={"bootstrap_host": FAKE}, which="decode")
    assert (reply.status, reply.text) == (400, None), reply
    assert "health checks" in reply.error
    assert requests.get(f"{cluster.decode.url}/health_generate", timeout=20).status_code == 200
    cluster.wait_idle(SOON)


def test_rejects_do_not_starve_anyone(cluster):
    """Twenty rejects at once, and legitimate requests among them."""
    rng = random.Random(8)
    prompts = [secret(600, rng) for _ in range(10)]
    calls = [lambda: cluster.complete("0" * 5000, 8) for _ in range(20)]
    calls += [lambda p=p: cluster.complete(p, 8) for p in prompts]
    replies = run_concurrently(calls, 8)
    assert [r.status for r in replies[:20]] == [400] * 20
    assert [r.text for r in replies[20:]] == [echo(p, 8) for p in prompts]
    cluster.wait_idle(SOON)


def test_streaming_clients_get_the_abort(cluster):
    reply = cluster.complete("0" * 5000, 8, stream=True)
    # SGLang's streaming answers carry no error text; the finish reason is the error's.
    assert '"finish_reason":"abort"' in reply.body
    assert '"text":""' in reply.body
    assert reply.seconds < SOON
    cluster.wait_idle(SOON)


def test_an_abort_on_prefill_reaches_decode(cluster):
    """A request aborted while it waits for decode: decode's client is told when it comes, and holds nothing."""
    room = random.getrandbits(62)
    replies = {}
    waiting = threading.Thread(
        target=lambda: replies.update(p=cluster.pair("0" * 900, 8, room=room, rid="abort-me", which="prefill")[0])
    )
    waiting.start()
    time.sleep(0.7)
    cluster.prefills[0].post("/abort_request", {"rid": "abort-me"})
    waiting.join()
    _, decode = cluster.pair("0" * 900, 8, room=room, which="decode", timeout=10)
    assert decode.status is not None and decode.status >= 500, decode
    assert decode.seconds < SOON
    cluster.wait_idle(SOON)


@pytest.mark.each
def test_nothing_is_left_over(cluster):
    """After all of the above: no page, no queue entry, no room, no thread, no fault; rejects are counted."""
    before = {node.name: threads(node) for node in cluster.nodes}
    attack(cluster, 5, seed=9)
    assert healthy(cluster, 20, seed=10) == []
    cluster.wait_idle()
    cluster.check_alive()
    for node in cluster.nodes:
        assert threads(node) == before[node.name]
        assert node.counter("faults_total") == 0
        assert node.counter("dropped_refusals_total") == 0
        assert node.counter("rooms", state="peer") == 0
        # Those of ended requests go with the next one.
        assert node.counter("rooms", state="asked") <= 16
        assert node.counter("info", mode="enforce", peer="require") == 1
    assert cluster.prefills[0].counter("refused_total", rule="unadmitted") >= 8
    assert cluster.decode.counter("peer_refusals_total", direction="received") >= 8


def test_logs_name_the_event_and_never_the_prompt(cluster):
    marker = "XYZZY" * 900
    reply = cluster.complete(marker, 8)
    assert reply.status == 400
    for node in cluster.nodes:
        events = [line for line in node.log_text().splitlines() if "] pd-guard " in line]
        assert any(" bound version=" in line for line in events)
        assert not any("XYZZY" in line for line in events)
    refused = [line for line in cluster.prefills[0].log_text().splitlines() if "pd-guard refused" in line]
    assert all("rid=" in line and "room=" in line for line in refused)
    assert any("guard=admission" in line for line in refused)
