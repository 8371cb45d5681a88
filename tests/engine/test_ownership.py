"""The ownership guard on real SGLang, with the other guards off: what it catches, and that nothing else alarms it."""

import os
import random
import re
import threading
import time

import pytest
from pd_rig.client import run_concurrently
from pd_rig.model import echo
from pd_rig.traffic import LEAK, SOON, attack, healthy, secret, shared_run

pytestmark = pytest.mark.engine

ALONE = ["--pd-guard-disable", "admission,receipt,room,release,capacity,audit"]
FAULTS = {"PD_RIG_FAULT": "stray_page,short_transfer"}
REFUSED = "Refused by the PD guard: a KV page of this request is not its own (rule {})."
OLDER = [pytest.param(version, marks=pytest.mark.full) for version in ("0.5.18", "0.5.20", "0.5.21", "0.5.22")]
VERSIONS = pytest.mark.parametrize("version", [*OLDER, "0.5.23"], indirect=True)

SOAK_MINUTES = float(os.environ.get("PD_GUARD_SOAK_MINUTES", "2"))


def on(clusters, version, *, guarded=True, **options):
    return clusters(version, **({"guard": ALONE if guarded else False, "env": FAULTS} | options))


def refused(reply, *rules: str) -> None:
    assert (reply.status, reply.text) == (500, None), reply
    assert any(REFUSED.format(rule) in reply.error for rule in rules), reply


def exact(reply, prompt: str, n: int) -> None:
    assert (reply.status, reply.text) == (200, echo(prompt, n)), reply


def lines(node) -> list[str]:
    return [line for line in node.log_text().splitlines() if "pd-guard refused guard=ownership" in line]


@pytest.mark.parametrize("version", ["0.5.19"], indirect=True)
def test_the_incident(clusters, version):
    """Prefill transfers one page and decode would read dozens: refused before the first token is sent."""
    cluster = on(clusters, version)
    # Decode keeps 512 tokens free beside a prompt, or never runs it.
    campaign = attack(cluster, 8, timeout=10, largest=cluster.decode_limit - 600)
    assert (campaign.leaks, campaign.wrong) == ([], [])
    for reply in campaign.refusals:
        refused(reply, "unwritten")
        assert reply.seconds < SOON
    cluster.wait_idle()
    assert len(lines(cluster.decode)) == len(campaign.refusals)
    for line in lines(cluster.decode):
        found = re.search(r"rule=unwritten role=decode rid=\S+ room=\d+ status=500 page=1 of=\d+ owner=([0-9a-f]+) found=1:\d+:([0-9a-f]+)", line)
        assert found, line
        owner, tag = (int(word, 16) for word in found.groups())
        assert tag == owner - 1  # its own, and not written
    assert not cluster.prefills[0].log_text().count("pd-guard fault")


@VERSIONS
def test_unguarded_a_stray_row_leaks(clusters, version):
    """What the next test's fault does without the guard: one request is answered with the other's text."""
    cluster = on(clusters, version, guarded=False)
    rng = random.Random(3)
    prompts = [secret(300, rng) for _ in range(2)]
    control = cluster.fault_dir / "stray_page"
    control.write_text("row")
    replies = run_concurrently([lambda p=p: cluster.complete(p, 300, timeout=60) for p in prompts])
    control.unlink()
    assert [reply.status for reply in replies] == [200, 200]
    runs = [shared_run(reply.text, other) for reply, other in zip(replies, reversed(prompts), strict=True)]
    assert max(map(len, runs)) >= LEAK


@VERSIONS
def test_unguarded_a_transfer_one_page_short_is_answered_all_the_same(clusters, version):
    cluster = on(clusters, version, guarded=False)
    prompt = secret(600, random.Random(2))
    (cluster.fault_dir / "short_transfer").write_text("on")
    _, decode = cluster.pair(prompt, 256)
    (cluster.fault_dir / "short_transfer").unlink()
    assert decode.status == 200
    assert decode.text != echo(prompt, 256)
    # What was read from pages that did arrive is right.
    assert decode.text[:200] == echo(prompt, 200)


@VERSIONS
@pytest.mark.parametrize("word", ["row", "freed"])
@pytest.mark.parametrize("pair", [pytest.param({}, id="step-by-step"), pytest.param({"page_size": 1, "overlap": True}, id="overlap-page-1")])
def test_a_running_request_loses_a_page(clusters, version, word, pair):
    """One request's row points at another's page, or its page is freed under it: that request alone ends, and every page comes back, once."""
    cluster = on(clusters, version, **pair)
    rng = random.Random(word)
    prompts = [secret(300, rng) for _ in range(3)]
    control = cluster.fault_dir / "stray_page"
    started = threading.Timer(1.0, control.write_text, [word])
    started.start()
    replies = run_concurrently([lambda p=p: cluster.complete(p, 500, timeout=60) for p in prompts])
    started.join()
    control.unlink()
    failed = [reply for reply in replies if reply.status != 200]
    assert len(failed) == 1, replies
    refused(failed[0], *(("foreign",) if word == "row" else ("freed", "foreign")))
    for reply, prompt in zip(replies, prompts, strict=True):
        if reply is not failed[0]:
            exact(reply, prompt, 500)
    cluster.wait_idle()
    prompt = secret(700, rng)
    exact(cluster.complete(prompt, 40), prompt, 40)
    assert "a page is free twice" not in cluster.decode.log_text()


@pytest.mark.parametrize("version", ["0.5.18", *OLDER[1:], pytest.param("0.5.23", marks=pytest.mark.full)], indirect=True)
@pytest.mark.parametrize("cached", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_prompt_loses_a_page_between_two_chunks(clusters, version, cached):
    """On prefill: the prompt alone ends, on both nodes, and every page comes back."""
    flags = ["--chunked-prefill-size", "512", *([] if cached else ["--disable-radix-cache"])]
    cluster = on(clusters, version, guard=True, overlap=True, common_args=flags)  # the admission guard tells decode
    rng = random.Random(12)
    control = cluster.fault_dir / "stray_page"
    control.write_text("chunk")
    prompts = [secret(3000, rng), secret(3000, rng)]
    replies = run_concurrently([lambda p=p: cluster.pair(p, 40, timeout=60) for p in prompts])
    control.unlink()
    assert "stray_page: chunk" in cluster.prefills[0].log_text()
    failed = [reply for reply in replies if reply[1].status != 200]
    assert len(failed) == 1, replies
    for reply in failed[0]:
        refused(reply, "prefix" if cached else "freed")
    for (_, decode), prompt in zip(replies, prompts, strict=True):
        if decode.status == 200:
            exact(decode, prompt, 40)
    cluster.wait_idle()
    assert len(lines(cluster.prefills[0])) == 1
    for prompt in (secret(3000, rng), secret(3000, rng)):  # the prefix of the one that failed is refused until it is evicted
        exact(cluster.complete(prompt, 40), prompt, 40)


@VERSIONS
def test_a_page_that_two_requests_own(clusters, version):
    """The allocator hands one page out twice: whoever had it first is ended, whoever has it now is right."""
    cluster = on(clusters, version)
    rng = random.Random(4)
    prompts = [secret(60, rng) for _ in range(2)]
    control = cluster.fault_dir / "stray_page"
    control.write_text("twice")
    replies = run_concurrently([lambda p=p: cluster.complete(p, 300, timeout=60) for p in prompts])
    control.unlink()
    for reply, prompt in zip(replies, prompts, strict=True):
        if reply.status == 200:
            exact(reply, prompt, 300)
        else:
            refused(reply, "foreign")
    assert sorted(reply.status for reply in replies) == [200, 500], replies


@VERSIONS
@pytest.mark.parametrize("guarded", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_page_lent_anew_after_an_abort(clusters, version, guarded):
    """An abort gives a page of another, running request back, and the next request gets it. Unguarded, the running one's answer is wrong."""
    cluster = on(clusters, version, guarded=guarded, fresh=not guarded)  # SGLang's pool does not survive that unguarded
    rng = random.Random(9)
    running, newcomer = secret(300, rng), secret(900, rng)
    replies = {}
    threads = [
        threading.Thread(target=lambda: replies.update(running=cluster.complete(running, 1200, timeout=90))),
        threading.Thread(target=cluster.pair, args=(secret(500, rng), 1200), kwargs={"rid": f"aborted-{guarded}", "timeout": 60}),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.5)
    control = cluster.fault_dir / "stray_page"
    control.write_text("lent")
    for node in cluster.nodes:
        node.post("/abort_request", {"rid": f"aborted-{guarded}"})
    while "stray_page: lent" not in cluster.decode.log_text():
        time.sleep(0.02)
    exact(cluster.complete(newcomer, 100, timeout=60), newcomer, 100)
    for thread in threads:
        thread.join()
    control.unlink()
    if not guarded:
        assert replies["running"].status == 200 and replies["running"].text != echo(running, 1200)
        return
    refused(replies["running"], "foreign")
    cluster.wait_idle()
    exact(cluster.complete(newcomer, 100), newcomer, 100)


@VERSIONS
def test_a_transfer_one_page_short(clusters, version):
    cluster = on(clusters, version)
    rng = random.Random(5)
    control = cluster.fault_dir / "short_transfer"
    control.write_text("on")
    for size, n in ((700, 24), (1000, 24), (640, 1)):  # the last has no forward pass on decode
        refused(cluster.complete(secret(size, rng), n), "unwritten")
    control.unlink()
    prompt = secret(700, rng)
    exact(cluster.complete(prompt, 24), prompt, 24)
    cluster.wait_idle()


@VERSIONS
def test_healthy_traffic_alarms_nobody(clusters, version):
    cluster = on(clusters, version)
    before = [len(lines(node)) for node in cluster.nodes]
    assert healthy(cluster, 120, seed=6) == []
    rng = random.Random(7)
    system = secret(900, rng)  # many requests over one cached prefix, then others that evict it
    prompts = [system + secret(rng.randrange(1, 400), rng) for _ in range(24)] + [secret(3000, rng) for _ in range(6)]
    prompts += [system + secret(rng.randrange(1, 400), rng) for _ in range(12)]
    replies = run_concurrently([lambda p=p: cluster.complete(p, 40, timeout=120) for p in prompts], 8)
    for reply, prompt in zip(replies, prompts, strict=True):
        exact(reply, prompt, 40)
    cluster.wait_idle()
    assert [len(lines(node)) for node in cluster.nodes] == before
    for node in cluster.nodes:
        assert "pd-guard fault" not in node.log_text()


@VERSIONS
def test_turns_of_a_conversation(clusters, version):
    """With the overlap scheduler, as SGLang runs by default, a request may end while its next step runs: its last token's KV is cached too."""
    cluster = on(
        clusters, version, page_size=1, overlap=True,
        decode_args=["--disaggregation-decode-enable-radix-cache"],
    )  # fmt: skip
    rng = random.Random(11)
    before, turn = len(lines(cluster.decode)), secret(400, rng)
    for n in (40, 41, 70):
        exact(cluster.complete(turn, n), turn, n)  # ends by its length
        turn += echo(turn, n) + secret(20, rng)
        answer = echo(turn, n)
        reply = cluster.complete(turn, 200, stop=answer[-4:])
        assert (reply.status, reply.text) == (200, answer[: answer.index(answer[-4:])])
        turn += answer[: answer.index(answer[-4:]) + 4] + secret(20, rng)
    assert len(lines(cluster.decode)) == before
    cluster.wait_idle()


@pytest.mark.full
@VERSIONS
def test_a_retracted_request_loses_a_page(clusters, version):
    """Found when it goes: it ends when it comes back, and gives back what is its own."""
    cluster = on(
        clusters, version, decode_tokens=3072, env=FAULTS | {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
        decode_args=["--num-reserved-decode-tokens", "16"],
    )  # fmt: skip
    rng = random.Random(1)
    prompts, n = [secret(rng.randrange(90, 110), rng) for _ in range(12)], 260
    control = cluster.fault_dir / "stray_page"
    control.write_text("retracted")
    replies = run_concurrently([lambda p=p: cluster.complete(p, n, timeout=120) for p in prompts])
    control.unlink()
    assert "stray_page: retracted" in cluster.decode.log_text()
    failed = [reply for reply in replies if reply.status != 200]
    assert len(failed) == 1, replies
    refused(failed[0], "foreign")
    for reply, prompt in zip(replies, prompts, strict=True):
        if reply is not failed[0]:
            exact(reply, prompt, n)
    cluster.wait_idle()
    exact(cluster.complete(prompts[0], 40), prompts[0], 40)
    assert "a page is free twice" not in cluster.decode.log_text()


@pytest.mark.full
@VERSIONS
def test_turns_after_a_retraction(clusters, version):
    """What a resumed request offers to decode's prefix cache, the conversation's next turn may read."""
    cluster = clusters(
        version, guard=True, page_size=1, decode_tokens=3072, env={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
        decode_args=["--num-reserved-decode-tokens", "16", "--disaggregation-decode-enable-radix-cache"],
    )  # fmt: skip
    rng = random.Random(1)
    prompts, n = [secret(rng.randrange(90, 110), rng) for _ in range(12)], 260
    replies = run_concurrently([lambda p=p: cluster.complete(p, n, timeout=120) for p in prompts])
    for reply, prompt in zip(replies, prompts, strict=True):
        exact(reply, prompt, n)
    assert "Retract requests" in cluster.decode.log_text()
    for prompt in prompts:
        turn = prompt + echo(prompt, n) + "next turn"
        exact(cluster.complete(turn, 20, timeout=60), turn, 20)
    cluster.wait_idle()


@pytest.mark.full
@pytest.mark.timeout(600 + 60 * SOAK_MINUTES)
@VERSIONS
def test_mixed_traffic_alarms_nobody(clusters, version):
    """All guards, small pools, small chunks, the prefix cache on both nodes, clients that leave: PD_GUARD_SOAK_MINUTES, 2 by default.

    0.5.18 ("KV cache is full! Bug in memory estimation") and 0.5.20 ("FULL segment release hit lock_ref=0") by themselves end their decode within
    minutes of that, so it has no prefix cache there.
    """
    cached = [] if version in ("0.5.18", "0.5.20") else ["--disaggregation-decode-enable-radix-cache"]
    cluster = clusters(
        version, guard=True, overlap=True, decode_tokens=4096, prefill_tokens=4096, common_args=["--chunked-prefill-size", "512"],
        decode_args=["--num-reserved-decode-tokens", "64", *cached],
    )  # fmt: skip
    end = time.monotonic() + 60 * SOAK_MINUTES
    rng = random.Random(8)
    systems = [secret(size, rng) for size in (64, 500, 1200)]
    wrong, answered = [], []

    def client(seed: int) -> None:
        mine = random.Random(seed)
        while time.monotonic() < end:
            prompt = mine.choice(["", *systems]) + secret(mine.randrange(1, 900), mine)
            n, leaves = mine.choice([1, 24, 200]), mine.random() < 0.15
            reply = cluster.complete(prompt, n, timeout=mine.uniform(0.05, 1) if leaves else 60 * SOON)
            if reply.status == 200:
                answered.append(reply)
            if (reply.status, reply.text) != (200, echo(prompt, n)) and not (leaves and reply.status is None):
                wrong.append((len(prompt), n, reply))

    run_concurrently([lambda seed=seed: client(seed) for seed in range(8)], 8)
    for node in cluster.nodes:
        assert lines(node) == []
        assert "pd-guard fault" not in node.log_text()
    assert wrong == []
    assert len(answered) > 100
    cluster.wait_idle(30)
